"""One cell: one server measured once, for a second or so. What to send, and what came back. Values only.

A comparison is many short cells, taken in turn from the servers compared; `figures` puts them together.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from penstock.manifest import Frozen
from penstock_optimizer.load.client import RequestBody


class CellSpec(Frozen):
    """What to send, and for how long."""

    url: str = Field(pattern=r"^http://")
    bodies: tuple[RequestBody, ...] = Field(min_length=1)
    """Sent in this order, over and over."""
    clients: int = Field(default=1, ge=1)
    """Each sends its next request when its last one was answered."""
    per_second: float | None = Field(default=None, gt=0)
    """Instead of clients: one request every 1/n seconds, whether or not earlier ones were answered."""
    warm_up_seconds: float = Field(default=0.1, ge=0)
    warm_up_requests: int = Field(default=1, ge=0)
    """Requests of both are sent and not recorded. A server that was stopped meanwhile has cold caches."""
    seconds: float = Field(default=1.0, gt=0)
    minimum_requests: int = Field(default=3, ge=1)
    """Go on beyond `seconds` until so many are answered: at 5 s a request, one second shows nothing."""
    maximum_seconds: float = Field(default=60.0, gt=0)
    """Stop by then, whatever was answered."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    headers: dict[str, str] = Field(default_factory=lambda: {"content-type": "application/json"})
    response_headers: tuple[str, ...] = ()
    """Names of numeric response headers whose means are reported, such as `x-inference-time`."""
    pids: tuple[int, ...] = ()
    """Processes of the server: their CPU time and memory are read at both ends of the recorded time."""
    cpus: tuple[int, ...] = ()
    """Logical CPUs of the server: the time that other processes spend on them is read as well."""

    @model_validator(mode="after")
    def _long_enough(self) -> Self:
        if self.maximum_seconds < self.seconds:
            raise ValueError(f"maximum_seconds {self.maximum_seconds:g} is under seconds {self.seconds:g}")
        return self


class CellResult(Frozen):
    """What was seen in the recorded time."""

    seconds: float
    """From the first recorded request to the last recorded answer (closed loop), or the time recorded (even rate)."""
    latencies_milliseconds: tuple[float, ...] = ()
    """Of the 2xx answers, in order of sending."""
    ended_seconds: tuple[float, ...] = ()
    """When each of them had come, on the clock of `perf_counter`, in the same order."""
    groups: tuple[int, ...] = ()
    """Their bodies' groups, in the same order."""
    completed_per_second: float = 0.0
    """2xx answers within the recorded time."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Requests without a 2xx answer, by status; `timeout` and `disconnected` where none came."""
    first_failure: str = ""
    """Status and start of the body of the first of them."""
    server_cores: float | None = None
    """CPU seconds of the server's processes per second."""
    server_cpu_milliseconds: float | None = None
    """CPU time of the server's processes per answered request."""
    server_rss_bytes: int | None = None
    client_cores: float = 0.0
    foreign_cores: float | None = None
    """CPUs' worth of time that neither the server nor this client spent on the server's CPUs: other processes, and what
    the hypervisor took away. Noise."""
    client_goes_first: bool = False
    """Whether the client, once it had something to do, went before other programs on its CPUs: by a short
    time slice (`load.time_slice`), or as whoever started it has let it run in real time."""
    send_lag_p99_milliseconds: float = 0.0
    """Even rate: how late the client itself was."""
    header_means: dict[str, float] = Field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Requests without a 2xx answer."""
        return sum(self.failures.values())
