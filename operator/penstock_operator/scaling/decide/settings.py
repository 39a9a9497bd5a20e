"""Settings of the autoscaler, with unit, default and reason. docs/reference/autoscaling.md is generated from them."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WhenMissing(StrEnum):
    """What to do when the metrics have been unknown for a while."""

    HOLD = "Hold"
    """Stay at the current number."""
    FALLBACK = "Fallback"
    """Go up to `fallbackReplicas` where the current number is lower; never down."""


class ScalingSettings(BaseModel):
    """Everything about the decision that is not measured. Times are seconds, shares are 0 to 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_replicas: int = Field(default=1, ge=0, description="Never fewer.")
    max_replicas: int = Field(default=4, ge=1, description="Never more.")
    headroom: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Share of the measured capacity that is planned for; the rest takes noise and the first seconds of "
        "a rise. Higher is cheaper and later.",
    )
    shrink_margin: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Shrinking plans for 3.5 standard deviations more than the demand, as it was observed to move "
        "about, and for at least this share more, so that noise adds no replica again that it has just taken away; not "
        "while the load is falling.",
    )
    start_up_seconds: float = Field(
        default=40,
        ge=0,
        description="From the decision until a new replica takes traffic: how far ahead to look. Believed until "
        "replicas were seen to start; then the upper median of the last seven and this.",
    )
    furthest_seconds: float = Field(
        default=120, ge=0, description="Never look further ahead than this: a straight line is not true for longer."
    )
    surge_factor: float = Field(
        default=3,
        ge=1,
        description="While demand rises beyond what the replicas take, its line is followed up to this many times its "
        "height; what was too much is given back before it has started.",
    )
    drain_seconds: float = Field(
        default=30, gt=0, description="A backlog is to be worked off within this time of new replicas being there."
    )
    shrink_window_seconds: float = Field(
        default=120,
        ge=0,
        description="Shrink to the highest number that was needed during this time; half of it while the load is "
        "falling.",
    )
    strict_window: bool = Field(
        default=False,
        description="The shrink window is what an HPA's stabilisation window is: nothing shrinks before every number "
        "that was wanted within it was lower, precautions and a falling load included, and it is never learnt to be "
        "longer. True where the endpoint sets `scaleDownWindowSeconds`.",
    )
    longest_window_factor: float = Field(
        default=8,
        ge=1,
        description="A shrink that had to be taken back makes the window as long as would have prevented it, and at "
        "least twice as long, up to this many times its length; 1 turns the learning off.",
    )
    shrink_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="One step down takes away at most this share of the replicas, at least one.",
    )
    shrink_interval_seconds: float = Field(default=60, ge=0, description="At least this long between two steps down.")
    grow_factor: float = Field(default=4, ge=1, description="One step up is at most to this many times the replicas...")
    grow_least: int = Field(default=4, ge=1, description="... or by this many, whichever is more.")
    panic_hold_seconds: float = Field(
        default=60, ge=0, description="No shrinking for this long after demand was over the capacity of what there is."
    )
    good_share_target: float = Field(
        default=0.95, gt=0, lt=1, description="The share of answers within the objective that p95 means."
    )
    good_share_slack: float = Field(
        default=0.01, ge=0, lt=1, description="The guard acts when the share is this far under its target."
    )
    guard_seconds: float = Field(
        default=60, ge=0, description="The guard adds a replica when answers were late for this long in steady state."
    )
    shrink_p95_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="No shrinking while the observed p95 is over this share of the objective: the curve may be wrong.",
    )
    settle_seconds: float = Field(
        default=120,
        ge=0,
        description="Steady state begins this long after replicas last changed or demand was over capacity; only then "
        "is the observed p95 held against the curve.",
    )
    slowdown_memory_seconds: float = Field(
        default=180, gt=0, description="Time constant of the average over observed slow-downs."
    )
    slowdown_most: float = Field(
        default=2, ge=1, description="Never believe that a replica is slower than its curve by more than this factor."
    )
    stale_slowdown: float = Field(
        default=1.3, ge=1, description="From this slow-down on, the condition CurveCurrent is False: measure again."
    )
    unknown_seconds: float = Field(
        default=60, ge=0, description="Metrics unknown for longer than this are reported, and fall back if told to."
    )
    when_metrics_missing: WhenMissing = Field(
        default=WhenMissing.HOLD, description="`Hold`, or `Fallback` to at least `fallbackReplicas`."
    )
    fallback_replicas: int | None = Field(default=None, ge=1, description="The number to fall back to.")
    coverage_least: float = Field(
        default=0.8, gt=0, le=1, description="Shrink only when at least this share of the ready pods was scraped."
    )

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is over max_replicas {self.max_replicas}: raise the second"
            )
        if self.when_metrics_missing is WhenMissing.FALLBACK and self.fallback_replicas is None:
            raise ValueError("when_metrics_missing Fallback needs fallback_replicas")
        return self

    def clamp(self, replicas: int) -> int:
        """The nearest number that is allowed."""
        return min(max(replicas, self.min_replicas), self.max_replicas)
