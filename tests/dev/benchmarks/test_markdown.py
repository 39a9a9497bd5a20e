"""Results as Markdown tables."""

from __future__ import annotations

from benchmarks.markdown import against_published, markdown_table
from penstock_bench.judge import published_table
from tests.bench.results_sample import sample_results


def test_markdown_table_of_the_judged_lengths() -> None:
    lines = against_published(sample_results(ratio=7.0)).splitlines()

    assert len(lines) == 2 + len(published_table())
    assert "| 8 | 248.0 | 35.4 | 7.00 | 248 | 49 | 5.06 |" in lines[2]
    assert "FAIL" in lines[2]
    assert "| pass | 7.00x, 3.46x asked for |" in lines[5]


def test_markdown_table_has_as_many_columns_as_its_header() -> None:
    assert markdown_table(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"
