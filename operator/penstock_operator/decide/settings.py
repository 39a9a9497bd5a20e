"""Settings of the autoscaler, with unit, default and reason. docs/reference/autoscaling.md is generated from them."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WhenMissing(StrEnum):
    """What to do after metrics have been unknown for `unknown_seconds`."""

    HOLD = "Hold"
    """Keep the number of replicas."""
    FALLBACK = "Fallback"
    """Scale up to `fallbackReplicas` if there are fewer; never down."""


class ScalingSettings(BaseModel):
    """Everything about a decision that is not measured. Times are seconds, shares are 0 to 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_replicas: int = Field(default=1, ge=0, description="Never fewer replicas.")
    max_replicas: int = Field(default=4, ge=1, description="Never more replicas.")
    limited_by_quota: bool = Field(
        default=False, description="`max_replicas` is what the quota of the namespace allows, and the spec allows more."
    )
    headroom: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Share of the measured capacity to plan for; the rest is for noise and the first seconds of a "
        "rise. A higher value costs fewer replica-hours and makes more requests late.",
    )
    start_up_seconds: float = Field(
        default=40,
        ge=0,
        description="From the decision until a new replica takes traffic: how far ahead to forecast. Once replicas "
        "were observed to start, the upper median of their last seven start-up times and this value counts.",
    )
    furthest_seconds: float = Field(
        default=120,
        ge=0,
        description="Never forecast further ahead than this: a straight line does not hold for longer.",
    )
    surge_factor: float = Field(
        default=3,
        ge=1,
        description="While demand rises beyond what the replicas take, the forecast is at most this many times the "
        "demand; surplus replicas are removed again before they have started.",
    )
    drain_seconds: float = Field(
        default=30, gt=0, description="New replicas should work off a backlog within this time."
    )
    shrink_window_seconds: float = Field(
        default=120,
        ge=0,
        description="Scale down to the highest number that was needed during this time; half of this time while the "
        "load is falling.",
    )
    strict_window: bool = Field(
        default=False,
        description="Use the shrink window as an HPA uses its stabilisation window: never below the highest number "
        "that was wanted within it, also while the load is falling or after a surge; its length is not learnt. True "
        "where the endpoint sets `scaleDownWindowSeconds`.",
    )
    longest_window_factor: float = Field(
        default=8,
        ge=1,
        description="A scale-down that had to be taken back makes the window as long as would have prevented it, and "
        "at least twice as long, up to this many times its length; 1 turns this off.",
    )
    shrink_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="One step down removes at most this share of the replicas, but at least one.",
    )
    shrink_interval_seconds: float = Field(default=60, ge=0, description="Least time between two steps down.")
    grow_factor: float = Field(default=4, ge=1, description="One step up is at most to this many times the replicas...")
    grow_least: int = Field(default=4, ge=1, description="... or by this many, whichever is more.")
    good_share_target: float = Field(
        default=0.95, gt=0, lt=1, description="Share of answers within the objective that a p95 objective means."
    )
    good_share_slack: float = Field(
        default=0.01, ge=0, lt=1, description="Answers count as late when their share is this far below the target."
    )
    guard_seconds: float = Field(
        default=60, ge=0, description="One replica is added when answers were late for this long in steady state."
    )
    shrink_p95_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="No scale-down while the observed p95 is over this share of the objective: the curve may be wrong.",
    )
    settle_seconds: float = Field(
        default=120,
        ge=0,
        description="Steady state begins this long after the number of replicas changed or demand was over capacity; "
        "only then is the observed p95 compared with the curve.",
    )
    slowdown_memory_seconds: float = Field(
        default=180, gt=0, description="Time constant of the average over observed slow-downs."
    )
    slowdown_most: float = Field(
        default=2, ge=1, description="Largest factor by which a replica is assumed to be slower than its curve."
    )
    stale_slowdown: float = Field(
        default=1.3,
        ge=1,
        description="From this slow-down on, the condition CurveCurrent is False: measure the capacity again.",
    )
    unknown_seconds: float = Field(
        default=60,
        ge=0,
        description="Metrics that are unknown for longer are reported, and `when_metrics_missing` takes effect.",
    )
    when_metrics_missing: WhenMissing = Field(
        default=WhenMissing.HOLD, description="`Hold`, or `Fallback` to at least `fallbackReplicas`."
    )
    fallback_replicas: int | None = Field(
        default=None, ge=1, description="Least replicas while metrics are missing, with `Fallback`."
    )
    coverage_least: float = Field(
        default=0.8, gt=0, le=1, description="Scale down only if at least this share of the ready pods was scraped."
    )

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is over max_replicas {self.max_replicas}: raise max_replicas"
            )
        if self.when_metrics_missing is WhenMissing.FALLBACK and self.fallback_replicas is None:
            raise ValueError("when_metrics_missing Fallback needs fallback_replicas")
        return self

    def clamp(self, replicas: int) -> int:
        """The nearest number within the bounds."""
        return min(max(replicas, self.min_replicas), self.max_replicas)
