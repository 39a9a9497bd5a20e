"""The experiment as one self-contained page, in the style of the optimisation report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from penstock_bench.judge import QUIET_ENOUGH, LengthVerdict, published_source, published_table
from penstock_bench.results import BASELINE, OURS, BenchResults, SettingResult
from penstock_report.charts import Series, latency_chart, short, swatch
from penstock_report.page import document

NOISY_SHARE = 0.08
"""Other processes took more than this of the server's CPUs: worth a warning."""
SLOWER_SPREAD = 0.15
"""Rounds of one setting that differ by more than this: worth a warning."""


def render(results: BenchResults) -> str:
    """The whole page as HTML: no scripts, and nothing loaded from anywhere."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    judged = results.judged
    series = _series(judged)
    html = template.render(
        results=results,
        headline=headline(results),
        tiles=_tiles(results),
        remarks=remarks(results),
        where=_where(results),
        # The charts escape the texts in them.
        latency_chart=Markup(latency_chart(series)) if judged else "",  # noqa: S704
        legend=[(Markup(swatch(one)), one.name, one.emphasis) for one in series],  # noqa: S704
        verdicts=[_verdict_row(verdict, judged) for verdict in results.verdicts],
        source=published_source(),
        throughput=_throughput(results),
        latencies=_latencies(results),
    )
    return document(f"{results.target} · Penstock benchmark", html)


def headline(results: BenchResults) -> str:
    """The outcome in a sentence."""
    verdicts = results.verdicts
    if not verdicts:
        return "Nothing was measured that the published table can be held against."
    missed = [verdict.tokens for verdict in verdicts if verdict.passed is False]
    judged = [verdict for verdict in verdicts if verdict.passed is not None]
    if not judged:
        noisy = results.foreign_share is not None and results.foreign_share > QUIET_ENOUGH
        why = "the machine was too busy" if noisy else "the figures are held against a baseline in the same run"
        return f"Measured, not judged: {why}."
    if not missed:
        return f"What is asked for on this CPU is reached at all {len(judged)} lengths that were judged."
    lengths = ", ".join(map(str, missed))
    return f"What is asked for on this CPU is missed at {len(missed)} of {len(judged)} lengths: {lengths} tokens."


def remarks(results: BenchResults) -> list[str]:
    """Warnings about the figures, the most important first."""
    found: list[str] = []
    if not results.finished:
        found.append(
            f"This run is not finished: {len(results.settings)} of {results.planned} settings were measured, and the "
            "same command goes on from there."
        )
    share = results.foreign_share
    if share is not None and share > NOISY_SHARE:
        found.append(
            f"Other processes took up to {share:.0%} of the servers' CPUs: measure again on a quiet machine before "
            "trusting differences under that."
        )
    unsteady = [
        f"{result.setting.label} ({name})"
        for result in results.settings
        for name, figures in result.figures.items()
        if figures.spread > SLOWER_SPREAD
    ]
    if unsteady:
        shown = "; ".join(unsteady[:3]) + (f" and {len(unsteady) - 3} more" if len(unsteady) > 3 else "")
        found.append(f"The rounds differ by more than {SLOWER_SPREAD:.0%} in {len(unsteady)} series: {shown}.")
    failed = [figures for result in results.settings for figures in result.figures.values() if figures.failed]
    if failed:
        first = next((figures.first_failure for figures in failed if figures.first_failure), "")
        kinds = ", ".join(sorted({kind for figures in failed for kind in figures.failures}))
        detail = f"the first answer of that kind: {first}" if first else f"no answer came ({kinds})"
        found.append(f"Requests failed in {len(failed)} series; {detail}.")
    found += [_sentence(note) for note in results.notes]
    if results.left_out:
        found.append(f"Not measured: {'; '.join(results.left_out)}.")
    return found


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _where(results: BenchResults) -> str:
    cores = results.judged_cores
    return "" if not cores else " on 1 core" if cores == 1 else f" on {cores} cores"


def _series(judged: dict[int, SettingResult]) -> list[Series]:
    """Ours, the baseline, the forward pass alone, and the published ones."""
    published = {tokens: row for tokens, row in published_table().items() if tokens in judged}
    ours = {tokens: one.ours.latency.p50 for tokens, one in judged.items() if one.ours.latency}
    plain = {
        tokens: one.baseline.latency.p50 for tokens, one in judged.items() if one.baseline and one.baseline.latency
    }
    floor = {tokens: one.floor_milliseconds for tokens, one in judged.items() if one.floor_milliseconds}
    series = [
        Series(OURS, 1, ours, "chosen"),
        Series("plain transformers behind FastAPI", 0, plain, "reference"),
        Series("forward pass alone, fastest engine", 3, floor, "other"),
        Series(
            "Infinity, published",
            2,
            {tokens: 1e3 / row.infinity_per_second for tokens, row in published.items()},
            "other",
        ),
        Series(
            "transformers, published",
            7,
            {tokens: 1e3 / row.transformers_per_second for tokens, row in published.items()},
            "other",
        ),
    ]
    return [one for one in series if one.latency]


def _tiles(results: BenchResults) -> list[tuple[str, str]]:
    judged = results.judged
    ratios = [verdict.ratio for verdict in results.verdicts if verdict.ratio is not None]
    tiles: list[tuple[str, str]] = []
    if ratios and results.passed is not None:
        low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
        tiles.append((f"{low}×" if low == high else f"{low}-{high}×", "plain transformers, over the lengths"))
    if judged:
        shortest, longest = judged[min(judged)], judged[max(judged)]
        tiles += [
            (f"{short(one.ours.latency.p50)} ms", f"median at {one.tokens} tokens{_where(results)}")
            for one in ((shortest, longest) if shortest is not longest else (shortest,))
            if one.ours.latency is not None
        ]
    best = max((result.ours.per_second * result.batch for result in results.settings), default=0.0)
    if best:
        tiles.append((short(best), "texts per second at most"))
    return tiles


def _verdict_row(verdict: LengthVerdict, judged: dict[int, SettingResult]) -> dict[str, Any]:
    result = judged[verdict.tokens]
    row = published_table().get(verdict.tokens)
    word, style = {True: ("pass", "pass"), False: ("missed", "fail"), None: ("not judged", "small")}[verdict.passed]
    return {
        "tokens": verdict.tokens,
        "ours": short(result.ours.per_second),
        "baseline": "-" if result.baseline is None else short(result.baseline.per_second),
        "ratio": "-" if verdict.ratio is None else f"{verdict.ratio:.2f}",
        "infinity": "-" if row is None else short(row.infinity_per_second),
        "transformers": "-" if row is None else short(row.transformers_per_second),
        "published": "-" if row is None else f"{row.ratio:.2f}",
        "p50": short(verdict.milliseconds),
        "floor": "-" if verdict.floor_milliseconds is None else short(verdict.floor_milliseconds),
        "word": word,
        "style": style,
        "reason": verdict.reason,
    }


@dataclass(frozen=True)
class _Cell:
    rate: str
    ratio: str = ""
    best: bool = False


def _throughput(results: BenchResults) -> list[dict[str, Any]]:
    """One table for each number of cores."""
    tables = []
    for cores in sorted({result.cores for result in results.settings}):
        of_cores = [result for result in results.settings if result.cores == cores]
        batches = sorted({result.batch for result in of_cores})
        rows = []
        for tokens in sorted({result.tokens for result in of_cores}):
            by_batch = {result.batch: result for result in of_cores if result.tokens == tokens}
            rows.append({"tokens": tokens, "cells": _cells(by_batch, batches)})
        title = "Throughput" if not cores else "Throughput on 1 core" if cores == 1 else f"Throughput on {cores} cores"
        has_ratio = any(result.ratio is not None for result in of_cores)
        tables.append({"title": title, "batches": batches, "rows": rows, "has_ratio": has_ratio})
    return tables


def _cells(by_batch: dict[int, SettingResult], batches: Sequence[int]) -> list[_Cell]:
    rates = {batch: result.ours.per_second * batch for batch, result in by_batch.items()}
    best = max(rates, key=lambda batch: rates[batch])
    return [
        _Cell("")
        if batch not in by_batch
        else _Cell(
            short(rates[batch]),
            "" if (ratio := by_batch[batch].ratio) is None else f"{ratio:.2f}×",
            best=batch == best and len(rates) > 1,
        )
        for batch in batches
    ]


def _latencies(results: BenchResults) -> list[list[str]]:
    rows = []
    for result in results.settings:
        for name, figures in result.figures.items():
            latency = figures.latency
            values = ["-"] * 7 if latency is None else [short(value) for value in latency.columns]
            rows.append(
                [
                    "plain transformers" if name == BASELINE else name,
                    str(result.cores or ""),
                    str(result.tokens),
                    str(result.batch),
                    *values,
                    str(latency.count if latency else 0),
                    f"{figures.spread:.0%}",
                ]
            )
    return rows
