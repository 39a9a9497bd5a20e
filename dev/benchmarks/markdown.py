"""Results of `penstock bench` as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock_bench.judge import published_table
from penstock_bench.results import BenchResults, SettingResult


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def against_published(results: BenchResults) -> str:
    """The judged lengths with the published figures, as Markdown."""
    by_tokens = results.judged
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
