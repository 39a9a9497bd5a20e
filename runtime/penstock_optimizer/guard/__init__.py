"""The accuracy gate: compares a candidate's answers with those of the fp32 reference, alone and in batches. No labels.

`observe_reference` runs the judging requests through the reference once. `judge_candidate` runs them through a
candidate, with the tasks and engines that serve, and returns the verdict with its evidence.
"""

from penstock_optimizer.guard.gate import (
    Forward,
    Invariance,
    Reference,
    SingleRowForward,
    arithmetic_of,
    forward_of,
    judge_answers,
    judge_candidate,
    measure_invariance,
    observe_reference,
    prepare,
)
from penstock_optimizer.guard.judge import ObservedAnswer, SampleRequest, judge, unused_budgets

__all__ = [
    "Forward",
    "Invariance",
    "ObservedAnswer",
    "Reference",
    "SampleRequest",
    "SingleRowForward",
    "arithmetic_of",
    "forward_of",
    "judge",
    "judge_answers",
    "judge_candidate",
    "measure_invariance",
    "observe_reference",
    "prepare",
    "unused_budgets",
]
