"""Traces shaped like recorded production traffic."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.recorded import RECORDED, recorded


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_like_trace_scales_with_the_replica_and_has_its_own_course_for_each_seed(name: str) -> None:
    small, large, other = recorded(name, 10, 1), recorded(name, 100, 1), recorded(name, 10, 2)

    assert small.rates.min() > 0
    assert np.allclose(small.rates * 10, large.rates)
    assert not np.allclose(small.rates[:3600], other.rates[:3600])
    assert 3600 <= small.seconds <= 6 * 3600
    assert small.changes > 0
