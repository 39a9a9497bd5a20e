"""What to send and what came back: the JSON that goes into and out of the load process."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock_optimizer.load.summary import LatencySummary


class Frozen(BaseModel):
    """A value: no unknown fields, no changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OpenLoop(Frozen):
    """Requests arrive at random at a fixed mean rate, whether or not earlier ones were answered.

    Latency counts from the scheduled arrival: a server that stalls cannot make the load wait with it.
    """

    kind: Literal["open"] = "open"
    arrivals_per_second: float = Field(gt=0)


class ClosedLoop(Frozen):
    """Each client sends its next request when its last one was answered. Latency counts from sending."""

    kind: Literal["closed"] = "closed"
    clients: int = Field(ge=1)
    requests: int | None = Field(default=None, ge=1)
    """Stop after this many recorded requests, even if the time is not up."""


class RequestBody(Frozen):
    """One body, ready to send."""

    body: str
    group: int = 0
    """Results are also given by group, such as the length in tokens."""


class LoadSpec(Frozen):
    """One measurement."""

    url: str = Field(pattern=r"^http://")
    """Plain HTTP: measurements go to a server on this machine or in this network."""
    bodies: tuple[RequestBody, ...] = Field(min_length=1)
    """Sent in this order, over and over."""
    pattern: Annotated[OpenLoop | ClosedLoop, Field(discriminator="kind")]
    headers: dict[str, str] = Field(default_factory=lambda: {"content-type": "application/json"})
    warm_up_seconds: float = Field(default=0.5, ge=0)
    """Requests of this time are sent and not recorded."""
    seconds: float = Field(default=3.0, gt=0)
    timeout_seconds: float = Field(default=10.0, gt=0)
    max_connections: int = Field(default=512, ge=1)
    """An open loop's request that finds all of them busy waits here, and its latency counts that."""
    seed: int = 0
    cpus: tuple[int, ...] = ()
    """Logical CPUs of the load process; empty: wherever the system puts it."""
    target_pid: int | None = None
    """Process whose CPU time and memory are reported, children included."""
    response_headers: tuple[str, ...] = ()
    """Names of numeric response headers whose means are reported, such as `x-compute-time`."""


class LoadResult(Frozen):
    """What was seen in the recorded time."""

    seconds: float
    offered_per_second: float
    """Open loop: scheduled arrivals; closed loop: sent requests."""
    completed_per_second: float
    """Answers with a 2xx status that came within the recorded time."""
    scheduled: int
    statuses: dict[str, int]
    """By HTTP status; `timeout`, `disconnected` and `unreachable` where no answer came."""
    latency: LatencySummary | None
    """Of 2xx answers."""
    by_group: dict[int, LatencySummary] = Field(default_factory=dict)
    send_lag_p99_milliseconds: float = 0.0
    """Open loop: how late this client itself was. Large values mean that it, not the server, was measured."""
    target_cores: float | None = None
    """CPU seconds of the target per second."""
    target_rss_bytes: int | None = None
    generator_cores: float = 0.0
    header_means: dict[str, float] = Field(default_factory=dict)
    first_failure: str = ""
    """Status and start of the body of the first answer that was not 2xx."""

    @property
    def failed(self) -> int:
        """Requests without a 2xx answer."""
        return sum(count for status, count in self.statuses.items() if not status.startswith("2"))

    @property
    def refused_share(self) -> float:
        """The share of requests without a 2xx answer."""
        total = sum(self.statuses.values())
        return self.failed / total if total else 0.0
