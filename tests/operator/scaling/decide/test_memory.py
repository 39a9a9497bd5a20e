"""What growing back teaches about the window."""

from __future__ import annotations

import pytest

from penstock_operator.scaling.decide import ScalingSettings, State
from penstock_operator.scaling.decide.memory import grown, shrunk, window_seconds


@pytest.mark.parametrize(
    ("below", "above", "longer"), [(3, 2, True), (2, 1, True), (1, 0, False), (3, 0, False), (3, 3, False)]
)
def test_growing_back_makes_the_window_longer_but_waking_from_zero_does_not(
    below: int, above: int, longer: bool
) -> None:
    settings = ScalingSettings(shrink_window_seconds=120)
    state = shrunk(State(), 1000.0, below=below, served=True)

    after = grown(state, settings, 1060.0, above=above)

    assert (window_seconds(after, settings) > window_seconds(State(), settings)) is longer
