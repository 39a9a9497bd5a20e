"""The experiment end to end: on a server given by URL, and on an endpoint's file compared with plain transformers."""

from __future__ import annotations

import csv
import json
import socket
import threading
from pathlib import Path

import psutil
import pytest

from penstock.errors import HostError, OutOfDisk, PenstockError, SpecError
from penstock_bench import BenchOptions, BenchProgress, BenchResults, run_bench
from penstock_bench.cell import MeasurementFailed
from penstock_bench.results import BASELINE, OURS
from penstock_bench.server import free_port
from penstock_runtime.host import read_host
from tests.shortened import shortened

from .conftest import StartStub


def options(target: object, output: Path, **values: object) -> BenchOptions:
    return BenchOptions.model_validate(
        {"target": str(target), "output": output, "seconds": 0.2, "rounds": 2, "lengths": (8, 16), **values}
    )


def test_a_server_given_by_url_is_measured_without_changes(start_stub: StartStub, tmp_path: Path) -> None:
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


def test_lengths_that_are_too_short_for_the_task_are_left_out(start_stub: StartStub, tmp_path: Path) -> None:
    run = options(start_stub().url, tmp_path, task="text-ranking", lengths=(4, 5), batches=(1,), rounds=1)

    results = run_bench(run)

    assert [one.tokens for one in results.settings] == [5]
    assert "4 tokens: the shortest input of this task has 5 with this tokenizer" in results.left_out


def test_results_are_written_in_three_formats(start_stub: StartStub, tmp_path: Path) -> None:
    server = start_stub()
    output = tmp_path / "deep" / "out"

    results = run_bench(options(server.url, output, task="text-classification", batches=(1,), lengths=(8,)))

    assert BenchResults.model_validate_json((output / "results.json").read_text()) == results
    with (output / "results.csv").open(newline="") as file:
        assert [row["server"] for row in csv.DictReader(file)] == [OURS]
    assert (output / "report.html").read_text().startswith("<!doctype html>")


def interrupted_after(count: int, run: BenchOptions) -> list[BenchProgress]:
    """A run that is interrupted after a number of measured settings; its output until then."""
    seen: list[BenchProgress] = []

    def watch(progress: BenchProgress) -> None:
        seen.append(progress)
        if sum(one.result is not None for one in seen) == count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(run, watch)
    return seen


def test_an_interrupted_run_continues_after_its_last_cell(start_stub: StartStub, tmp_path: Path) -> None:
    run = options(start_stub().url, tmp_path, task="fill-mask", batches=(1, 2))
    before = interrupted_after(3, run)
    seen: list[BenchProgress] = []

    results = run_bench(run, seen.append)

    assert [one.result for one in [*before, *seen] if one.result is not None] == list(results.settings)
    assert (seen[0].done, seen[-1].done, results.finished) == (3, 4, True)
    assert "interrupted after 3 of 4 settings, and gone on with" in results.notes


@pytest.mark.parametrize(
    "changed", [{"seconds": 0.3}, {"lengths": (8, 32)}, {"fresh": True}], ids=["seconds", "lengths", "fresh"]
)
def test_another_experiment_starts_from_the_beginning_and_keeps_the_old_results(
    changed: dict[str, object], start_stub: StartStub, tmp_path: Path
) -> None:
    values = {"task": "fill-mask", "batches": (1,)}
    server = start_stub()
    interrupted_after(1, options(server.url, tmp_path, **values))
    measured = BenchResults.model_validate_json((tmp_path / "results.json").read_text())

    results = run_bench(options(server.url, tmp_path, **values, **changed))
    (aside,) = (one for one in tmp_path.iterdir() if one.is_dir())

    assert (len(results.settings), results.notes) == (2, measured.notes)
    assert BenchResults.model_validate_json((aside / "results.json").read_text()) == measured
    assert sorted(one.name for one in aside.iterdir()) == ["report.html", "results.csv", "results.json"]


def test_a_finished_run_is_measured_again_and_set_aside_each_time(start_stub: StartStub, tmp_path: Path) -> None:
    run = options(start_stub().url, tmp_path, task="fill-mask", batches=(1,), lengths=(8,))
    for _ in range(3):
        run_bench(run)

    assert len([one for one in tmp_path.iterdir() if one.is_dir()]) == 2


def test_failing_requests_are_reported_not_raised(start_stub: StartStub, tmp_path: Path) -> None:
    server = start_stub(status=503)

    results = run_bench(options(server.url, tmp_path, task="fill-mask", batches=(1,), lengths=(8,)))

    ours = results.settings[0].ours
    assert ours.latency is None
    assert set(ours.failures) == {"503"}
    assert not results.answered
    assert "503" in (tmp_path / "report.html").read_text()


def test_requests_that_fail_among_others_are_reported_at_once(start_stub: StartStub, tmp_path: Path) -> None:
    server = start_stub(status=429, habit="turns")
    lines: list[str] = []
    run = options(server.url, tmp_path, task="fill-mask", batches=(1,), lengths=(8,))

    ours = run_bench(run, lambda progress: lines.append(progress.message)).settings[0].ours

    assert ours.latency is not None
    assert lines[-1].endswith(
        f", {ours.failed:,} of {ours.failed + ours.latency.count:,} requests failed ({ours.first_failure})"
    )
    assert ours.first_failure.startswith("429 ")


@pytest.mark.parametrize(
    ("target", "values", "message"),
    [
        ("https://example.org", {}, "cannot be measured"),
        ("http://", {}, "cannot be measured"),
        ("ftp://example.org", {}, "cannot be measured"),
        ("http://127.0.0.1/predict?model=b", {}, "cannot be measured"),
        ("http://[::1", {}, r"http://\[::1 cannot be measured"),
        ("http://127.0.0.1:99999", {}, "cannot be measured"),
        ("http://127.0.0.1:http", {}, "cannot be measured"),
        ("http://user:word@127.0.0.1", {}, "cannot be measured"),
        ("", {}, "nothing is named that is to be measured"),
        ("missing.yaml", {}, "missing.yaml"),
    ],
)
def test_an_experiment_that_cannot_be_measured_is_an_error_with_a_message(
    target: str, values: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PenstockError, match=message):
        run_bench(options(target, tmp_path, **values))


@pytest.mark.parametrize(
    ("host", "words"), [("127.0.0.1", "connection refused"), ("no-such-host.invalid", "no such host")]
)
def test_an_unreachable_server_is_reported_as_unreachable(host: str, words: str, tmp_path: Path) -> None:
    url = f"http://{host}:{free_port()}"

    with pytest.raises(MeasurementFailed, match=f"nothing answers at {url}: {words}") as caught:
        run_bench(options(url, tmp_path, task="text-classification"))

    assert caught.value.remedy == "Start the server, or check the host and the port"


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b"", "it closed the connection without an answer"), (b"+OK ready\r\n", "what answers there does not speak HTTP")],
)
def test_a_server_that_does_not_speak_http_is_reported(answer: bytes, words: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(MeasurementFailed, match=words):
            run_bench(options(f"http://127.0.0.1:{listening.getsockname()[1]}", tmp_path))
        thread.join(10)


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured() -> None:
    with pytest.raises(HostError, match="the folder /proc/bench cannot be written") as caught:
        run_bench(options("missing.yaml", Path("/proc/bench")))

    assert "--output" in caught.value.remedy


def test_results_on_a_full_disk_are_an_error_with_a_message(start_stub: StartStub, tmp_path: Path) -> None:
    (tmp_path / ".results.json.draft").symlink_to("/dev/full")

    with pytest.raises(OutOfDisk, match=f"the folder {tmp_path} cannot take more: No space left on device"):
        run_bench(options(start_stub().url, tmp_path, task="fill-mask", batches=(1,), lengths=(8,)))


def test_a_server_that_does_not_report_its_task_needs_the_flag(start_stub: StartStub, tmp_path: Path) -> None:
    server = start_stub()

    with pytest.raises(SpecError, match=r"does not name the task\. Give --task"):
        run_bench(options(server.url, tmp_path))
    with pytest.raises(SpecError, match="'poetry' is no task"):
        run_bench(options(server.url, tmp_path, task="poetry"))


@pytest.mark.slow
def test_a_run_ends_when_its_own_server_dies_and_continues_there_the_next_time(
    tiny_endpoint: Path, tmp_path: Path
) -> None:
    values = {"cores": (1,), "batches": (1,), "store": tmp_path / "store"}

    def kill_server(progress: BenchProgress) -> None:
        if progress.result is not None:
            (server,) = (one for one in psutil.Process().children() if "serve" in one.cmdline())
            server.kill()

    with shortened():
        with pytest.raises(MeasurementFailed, match=r"ended while it was measured \(killed by signal 9 "):
            run_bench(options(tiny_endpoint, tmp_path / "out", **values), kill_server)
        before = BenchResults.model_validate_json((tmp_path / "out" / "results.json").read_text())
        results = run_bench(options(tiny_endpoint, tmp_path / "out", **values))

    assert ([one.tokens for one in before.settings], before.finished) == ([8], False)
    assert results.settings[0] == before.settings[0]
    assert all(one.ours.latency is not None for one in results.settings)


@pytest.mark.slow
@pytest.mark.parity
def test_an_endpoint_is_compared_with_plain_transformers(tiny_endpoint: Path, tmp_path: Path) -> None:
    cores = read_host().usable
    lines: list[str] = []

    with shortened():
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
    assert results.served[0].plan.startswith("onnxruntime-fp32")
    assert (results.target, results.task.value) == ("tiny", "text-classification")
    assert any(line.startswith("optimising tiny for 1 core") for line in lines)
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["settings"]) == 2
