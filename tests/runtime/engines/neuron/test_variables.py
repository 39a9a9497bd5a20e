"""Variables of the Neuron engine, and the granted cores."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import HostError, SettingError
from penstock_runtime.engines.neuron.variables import NeuronVariables, child_environment, granted_cores, visible_cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [("3", (3,)), ("0-3", (0, 1, 2, 3)), ("51,52", (51, 52)), ("0,2-3", (0, 2, 3)), ("1 , 4", (1, 4))],
)
def test_visible_cores_are_numbers_and_ranges(text: str, cores: tuple[int, ...]) -> None:
    assert visible_cores(text) == cores


@given(st.text(alphabet="0123456789,- x", max_size=8))
def test_any_other_text_is_refused_by_name(text: str) -> None:
    is_valid = all(re.fullmatch(r"\d+(-\d+)?", part.strip()) for part in text.split(","))
    if not is_valid:
        with pytest.raises(SettingError, match="NEURON_RT_VISIBLE_CORES"):
            visible_cores(text)


@pytest.mark.parametrize(
    ("setting", "visible", "cores"), [(None, "", 4), ("2", "", 2), (None, "0-1", 2), ("2", "4,5", 2), (None, "8", 1)]
)
def test_the_granted_cores_are_those_that_are_visible_then_the_setting_then_the_plan(
    setting: str | None, visible: str, cores: int
) -> None:
    variables = NeuronVariables.of({} if setting is None else {"PENSTOCK_NEURON_CORES": setting})

    assert granted_cores(variables, {"NEURON_RT_VISIBLE_CORES": visible}, 4) == cores


def test_a_setting_that_disagrees_with_the_visible_cores_is_refused() -> None:
    variables = NeuronVariables.of({"PENSTOCK_NEURON_CORES": "4"})

    with pytest.raises(HostError, match="PENSTOCK_NEURON_CORES is 4, and NEURON_RT_VISIBLE_CORES is 0-1: 2 cores"):
        granted_cores(variables, {"NEURON_RT_VISIBLE_CORES": "0-1"}, 4)


def test_the_child_takes_only_its_number_of_cores_and_the_plugins_choice_is_kept() -> None:
    assert child_environment({"A": "b"}, 2) == {"A": "b", "NEURON_RT_NUM_CORES": "2"}
    assert child_environment({"NEURON_RT_VISIBLE_CORES": "2-3"}, 2) == {"NEURON_RT_VISIBLE_CORES": "2-3"}
    assert child_environment({"NEURON_RT_VISIBLE_CORES": ""}, 1) == {"NEURON_RT_NUM_CORES": "1"}


def test_only_its_own_variables_are_read_and_a_mistyped_one_is_refused() -> None:
    assert NeuronVariables.of({"PENSTOCK_MODEL": "x", "PENSTOCK_PORT": "1"}) == NeuronVariables()

    with pytest.raises(SettingError, match="PENSTOCK_NEURON_CORE is not a setting"):
        NeuronVariables.of({"PENSTOCK_NEURON_CORE": "2"})
