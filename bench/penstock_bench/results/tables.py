"""Results as CSV and as Markdown tables. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from penstock_bench.results.published import TABLE_BATCH, TABLE_CORES, published_table
from penstock_bench.results.results import OURS, BenchResults, SettingResult

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


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def against_published(results: BenchResults) -> str:
    """The judged lengths with the published figures, as Markdown."""
    by_tokens = {
        result.tokens: result
        for result in results.settings
        if result.cores == results.judged_cores and result.batch == TABLE_BATCH
    }
    rows = []
    for verdict in results.verdicts:
        result = by_tokens[verdict.tokens]
        published = published_table().get(verdict.tokens)
        rows.append(
            [
                str(verdict.tokens),
                f"{result.ours.per_second:.1f}",
                "" if result.baseline is None else f"{result.baseline.per_second:.1f}",
                "" if verdict.ratio is None else f"{verdict.ratio:.2f}",
                "" if published is None else f"{published.infinity_per_second:g}",
                "" if published is None else f"{published.transformers_per_second:g}",
                "" if published is None else f"{published.ratio:.2f}",
                *_latency_cells(result),
                {True: "pass", False: "FAIL", None: "not judged"}[verdict.passed],
                verdict.reason,
            ]
        )
    header = (
        "tokens", "ours req/s", "transformers req/s", "ratio", "Infinity req/s (2022)", "transformers req/s (2022)",
        "ratio (2022)", "ours p50 ms", "p95 ms", "p99 ms", "", "why",
    )  # fmt: skip
    return markdown_table(header, rows)


def _latency_cells(result: SettingResult) -> list[str]:
    latency = result.ours.latency
    return ["", "", ""] if latency is None else [f"{value:.2f}" for value in (latency.p50, latency.p95, latency.p99)]
