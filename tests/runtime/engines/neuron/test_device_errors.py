"""Failures by the texts and codes of the Neuron runtime."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ArtefactError, DeviceUnavailable, HostError
from penstock_runtime.engines.neuron.device_errors import DeviceFailure, detail_of, failure_in, failure_of, start_error


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        (
            "06:00:00.0 ERROR NRT:nrt_allocate NeuronCore(s) not available - Requested:nc1-nc1 Available:0",
            DeviceFailure.CORES_TAKEN,
        ),
        (
            "NRT:nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:2 Available:0",
            DeviceFailure.CORES_TAKEN,
        ),
        ("ERROR TDRV:tdrv_get_dev_info No neuron device available", DeviceFailure.NO_DEVICE),
        (
            "NRT:nrt_init Unable to determine Neuron Driver version. Please check aws-neuron-dkms package.",
            DeviceFailure.NO_DRIVER,
        ),
        ("ERROR TDRV:tdrv_get_dev_info Could not open the nd1", DeviceFailure.NOT_OPENED),
        ("ERROR NRT:nrt_init Neuron cores are not contiguous", DeviceFailure.NOT_CONTIGUOUS),
        ("ERROR NRT:nrt_load NEFF version mismatch supported: 1.1 received: 2.0", DeviceFailure.OTHER_GENERATION),
        ("Could not find VNC id 4", DeviceFailure.TOO_FEW_CORES),
        ("ERROR TDRV:dmem_alloc device mempool [0:0] total 100 needed 60 available 40", DeviceFailure.DEVICE_MEMORY),
        ("RuntimeError: nrt_execute status=5 message=NRT_TIMEOUT", DeviceFailure.TIMED_OUT),
        ("RuntimeError: nrt_execute status=1202 message=NRT_EXEC_HW_ERR_NC_UE", DeviceFailure.HARDWARE),
        ("nrt_execute failed: status = 1200", DeviceFailure.HARDWARE),
        ("NRT_EXEC_COMPLETED_WITH_NUM_ERR (1003)", DeviceFailure.NOT_A_NUMBER),
        ("Failed to load model: status=9 (LOAD_NOT_ENOUGH_NC)", DeviceFailure.TOO_FEW_CORES),
        ("Failed to load NN: abc, err: 4", DeviceFailure.DEVICE_MEMORY),
        ("status=1002", DeviceFailure.BAD_INPUT),
        ("Incorrect tensor shape at input #1: received 2, expected 5", None),
        ("Input tensor #5 is not on the CPU", None),
        ("status=777", None),
        ("2026-Nov-27 05:05:05 error in line 1202", None),
        ("", None),
    ],
)
def test_documented_lines_and_codes_name_their_failure(line: str, failure: DeviceFailure | None) -> None:
    assert failure_in(line) is failure


def test_the_message_decides_before_the_lines_and_of_these_the_last_one() -> None:
    lines = ["No neuron device available", "NeuronCore(s) not available - Requested:2 Available:0", "something else"]

    assert failure_of("status=5", lines) is DeviceFailure.TIMED_OUT
    assert failure_of("could not be initialized", lines) is DeviceFailure.CORES_TAKEN
    assert failure_of("could not be initialized", []) is DeviceFailure.OTHER


@given(st.text(max_size=200))
def test_any_text_has_a_failure_or_none(text: str) -> None:
    assert failure_in(text) in {None, *DeviceFailure}


def test_the_detail_of_a_long_message_has_the_cause_at_its_end() -> None:
    code = 'File "code/__torch__/model.py", line 12, in forward\n' * 20
    long = f"RuntimeError: The following operation failed:\n{code}RuntimeError: nrt_execute status=1202"

    found = detail_of(long)

    assert found.startswith("RuntimeError: The following operation failed:")
    assert found.endswith("RuntimeError: nrt_execute status=1202")
    assert len(found) < 420 < len(long)
    assert detail_of("a short one") == "a short one"


def test_only_time_outs_and_hardware_errors_take_a_core_out_of_service() -> None:
    assert {failure for failure in DeviceFailure if failure.takes_core_out} == {
        DeviceFailure.TIMED_OUT,
        DeviceFailure.HARDWARE,
    }


@pytest.mark.parametrize("failure", list(DeviceFailure))
def test_every_failure_of_a_start_has_an_error_with_details_and_a_remedy(failure: DeviceFailure) -> None:
    error = start_error(failure, "the runtime's line", visible="0-1")

    assert "the runtime's line" in error.message
    assert error.remedy


@pytest.mark.parametrize(
    ("failure", "kind", "temporary", "words"),
    [
        (
            DeviceFailure.CORES_TAKEN,
            DeviceUnavailable,
            True,
            "taken by another process (NEURON_RT_VISIBLE_CORES is 0-1)",
        ),
        (DeviceFailure.NO_DEVICE, HostError, False, "no Neuron device"),
        (DeviceFailure.OTHER_GENERATION, ArtefactError, False, "another generation"),
    ],
)
def test_errors_of_a_start_may_pass_only_where_waiting_helps(
    failure: DeviceFailure, kind: type, temporary: bool, words: str
) -> None:
    error = start_error(failure, "details", visible="0-1")

    assert type(error) is kind
    assert error.temporary is temporary
    assert words in error.message


@pytest.mark.parametrize(
    "text", ["exit code 5", "the process ended with exit status 9", "return code 10", "exit-code: 4"]
)
def test_exit_codes_of_processes_are_no_codes_of_the_runtime(text: str) -> None:
    assert failure_in(text) is None
    assert failure_of(text, []) is DeviceFailure.OTHER
