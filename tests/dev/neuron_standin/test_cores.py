"""One process owns a NeuronCore of the stand-in until it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neuron_standin.cores import free_cores
from neuron_standin.machine import read_machine
from tests.neuron_standin_env import SECONDS, StandIn, run_program

CLAIM = """
import json, sys
from neuron_standin.cores import claim
from neuron_standin.machine import read_machine
try:
    print(json.dumps(claim(read_machine())), flush=True)
except RuntimeError as error:
    print(json.dumps(str(error)), flush=True)
if sys.argv[1:] == ["hold"]:
    sys.stdin.read()
"""


@pytest.fixture
def standin(tmp_path: Path) -> StandIn:
    found = StandIn.make(tmp_path, "inf2")
    found.machine(chips=2)
    return found


@contextmanager
def _holder(standin: StandIn, **variables: str) -> Iterator[list[int]]:
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, "hold"], env=standin.environment(variables, devices=True),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.kill()


def _claim(standin: StandIn, **variables: str) -> object:
    return run_program(CLAIM, standin.environment(variables, devices=True))


def test_takes_visible_cores_then_a_number_then_all(standin: StandIn) -> None:
    assert _claim(standin) == [0, 1, 2, 3]
    with _holder(standin, NEURON_RT_VISIBLE_CORES="1") as held:
        assert held == [1]
        assert _claim(standin, NEURON_RT_NUM_CORES="2") == [2, 3]
        assert _claim(standin, NEURON_RT_VISIBLE_CORES="0", NEURON_RT_NUM_CORES="2") == [0]


def test_a_taken_core_is_named_on_standard_error_and_freed_at_death(standin: StandIn) -> None:
    with _holder(standin, NEURON_RT_VISIBLE_CORES="1"):
        refused = subprocess.run(
            [sys.executable, "-c", CLAIM],
            env=standin.environment({"NEURON_RT_VISIBLE_CORES": "1"}, devices=True),
            capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
        assert "nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:nc1-nc1 Available:0" in refused.stderr
        assert "could not be initialized" in refused.stdout
    # The holder was killed: the kernel released the core.
    assert _claim(standin, NEURON_RT_VISIBLE_CORES="1") == [1]


def test_cores_can_stay_taken_for_a_while_after_death(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than it takes to look, on a machine that others use as well.
    standin.machine(chips=2, faults={"delayed_release_seconds": 5.0})
    with _holder(standin, NEURON_RT_VISIBLE_CORES="0"):
        pass
    monkeypatch.setenv("STANDIN_MACHINE", str(standin.folder / "machine.json"))
    machine = read_machine()
    assert machine is not None
    assert 0 not in free_cores(machine)
    end = time.monotonic() + 60
    while 0 not in free_cores(machine):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_core_that_the_host_has_not_cannot_be_opened(standin: StandIn) -> None:
    refused = subprocess.run(
        [sys.executable, "-c", CLAIM], env=standin.environment({"NEURON_RT_VISIBLE_CORES": "4-5"}, devices=True),
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    assert "Could not open the nd2" in refused.stderr
