"""The folder of results: written after every setting in one piece, found again after an interruption, set aside when
another experiment comes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from penstock_bench.judge import TABLE_BATCH, TABLE_CORES, published_table
from penstock_bench.report import render
from penstock_bench.results import OURS, BenchResults
from penstock_runtime.host.disk import prepare_folder, translate_full_disk

RESULTS, TABLE, REPORT = "results.json", "results.csv", "report.html"
WHAT = "the folder"
"""In errors about it."""


class ResultsFolder:
    """`results.json` (everything), `results.csv`, `report.html`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Make the folder; HostError, before anything is measured, when nothing can be written there."""
        prepare_folder(self.path, what=WHAT, option="--output")

    def read(self) -> BenchResults | None:
        """The results of an earlier run; None without one, or if another version of Penstock wrote them."""
        try:
            return BenchResults.model_validate_json((self.path / RESULTS).read_bytes())
        except (OSError, ValidationError):
            return None

    def unfinished(self, experiment: str) -> BenchResults | None:
        """The settings that an interrupted run of the same experiment has measured."""
        earlier = self.read()
        same = earlier is not None and earlier.experiment == experiment and not earlier.finished
        return earlier if same else None

    def set_aside(self) -> Path | None:
        """Move the files of an earlier run into a new folder next to them, and return it; None where there are none."""
        files = [file for name in (RESULTS, TABLE, REPORT) if (file := self.path / name).exists()]
        if not files:
            return None
        earlier = self.read()
        name = "earlier" if earlier is None else earlier.created.partition("+")[0].replace(":", "-")
        number = 1
        while (aside := self.path / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        with translate_full_disk(self.path, what=WHAT):
            aside.mkdir()
            for file in files:
                file.rename(aside / file.name)
        return aside

    def write(self, results: BenchResults) -> None:
        """All three files, each written atomically: a reader at any time, also after a crash, finds the
        one before or this one."""
        contents: Mapping[str, str] = {
            RESULTS: results.model_dump_json(indent=1),
            TABLE: to_csv(results),
            REPORT: render(results),
        }
        with translate_full_disk(self.path, what=WHAT):
            for name, content in contents.items():
                draft = self.path / f".{name}.draft"
                draft.write_text(content, encoding="utf-8")
                draft.replace(self.path / name)


COLUMNS = (
    "server", "cores", "tokens", "batch", "requests_per_second", "texts_per_second", "spread",
    "latency_min_ms", "latency_avg_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms",
    "latency_max_ms", "samples", "failures", "ratio_to_baseline", "engine_floor_ms", "server_cores", "foreign_cores",
    "published_infinity_rps", "published_transformers_rps",
)  # fmt: skip


def to_csv(results: BenchResults) -> str:
    """One line for each server and setting. The published columns are filled where the published table has the
    setting (2 cores, batch 1; DistilBERT on another CPU)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results.settings:
        for server, figures in result.figures.items():
            latency = figures.latency
            published = published_table().get(result.tokens)
            if (result.cores, result.batch) != (TABLE_CORES, TABLE_BATCH):
                published = None
            ratio = result.ratio if server == OURS else None
            values: list[float | None] = [
                figures.per_second,
                figures.per_second * result.batch,
                figures.spread,
                *((None,) * 7 if latency is None else latency.columns),
            ]
            writer.writerow(
                [
                    server,
                    result.cores or "",
                    result.tokens,
                    result.batch,
                    *map(_number, values),
                    0 if latency is None else latency.count,
                    figures.failed,
                    _number(ratio),
                    _number(result.floor_milliseconds if server == OURS else None),
                    _number(figures.server_cores),
                    _number(figures.foreign_cores),
                    "" if published is None else f"{published.infinity_per_second:g}",
                    "" if published is None else f"{published.transformers_per_second:g}",
                ]
            )
    return text.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
