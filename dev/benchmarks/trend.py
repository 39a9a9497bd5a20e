"""Whether memory grows, from samples over time. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

ALLOWED_SHARE = 0.02
"""Of the memory in use, in an hour."""
MOST_PAIRS = 400
"""Samples that the slope is taken over: its cost grows with the square."""


@dataclass(frozen=True)
class Sample:
    """Resident memory at a time."""

    seconds: float
    bytes: int


@dataclass(frozen=True)
class Verdict:
    """The result for a series of samples."""

    passed: bool
    sentence: str
    bytes_per_hour: float


def slope(samples: Sequence[Sample]) -> float:
    """Bytes per second: the median slope of all pairs of samples (Theil and Sen); 0 for fewer than two."""
    step = max(1, len(samples) // MOST_PAIRS)
    thinned = samples[::step]
    slopes = [
        (after.bytes - before.bytes) / (after.seconds - before.seconds)
        for before, after in itertools.combinations(thinned, 2)
        if after.seconds > before.seconds
    ]
    return median(slopes) if slopes else 0.0


def judge(samples: Sequence[Sample]) -> Verdict:
    """Judge the second half: the first one fills pools and caches."""
    late = samples[len(samples) // 2 :]
    if len(late) < 3:
        return Verdict(passed=False, sentence="too few samples to tell whether memory grows", bytes_per_hour=0.0)
    per_hour = slope(late) * 3600
    level = median([float(sample.bytes) for sample in late])
    highest = max(sample.bytes for sample in samples)
    share = per_hour / level if level else 0.0
    passed = share <= ALLOWED_SHARE
    return Verdict(
        passed=passed,
        sentence=(
            f"{level / 1e6:.1f} MB in use, {highest / 1e6:.1f} MB at most; trend of the second half "
            f"{per_hour / 1e6:+.2f} MB an hour ({share:+.1%}, {ALLOWED_SHARE:.0%} allowed): "
            f"{'pass' if passed else 'FAIL, it grows'}"
        ),
        bytes_per_hour=per_hour,
    )
