"""The experiment from end to end: on a server given by URL, and on an endpoint's file beside plain transformers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from penstock.errors import PenstockError, SpecError
from penstock_optimizer.bench import BenchOptions, BenchProgress, BenchResults, run_bench
from penstock_optimizer.bench.results import BASELINE, OURS
from penstock_runtime.host import read_host

from .conftest import StartStub


def options(target: object, output: Path, **values: object) -> BenchOptions:
    return BenchOptions.model_validate(
        {"target": str(target), "output": output, "seconds": 0.2, "rounds": 2, "lengths": (8, 16), **values}
    )


def test_a_server_given_by_url_is_measured_as_it_is(start_stub: StartStub, tmp_path: Path) -> None:
    server = start_stub(delay_ms=3)
    seen: list[BenchProgress] = []

    results = run_bench(options(server.url, tmp_path / "out", task="text-classification", batches=(1, 2)), seen.append)

    assert {(one.cores, one.tokens, one.batch) for one in results.settings} == {
        (0, 8, 1),
        (0, 8, 2),
        (0, 16, 1),
        (0, 16, 2),
    }
    assert all(one.ours.latency is not None and one.ours.latency.minimum >= 3 for one in results.settings)
    assert "numbers of cores: a server given by URL has those that it has" in results.left_out
    assert any("one token for each everyday English word" in note for note in results.notes)
    assert (seen[-1].done, seen[-1].total) == (4, 4)
    assert [one.result for one in seen if one.result is not None] == list(results.settings)


def test_what_was_found_is_written_in_three_forms(start_stub: StartStub, tmp_path: Path) -> None:
    server = start_stub()
    output = tmp_path / "deep" / "out"

    results = run_bench(options(server.url, output, task="text-classification", batches=(1,), lengths=(8,)))

    assert BenchResults.model_validate_json((output / "results.json").read_text()) == results
    with (output / "results.csv").open(newline="") as file:
        assert [row["server"] for row in csv.DictReader(file)] == [OURS]
    assert (output / "report.html").read_text().startswith("<!doctype html>")


def test_failing_requests_are_reported_not_raised(start_stub: StartStub, tmp_path: Path) -> None:
    server = start_stub(status=503)

    results = run_bench(options(server.url, tmp_path, task="fill-mask", batches=(1,), lengths=(8,)))

    ours = results.settings[0].ours
    assert ours.latency is None
    assert set(ours.failures) == {"503"}
    assert "503" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("target", "values", "message"),
    [
        ("https://example.org", {}, "cannot be measured"),
        ("http://", {}, "cannot be measured"),
        ("missing.yaml", {}, "missing.yaml"),
    ],
)
def test_what_cannot_be_measured_is_an_error_in_words(
    target: str, values: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PenstockError, match=message):
        run_bench(options(target, tmp_path, **values))


def test_a_server_that_does_not_tell_its_task_needs_it_told(start_stub: StartStub, tmp_path: Path) -> None:
    server = start_stub()

    with pytest.raises(SpecError, match=r"does not tell the task\. Give --task"):
        run_bench(options(server.url, tmp_path))
    with pytest.raises(SpecError, match="'poetry' is no task"):
        run_bench(options(server.url, tmp_path, task="poetry"))


@pytest.mark.slow
@pytest.mark.parity
def test_an_endpoint_is_measured_beside_plain_transformers(tiny_endpoint: Path, tmp_path: Path) -> None:
    cores = read_host().usable
    lines: list[str] = []

    results = run_bench(
        options(
            tiny_endpoint,
            tmp_path / "out",
            cores=(1, cores + 1),
            lengths=(8, 512),
            batches=(1, 2),
            baseline=True,
            store=tmp_path / "store",
        ),
        lambda progress: lines.append(progress.message),
    )

    assert [(one.cores, one.tokens, one.batch) for one in results.settings] == [(1, 8, 1), (1, 8, 2)]
    assert set(results.settings[0].figures) == {OURS, BASELINE}
    assert all(figures.failed == 0 for one in results.settings for figures in one.figures.values())
    assert results.settings[0].floor_milliseconds is not None
    assert results.settings[1].floor_milliseconds is None
    assert results.left_out == (
        f"{cores + 1} cores: this machine has {cores}",
        "512 tokens: this model takes 64",
    )
    assert results.served[0].plan.startswith("onnxruntime fp32")
    assert (results.target, results.task.value) == ("tiny", "text-classification")
    assert any(line.startswith("optimising tiny for 1 core") for line in lines)
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["settings"]) == 2
