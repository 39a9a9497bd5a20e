"""Growth of memory, judged on samples that are known to grow, to settle, or to jump."""

from __future__ import annotations

import pytest

from benchmarks.trend import Sample, judge

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
