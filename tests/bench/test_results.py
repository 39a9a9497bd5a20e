"""Results: what is judged, and the content of tables and page."""

from __future__ import annotations

import csv
import io
import re

import pytest

from penstock.hardware import CpuIdentity
from penstock_bench.folder import COLUMNS, to_csv
from penstock_bench.judge import published_table
from penstock_bench.report import headline, remarks, render
from penstock_bench.results import BASELINE, OURS, BenchResults
from tests.bench.results_sample import VNNI, ZEN3, figures, sample_results


def rows_of(results: BenchResults) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(results))))


@pytest.mark.parametrize(
    ("cpu", "ratio", "passed"), [(VNNI, 9.0, True), (VNNI, 7.5, False), (ZEN3, 5.1, True), (ZEN3, 4.9, False)]
)
def test_the_rule_of_the_cpu_decides(cpu: CpuIdentity, ratio: float, *, passed: bool) -> None:
    assert sample_results(cpu=cpu, ratio=ratio).passed is passed


def test_without_a_baseline_only_floors_can_be_judged() -> None:
    assert sample_results(baseline=False).passed is None
    assert {verdict.tokens: verdict.passed for verdict in sample_results(cpu=ZEN3, baseline=False).verdicts} == {
        8: None,
        16: None,
        32: None,
        64: True,
        128: True,
        256: True,
        384: True,
        512: True,
    }


def test_other_numbers_of_cores_are_judged_where_two_were_not_measured() -> None:
    results = sample_results()
    on_one = results.model_copy(
        update={"settings": tuple(one.model_copy(update={"cores": 1}) for one in results.settings)}
    )

    assert (results.judged_cores, on_one.judged_cores) == (2, 1)
    assert results.model_copy(update={"settings": ()}).judged_cores is None


def test_csv_has_a_line_for_each_server_and_setting() -> None:
    rows = rows_of(sample_results())

    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 8 * 2 * 2
    first = next(row for row in rows if (row["server"], row["tokens"], row["batch"]) == (OURS, "8", "1"))
    assert float(first["requests_per_second"]) == 248
    assert float(first["ratio_to_baseline"]) == 9
    assert (first["published_infinity_rps"], first["published_transformers_rps"]) == ("248", "49")
    assert float(first["latency_p50_ms"]) == pytest.approx(1e3 / 248, rel=1e-3)


def test_csv_keeps_published_figures_to_the_setting_that_was_published() -> None:
    rows = rows_of(sample_results())

    assert {row["batch"] for row in rows if row["published_infinity_rps"]} == {"1"}
    assert {row["server"] for row in rows if row["ratio_to_baseline"]} == {OURS}
    batched = next(row for row in rows if (row["server"], row["tokens"], row["batch"]) == (BASELINE, "8", "4"))
    assert float(batched["texts_per_second"]) == pytest.approx(4 * float(batched["requests_per_second"]), rel=1e-3)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (sample_results(), "is reached at all 8 lengths"),
        (sample_results(ratio=7.5), "is missed at 3 of 8 lengths: 8, 16, 32 tokens"),
        (sample_results(baseline=False), "Measured, not judged"),
        (sample_results().model_copy(update={"settings": ()}), "Nothing was measured"),
    ],
)
def test_headline(results: BenchResults, words: str) -> None:
    assert words in headline(results)


def test_remarks_warn_of_noise_failures_and_gaps() -> None:
    found = remarks(sample_results(foreign=0.5, failures=3))

    assert found[0].startswith("Other processes took up to 25% of the servers' CPUs")
    assert "Requests failed in 16 series; the first answer of that kind: 429 busy." in found
    assert found[-1] == "Not measured: 8 cores: this machine has 4."
    assert "With 4 cores the client ran on the server's CPUs." in found


def test_failures_without_an_answer_do_not_hide_those_with_one() -> None:
    results = sample_results(failures=2)
    silent = figures(100).model_copy(update={"failures": {"disconnected": 2, "timeout": 1}})
    first = results.settings[0].model_copy(update={"figures": {OURS: silent}})
    mixed = results.model_copy(update={"settings": (first, *results.settings[1:])})
    alone = results.model_copy(update={"settings": (first,)})

    assert "Requests failed in 16 series; the first answer of that kind: 429 busy." in remarks(mixed)
    assert "Requests failed in 1 series; no answer came (disconnected, timeout)." in remarks(alone)


def test_an_unfinished_run_is_marked_as_unfinished() -> None:
    measured = len(sample_results().settings)
    unfinished = sample_results().model_copy(update={"planned": 192})

    assert f"{measured} of 192 settings were measured" in remarks(unfinished)[0]


def test_a_quiet_run_has_no_warning() -> None:
    quiet = sample_results().model_copy(update={"left_out": (), "notes": ()})

    assert remarks(quiet) == []


def test_page_is_self_contained_and_has_the_results() -> None:
    page = render(sample_results())

    assert not re.findall(r"""(?:src|href)=["'](?!data:)[^"'#]""", page)
    assert "<script" not in page
    assert "at least the published ratio to plain transformers" in page
    assert "file:///models/&lt;distilbert&gt;" in page
    for row in published_table().values():
        assert f">{row.infinity_per_second:g}<" in page


@pytest.mark.parametrize(
    "results",
    [
        sample_results(baseline=False),
        sample_results().model_copy(update={"settings": ()}),
        sample_results().model_copy(update={"settings": sample_results().settings[1:2]}),
    ],
)
def test_page_of_an_unfinished_run_is_a_page(results: BenchResults) -> None:
    assert render(results).startswith("<!doctype html>")
