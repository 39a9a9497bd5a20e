"""Any failure in a worker is a result outside of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.errors import ModelError, OptimizationError, OutOfDisk
from penstock_optimizer.candidate.isolation import CallFailure, Worker, WorkerFailed, death_reason

TARGET = "tests.optimizer.candidate.misbehaviour:Misbehaviour"
SECONDS = 60.0


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with Worker(TARGET, log=tmp_path / "log.txt", cpus=(min(os.sched_getaffinity(0)),)) as worker:
        yield worker


def test_calls_reach_one_object_and_values_come_back(worker: Worker) -> None:
    assert worker.call("add", timeout_seconds=SECONDS, a=1, b=2) == 3
    assert worker.call("add", timeout_seconds=SECONDS, a=5, b=5) == 10
    assert worker.call("count", timeout_seconds=SECONDS) == 2
    assert worker.call("metric", timeout_seconds=SECONDS)["name"] == "min_cosine"
    assert worker.call("pid", timeout_seconds=SECONDS) == worker.pid != os.getpid()


def test_what_a_library_prints_does_not_disturb_the_answers(worker: Worker, tmp_path: Path) -> None:
    assert worker.call("chatter", timeout_seconds=SECONDS) == "the truth"
    assert "a lie" in (tmp_path / "log.txt").read_text()


def test_values_larger_than_a_pipe_come_through(worker: Worker) -> None:
    assert len(worker.call("big", timeout_seconds=SECONDS, size=3_000_000)) == 3_000_000


def test_the_worker_runs_on_the_cpus_that_it_was_given(worker: Worker) -> None:
    assert worker.call("cpus", timeout_seconds=SECONDS) == [min(os.sched_getaffinity(0))]


@pytest.mark.parametrize(
    ("method", "arguments", "failure", "reason"),
    [
        ("raise_value_error", {}, CallFailure.RAISED, "ValueError: two lines"),
        ("raise_ours", {}, CallFailure.RAISED, "the model has no head"),
        ("not_json", {}, CallFailure.RAISED, "TypeError: object does not go through JSON"),
        ("no_such_method", {}, CallFailure.RAISED, "AttributeError"),
        ("segfault", {}, CallFailure.DIED, "killed by signal 11 (SIGSEGV)"),
        ("die", {"number": 9}, CallFailure.DIED, "killed by signal 9 (SIGKILL, out of memory in all likelihood)"),
        ("die", {"number": 6}, CallFailure.DIED, "killed by signal 6 (SIGABRT)"),
        ("leave", {}, CallFailure.DIED, "ended with exit code 7: could not open libfoo.so"),
    ],
)
def test_each_way_to_fail_has_its_reason(
    worker: Worker, method: str, arguments: dict[str, int], failure: CallFailure, reason: str
) -> None:
    with pytest.raises(WorkerFailed) as caught:
        worker.call(method, timeout_seconds=SECONDS, **arguments)

    assert caught.value.failure is failure
    assert caught.value.reason.startswith(reason)
    assert worker.alive is (failure is CallFailure.RAISED)


def test_a_full_disk_is_reported_as_out_of_disk(worker: Worker) -> None:
    with pytest.raises(WorkerFailed, match=r"^No space left on device$") as caught:
        worker.call("fill_the_disk", timeout_seconds=SECONDS)

    assert isinstance(caught.value.as_error("building"), OutOfDisk)


def test_a_log_on_a_full_disk_does_not_cost_the_answer() -> None:
    with Worker(TARGET, log=Path("/dev/full")) as worker:
        with pytest.raises(WorkerFailed) as caught:
            worker.call("raise_ours", timeout_seconds=SECONDS)

        assert caught.value.reason == "the model has no head"
        assert worker.call("add", timeout_seconds=SECONDS, a=1, b=1) == 2


def test_a_method_that_raised_leaves_the_worker_usable(worker: Worker) -> None:
    with pytest.raises(WorkerFailed) as caught:
        worker.call("raise_ours", timeout_seconds=SECONDS)

    assert caught.value.kind == "ModelError"
    assert str(caught.value.as_error("building")) == "the model has no head. Take one that has"
    assert isinstance(caught.value.as_error("building"), ModelError)
    assert worker.call("add", timeout_seconds=SECONDS, a=1, b=1) == 2


def test_other_failures_become_an_error_about_what_failed() -> None:
    error = WorkerFailed(CallFailure.DIED, "killed by signal 11 (SIGSEGV)").as_error("exporting")

    assert isinstance(error, OptimizationError)
    assert str(error) == "exporting: killed by signal 11 (SIGSEGV). See the logs in the work folder of the store"


def test_a_hang_is_ended_at_its_time_limit(worker: Worker) -> None:
    worker.call("pid", timeout_seconds=SECONDS)
    with pytest.raises(WorkerFailed) as caught:
        worker.call("hang", timeout_seconds=0.3)

    assert caught.value.failure is CallFailure.TIMED_OUT
    assert caught.value.seconds == 0.3
    assert caught.value.reason == "hang did not end within 0.3 s"
    assert not worker.alive


def test_a_call_to_a_dead_worker_fails_with_the_reason_of_its_death(worker: Worker) -> None:
    with pytest.raises(WorkerFailed):
        worker.call("segfault", timeout_seconds=SECONDS)
    with pytest.raises(WorkerFailed, match="signal 11"):
        worker.call("add", timeout_seconds=SECONDS, a=1, b=1)


def test_the_end_of_the_log_is_kept(worker: Worker) -> None:
    with pytest.raises(WorkerFailed) as caught:
        worker.call("die", timeout_seconds=SECONDS, number=int(signal.SIGABRT))

    assert caught.value.log_tail.endswith("last words")


def test_a_target_that_cannot_be_created_is_a_worker_failure_with_a_reason(tmp_path: Path) -> None:
    with (
        Worker("tests.optimizer.candidate.misbehaviour:Absent", log=tmp_path / "log.txt") as worker,
        pytest.raises(WorkerFailed, match=r"exit code 1: AttributeError.*Absent"),
    ):
        worker.call("add", timeout_seconds=SECONDS, a=1, b=1)


def test_a_worker_does_not_outlive_its_parent_even_in_the_middle_of_a_call(tmp_path: Path) -> None:
    script = f"""
import pathlib
from penstock_optimizer.candidate.isolation import Worker
worker = Worker({TARGET!r}, log=pathlib.Path({str(tmp_path / "log.txt")!r}))
print(worker.call("pid", timeout_seconds=60), flush=True)
worker.call("hang", timeout_seconds=60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()

    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()


@pytest.mark.parametrize(
    ("code", "tail", "expected"),
    [
        (-11, "", "killed by signal 11 (SIGSEGV)"),
        (-63, "", "killed by signal 63"),
        (2, "", "ended with exit code 2: no output"),
        (1, "Traceback\n  OSError: gone ", "ended with exit code 1: OSError: gone"),
    ],
)
def test_failure_reasons_are_one_line(code: int, tail: str, expected: str) -> None:
    assert death_reason(code, tail) == expected
