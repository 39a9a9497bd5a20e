"""The parts of the status of a ModelEndpoint about plans that are compared while they serve: the canary of a rollout,
and the guard of live traffic."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from penstock.resources.base import Facts
from penstock.resources.fields.text_fields import Digest, LongText, ShortText, Time


class CanaryPhase(StrEnum):
    """Where a canary is."""

    RUNNING = "Running"
    """The new pods get their share, or start."""
    PASSED = "Passed"
    """They were not worse, and replace the old ones."""
    REJECTED = "Rejected"
    """They were worse and have ended; the old ones serve on."""


class CanaryStatus(Facts):
    """The canary of the present plan and spec (`spec.rollout.canary`)."""

    phase: CanaryPhase
    template: str = Field(max_length=64, description="The hash of the pod template that it tries.")
    digest: str = Field(default="", max_length=71, description="The artefact that its pods serve.")
    since: Time = Field(description="When its pods were asked for.")
    requests: int = Field(default=0, ge=0, description="Requests that its pods have answered.")
    errors: int = Field(default=0, ge=0, description="Of these with a status of 500 or more.")
    reason: ShortText = Field(default="", description="Why it passed or was rejected, as one word.")
    message: LongText = Field(default="", description="The figures of both plans, in one sentence.")


class GuardAlarm(Facts):
    """An artefact whose live answers were worse than those that judged it."""

    digest: Digest = Field(description="The artefact.")
    since: Time = Field(description="Since when its answers were compared.")
    until: Time = Field(description="The alarm. What was embedded in between may have to be embedded again.")
    answers: int = Field(ge=0, description="Compared answers.")
    evidence: float = Field(ge=0, description="That they are worse, as 1 / the probability of a false alarm.")


class ReplacedPod(Facts):
    """A pod whose answers differed from those of fp32, unlike those of the other pods, and that was deleted."""

    pod: str = Field(max_length=253, description="Its name.")
    node: str = Field(default="", max_length=253, description="Its node, whose memory may be damaged.")
    at: Time = Field(description="When it was deleted.")
    evidence: float = Field(ge=0, description="That its answers were worse.")


class GuardStatus(Facts):
    """The guard of live traffic (`spec.guard.live`)."""

    digest: str = Field(default="", max_length=71, description="The artefact with the answers that are compared.")
    since: Time = Field(description="Since when.")
    answers: int = Field(default=0, ge=0, description="Compared answers of the present pods; about.")
    evidence: float = Field(default=1, ge=0, description="That they are worse; 100 is an error of at most 1 %.")
    alarms: tuple[GuardAlarm, ...] = Field(
        default=(), max_length=5, description="Artefacts that fp32 serves instead of, the latest first."
    )
    replaced: tuple[ReplacedPod, ...] = Field(
        default=(), max_length=5, description="Pods that were deleted for their answers, the latest first."
    )
