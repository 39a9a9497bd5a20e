"""Growth of memory, judged on samples that are known to grow, to settle, or to jump."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.trend import Sample, judge, slope

MB = 1_000_000


def samples(*megabytes: float, every: float = 10.0) -> list[Sample]:
    return [Sample(index * every, round(value * MB)) for index, value in enumerate(megabytes)]


@pytest.mark.parametrize(
    ("series", "passed"),
    [
        # Fills up, then stays constant.
        ([100 + min(index, 50) for index in range(200)], True),
        # 0.1 MB every ten seconds are 36 MB an hour.
        ([100 + index * 0.1 for index in range(200)], False),
        # Peaks that go away again.
        ([100 + (30 if index % 17 == 0 else 0) for index in range(200)], True),
        # Shrinks.
        ([200 - index * 0.1 for index in range(200)], True),
    ],
)
def test_verdicts(series: list[float], *, passed: bool) -> None:
    assert judge(samples(*series)).passed is passed


@given(st.floats(-5, 5), st.integers(3, 1500))
def test_the_slope_of_a_straight_line_is_found(per_second: float, count: int) -> None:
    line = [Sample(float(index), round(1e9 + per_second * index * 1e3)) for index in range(count)]

    assert slope(line) == pytest.approx(per_second * 1e3, abs=1.0)
