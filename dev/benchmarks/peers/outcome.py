"""The results of the comparison as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import markdown_table
from benchmarks.peers.answers import Agreement, Cosines
from benchmarks.peers.cells import GROUPS, Aim, Cell
from penstock_bench.results import Figures
from penstock_optimizer.guard.judge import MEAN_COSINE, MIN_COSINE, P1_COSINE

BUDGET = f"{MEAN_COSINE:g} / {P1_COSINE:g} / {MIN_COSINE:g}"
"""Mean, first percentile and minimum."""
WORDS = {True: "pass", False: "FAIL", None: "not judged"}


@dataclass(frozen=True)
class Standing:
    """One server in one cell."""

    cell: Cell
    server: str
    figures: Figures


@dataclass(frozen=True)
class Outcome:
    """The whole comparison."""

    cpu: str
    cores: int
    seconds: float
    rounds: int
    servers: Mapping[str, str]
    """Name -> version and settings."""
    agreements: Mapping[str, Agreement]
    standings: Sequence[Standing]
    aims: Sequence[Aim]
    note: str = ""


def to_json(outcome: Outcome) -> str:
    """Everything."""
    return json.dumps(
        {
            **{name: getattr(outcome, name) for name in ("cpu", "cores", "seconds", "rounds", "note")},
            "servers": dict(outcome.servers),
            "agreements": {name: dataclasses.asdict(one) for name, one in outcome.agreements.items()},
            "standings": [
                {"cell": dataclasses.asdict(one.cell), "server": one.server, **one.figures.model_dump(mode="json")}
                for one in outcome.standings
            ],
            "aims": [dataclasses.asdict(one) for one in outcome.aims],
        },
        indent=1,
    )


def to_csv(outcome: Outcome) -> str:
    """One line for each server and cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["server", "clients", "tokens", "requests_per_second", "spread", "p50_ms", "p95_ms", "p99_ms", "samples",
         "failures", "server_cores", "foreign_cores", "cpu_ms_per_request", "rss_mb", "right"]
    )  # fmt: skip
    for one in outcome.standings:
        figures, latency = one.figures, one.figures.latency
        numbers = [
            figures.per_second,
            figures.spread,
            *((None,) * 3 if latency is None else (latency.p50, latency.p95, latency.p99)),
        ]
        rest = [
            figures.server_cores,
            figures.foreign_cores,
            figures.server_cpu_milliseconds,
            None if figures.server_rss_bytes is None else figures.server_rss_bytes / 1e6,
        ]
        writer.writerow(
            [
                one.server,
                one.cell.clients,
                one.cell.tokens or "mixed",
                *map(_number, numbers),
                0 if latency is None else latency.count,
                figures.failed,
                *map(_number, rest),
                _is_right(outcome, one.server),
            ]
        )
    return text.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _is_right(outcome: Outcome, server: str) -> str:
    agreement = outcome.agreements.get(server)
    return "" if agreement is None else str(agreement.right).lower()


def to_markdown(outcome: Outcome) -> str:
    """Tables for people: answers first, since a wrong server's speed means nothing."""
    parts = [
        f"{outcome.cpu}; {outcome.cores} cores for each server, medians of {outcome.rounds} rounds of "
        f"{outcome.seconds:g} s, measured in turns. {outcome.note}".strip()
    ]
    parts.append("## Answers\n\n" + _answers(outcome))
    for group, cells in GROUPS.items():
        measured = [cell for cell in cells if any(one.cell == cell for one in outcome.standings)]
        if measured:
            parts.append(
                f"## {group.capitalize()}: requests/s (p50 / p95 ms) [cores used]\n\n" + _speeds(outcome, measured)
            )
    if outcome.aims:
        rows = [[aim.cell, aim.peer, WORDS[aim.passed], aim.text] for aim in outcome.aims]
        parts.append("## Aims\n\n" + markdown_table(("cell", "against", "", "reached"), rows))
    return "\n\n".join(parts)


def _answers(outcome: Outcome) -> str:
    rows = []
    for name, about in outcome.servers.items():
        one = outcome.agreements.get(name)
        if one is None or one.alone is None or one.together is None:
            rows.append([name, about, "", "", "", one.error if one else "not asked"])
            continue
        verdict = "right" if one.right else f"WRONG: {BUDGET} are asked"
        rows.append([name, about, _cosines(one.alone), _cosines(one.together), f"{one.moved:.5f}", verdict])
    header = ("server", "what", "mean cosine / p1 / lowest, alone", "in a batch", "alone to in a batch", "")
    return markdown_table(header, rows)


def _cosines(cosines: Cosines) -> str:
    return f"{cosines.mean:.4f} / {cosines.p1:.4f} / {cosines.minimum:.4f}"


def _speeds(outcome: Outcome, cells: Sequence[Cell]) -> str:
    by_place = {(one.server, one.cell): one.figures for one in outcome.standings}
    rows = []
    for name in outcome.servers:
        mark = "" if (found := outcome.agreements.get(name)) and found.right else " (wrong answers)"
        rows.append([name + mark, *(_speed(by_place.get((name, cell))) for cell in cells)])
    return markdown_table(("server", *(cell.name for cell in cells)), rows)


def _speed(figures: Figures | None) -> str:
    if figures is None or figures.latency is None:
        return "-" if figures is None else f"failed: {figures.first_failure[:60]}"
    cores = "" if figures.server_cores is None else f" [{figures.server_cores:.1f}]"
    failed = f", {figures.failed} failed" if figures.failed else ""
    return f"{figures.per_second:.1f} ({figures.latency.p50:.1f} / {figures.latency.p95:.1f}){cores}{failed}"


def write(outcome: Outcome, folder: Path) -> None:
    """results.json, results.csv, results.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(to_json(outcome), encoding="utf-8")
    (folder / "results.csv").write_text(to_csv(outcome), encoding="utf-8")
    (folder / "results.md").write_text(to_markdown(outcome), encoding="utf-8")
