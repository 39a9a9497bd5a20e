"""The status of a ModelEndpoint: its conditions, and the figures behind them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.resources.base import Facts
from penstock.resources.conditions import Condition
from penstock.resources.fields.text_fields import Digest, LongText, ShortText, Time
from penstock.resources.rollout_status import CanaryStatus, GuardStatus
from penstock.vector_space import SPACE_PATTERN


class PodReport(Facts):
    """The report of one pod about its machine."""

    name: str = Field(max_length=253, description="The pod.")
    node: str = Field(default="", max_length=253, description="The node that it is on.")
    ready: bool = Field(default=False, description="Whether it accepts requests.")
    digest: str = Field(default="", max_length=71, description="The artefact that it serves.")
    pinned: bool | None = Field(default=None, description="Whether it has exclusive cores; none: not reported yet.")
    reason: str = Field(default="", max_length=512, description="Why it is not pinned, or not ready.")
    cpus: str = Field(default="", max_length=256, description="The CPUs that it runs on, such as 2-3.")
    cpu: ShortText = Field(default="", description="The processor, such as AMD EPYC 7763 (Zen 3, AVX2, no VNNI).")


class PlanStatus(Facts):
    """The plan that is served."""

    summary: ShortText = Field(default="", description="Recipe and threads, such as `openvino-int8, 2x1 threads`.")
    digest: str = Field(default="", max_length=71, description="The artefact.")
    optimized_model: str = Field(default="", max_length=253, description="The OptimizedModel that it is the result of.")
    baseline: bool = Field(default=False, description="true while the fp32 graph is served.")
    cost_per_million: float | None = Field(
        default=None, ge=0, description="Cost of a million requests at the measured rate less the reserve "
        "(scaling.headroom), at the price of the HardwareClass or of its nodes' instance type."
    )  # fmt: skip
    cost_per_month: float | None = Field(
        default=None, ge=0, description="Cost of the present replicas for a month of 730 hours, at the same price."
    )
    currency: str = Field(default="", max_length=3, description="Of the costs, such as USD.")


class ScalingStatus(Facts):
    """The last decision about the number of replicas."""

    desired: int = Field(ge=0, description="The desired number of replicas.")
    reason: LongText = Field(default="", description="The figures behind the decision.")
    last_scale_time: Time | None = Field(default=None, description="When the number last changed.")
    requests_per_second: float | None = Field(default=None, ge=0, description="The load that was read.")
    capacity_per_replica: float | None = Field(
        default=None, ge=0, description="Measured requests per second of one replica within the objective."
    )
    p95_milliseconds: float | None = Field(default=None, ge=0, description="The p95 that was observed, milliseconds.")
    slow_down: float | None = Field(
        default=None, gt=0, description="Measured slow-down of the replicas against the capacity curve, as a factor."
    )
    cause: str = Field(
        default="", max_length=64, description="The kind of decision, as one word, such as Demand or AtMaximum."
    )
    memory: str = Field(
        default="", max_length=1024, description="State of the autoscaler for a restart of the operator; not for users."
    )


class ServedBefore(Facts):
    """A plan that was served before, for a rollback."""

    digest: Digest = Field(description="The artefact.")
    summary: ShortText = Field(default="", description="Recipe and threads.")
    until: Time = Field(description="When another plan replaced it.")


class EndpointStatus(Facts):
    """The observed state of the endpoint."""

    observed_generation: int | None = Field(default=None, ge=0, description="The generation that this status is about.")
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=16, description="Conditions, each with the reason and what to do."
    )
    reason: ShortText = Field(
        default="", description="The reason of Ready, with the progress while there is one, such as `Optimizing 7/23`."
    )
    optimized_model: str = Field(
        default="",
        max_length=253,
        description="The OptimizedModel of the present spec, or the one that has the pinned artefact.",
    )
    plan: PlanStatus | None = None
    replicas: int | None = Field(default=None, ge=0, description="Number of pods.")
    ready_replicas: int | None = Field(default=None, ge=0, description="Number of ready pods.")
    selector: str = Field(default="", max_length=1024, description="The labels of the pods, for the scale subresource.")
    vector_spaces: tuple[Annotated[str, Field(max_length=20, pattern=SPACE_PATTERN)], ...] = Field(
        default=(),
        max_length=8,
        description="The vector space of the ready pods, as on their answers; of the last ones while none is ready. "
        "Two while a rollout changes it.",
    )
    url: str = Field(default="", max_length=512, description="URL inside the cluster.")
    public_url: str = Field(
        default="", max_length=1024, description="URL from outside the cluster, if the endpoint is exposed."
    )
    p95: str = Field(default="", max_length=32, description="For people: the p95 of the plan in use, such as `14 ms`.")
    speed_up: str = Field(default="", max_length=32, description="For people: against fp32, such as `4.7x`.")
    scaling: ScalingStatus | None = None
    canary: CanaryStatus | None = None
    guard: GuardStatus | None = None
    pods: tuple[PodReport, ...] = Field(default=(), max_length=32, description="Reports of the pods; the first 32.")
    history: tuple[ServedBefore, ...] = Field(
        default=(), max_length=5, description="Plans that were served before, the latest first."
    )
