"""The guard of live traffic: answers are compared with those of fp32 while they are served."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from penstock.resources.base import Spec

FP32_BYTES = 128 * 2**20
"""Of a process that runs an fp32 graph in one thread, besides the weights."""


class GuardAction(StrEnum):
    """What follows when live answers are worse than those that judged the plan."""

    RETURN = "Return"
    REPORT = "Report"


class LiveGuard(Spec):
    """A few answers are computed again by the fp32 model in the pod, in spare time. Texts and vectors do not leave its
    process."""

    cpu_share: float = Field(
        default=0.02, gt=0, le=0.5, description="Share of the CPU time of a pod's cores, while no request waits."
    )
    false_returns: float = Field(
        default=0.01,
        ge=1e-6,
        le=0.1,
        description="Probability that the answers of one set of pods raise an alarm although they are as they were "
        "when the plan was judged, however long they serve.",
    )
    action: GuardAction = Field(
        default=GuardAction.RETURN,
        description="Return: after an alarm fp32 serves, if its measured capacity takes the present load. Report: only "
        "the condition AnswersAgree changes.",
    )

    def memory_bytes(self, parameters: int) -> int:
        """Memory of the fp32 graph of a model with this many weights next to the served one: the weights, a copy while
        it is loaded or repacked, and activations."""
        return 8 * parameters + FP32_BYTES


class Guard(Spec):
    """What watches the answers."""

    live: LiveGuard | None = Field(
        default=None,
        description="Compare a few answers with those of fp32 while serving; `{}` turns it on. Needs memory for fp32. "
        "None: only the optimisation compares them.",
    )
