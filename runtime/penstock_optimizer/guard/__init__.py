"""The guard: are a candidate's answers still right, and do they stay so in company? Without labels.

The fp32 graph is the teacher. `teach` runs the judging requests through it once; `guard_candidate` runs them through
a candidate, by the very tasks and engines that serve, and returns the verdict with its evidence.
"""

from penstock_optimizer.guard.gate import (
    Alone,
    Forward,
    Invariance,
    Teacher,
    arithmetic_of,
    forward_of,
    guard_answers,
    guard_candidate,
    measure_invariance,
    prepare,
    teach,
)
from penstock_optimizer.guard.judge import Observed, Sample, judge, unread

__all__ = [
    "Alone",
    "Forward",
    "Invariance",
    "Observed",
    "Sample",
    "Teacher",
    "arithmetic_of",
    "forward_of",
    "guard_answers",
    "guard_candidate",
    "judge",
    "measure_invariance",
    "prepare",
    "teach",
    "unread",
]
