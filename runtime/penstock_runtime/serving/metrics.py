"""Metrics of the server for Prometheus. docs/reference/metrics.md is made from this file.

A separate registry for each server, so that two servers in one process (tests, a swap) do not mix. What every request
touches is counted with plain integers by the event loop's thread (`Tally`, a fifth of the cost of the client library's
histogram) and turned into metric families when Prometheus asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from penstock import __version__
from penstock_runtime.engines.base import DeviceState
from penstock_runtime.host import read_throttling
from penstock_runtime.serving.device_metrics import device_families
from penstock_runtime.serving.generation_metrics import GenerationMetrics
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.serving.status import ServerPhase, ServerStatus
from penstock_runtime.serving.tally import Tally

SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Half a millisecond to half a minute, three to five a decade: an encoder's forward pass is 1 ms to 1 s."""
NOT_READY = 503
"""Refused at once, to be answered by another replica: excluded from the request durations."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
TOKENS = (8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)


def with_objective(bounds: Iterable[float], objective_milliseconds: float | None) -> tuple[float, ...]:
    """Bounds in seconds with one exactly on the objective, so that `le="0.02"` counts the good requests exactly."""
    extra = () if objective_milliseconds is None else (objective_milliseconds / 1000,)
    return tuple(sorted({*bounds, *extra}))


class ServerMetrics:
    """All metrics of one server. Request methods are for the event loop's thread; batch and cache methods for any."""

    def __init__(self, status: ServerStatus, *, objective_p95_milliseconds: float | None = None) -> None:
        self._status = status
        objective = objective_p95_milliseconds
        self.requests: dict[tuple[str, int], int] = {}
        self.rejected: dict[str, int] = {}
        self.in_flight = 0
        self.connections: Callable[[], int] = lambda: 0
        """Number of open connections; set by the server."""
        self.queue_depth: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Waiting rows and tokens; set by the server."""
        self.device: Callable[[], DeviceState | None] = lambda: None
        """State of a device other than the CPU; set by the server."""
        self.request_seconds = Tally(with_objective(SECONDS, objective))
        self.queue_seconds = Tally(SECONDS)
        self.tokenization_seconds = Tally(SECONDS)
        self.inference_seconds = Tally(SECONDS)
        self.request_tokens = Tally(TOKENS)
        self.tokens = 0
        self.truncated = 0
        self._lock = threading.Lock()
        self._batch_rows = Tally(ROWS)
        self._batch_tokens = {"real": 0, "padding": 0}
        self._cache: dict[tuple[str, str], int] = {}
        self.generation = GenerationMetrics()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # The event loop's thread

    def finished(self, route: str, status: int, seconds: float, *, inference: bool) -> None:
        """A request has been answered, or cancelled (499)."""
        key = (route, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        if inference and (status < 400 or status >= 500) and status != NOT_READY:
            self.request_seconds.observe(seconds)

    def answered(self, answer: Answer) -> None:
        """The model has answered a request."""
        timings = answer.timings
        self.queue_seconds.observe(timings.queue_milliseconds / 1000)
        self.tokenization_seconds.observe(timings.tokenization_milliseconds / 1000)
        self.inference_seconds.observe(timings.inference_milliseconds / 1000)
        self.request_tokens.observe(answer.computed_tokens)
        self.tokens += answer.computed_tokens
        self.truncated += answer.truncated

    def refused(self, reason: str) -> None:
        """A request was answered with an error; `reason` is its error_type."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    # Any thread

    def batch(self, rows: int, real_tokens: int, padded_tokens: int) -> None:
        """A batch has run: `real_tokens` of its rows, padded to `padded_tokens`."""
        with self._lock:
            self._batch_rows.observe(rows)
            self._batch_tokens["real"] += real_tokens
            self._batch_tokens["padding"] += padded_tokens - real_tokens

    def cache(self, name: str, *, hit: bool) -> None:
        """A cache was queried."""
        key = (name, "hit" if hit else "miss")
        with self._lock:
            self._cache[key] = self._cache.get(key, 0) + 1

    # For Prometheus

    def exposition(self, accept: str) -> tuple[bytes, bytes]:
        """The metrics as text and its content type, in the format of the `accept` header; the default one if that is
        invalid."""
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # the library fails on versions that are not numbers
            encoder, content_type = choose_encoder("")
        return encoder(self.registry), content_type.encode()

    def collect(self) -> Iterator[Metric]:
        """All families (the client library's interface of a collector)."""
        yield from self._request_families()
        yield from self._batch_families()
        yield from self.generation.families()
        yield from self._state_families()
        device = self.device()
        if device is not None:
            yield from device_families(device)

    def _request_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "penstock_requests",
            "Requests answered, by route and status; 499 is a client that went before its answer.",
            labels=["route", "code"],
        )
        for (route, code), count in sorted(self.requests.items()):
            requests.add_metric([route, str(code)], count)
        yield requests
        rejected = CounterMetricFamily(
            "penstock_rejected",
            "Requests answered with an error, by error_type (docs/reference/http.md).",
            labels=["reason"],
        )
        for reason, count in sorted(self.rejected.items()):
            rejected.add_metric([reason], count)
        yield rejected
        yield GaugeMetricFamily(
            "penstock_in_flight_requests", "Requests read and not yet answered.", value=self.in_flight
        )
        yield GaugeMetricFamily("penstock_connections", "Open client connections.", value=self.connections())
        yield self.request_seconds.family(
            "penstock_request_seconds",
            "From a request's last byte to its answer, of requests to the model that were answered or failed with 5xx; "
            "not of those that a server that is not ready sends elsewhere (503). One bucket boundary is the latency "
            "objective.",
        )
        yield self.queue_seconds.family("penstock_queue_seconds", "Waiting for a core, of answered requests.")
        yield self.tokenization_seconds.family("penstock_tokenization_seconds", "Tokenising, of answered requests.")
        yield self.inference_seconds.family(
            "penstock_inference_seconds", "Forward passes that the request took part in, of answered requests."
        )
        yield self.request_tokens.family(
            "penstock_request_tokens", "Tokens computed for a request, special ones included."
        )
        yield CounterMetricFamily("penstock_tokens", "Tokens computed for answered requests.", value=self.tokens)
        yield CounterMetricFamily(
            "penstock_truncated_inputs", "Inputs that were cut to the model's maximum.", value=self.truncated
        )

    def _batch_families(self) -> Iterator[Metric]:
        with self._lock:
            yield self._batch_rows.family("penstock_batch_rows", "Sequences in a batch.")
            tokens = CounterMetricFamily(
                "penstock_batch_tokens",
                "Tokens that went through the model: real ones and padding, the share of work that is wasted.",
                labels=["kind"],
            )
            for kind, count in self._batch_tokens.items():
                tokens.add_metric([kind], count)
            yield tokens
            cache = CounterMetricFamily(
                "penstock_cache",
                "Look-ups by cache (answers, tokens) and result. in-progress: requests that waited for the answer of "
                "another one with the same content.",
                labels=["cache", "result"],
            )
            for (name, result), count in sorted(self._cache.items()):
                cache.add_metric([name, result], count)
            yield cache
        rows, waiting = self.queue_depth()
        yield GaugeMetricFamily("penstock_queue_rows", "Sequences that wait for a core.", value=rows)
        yield GaugeMetricFamily("penstock_queue_tokens", "Tokens that wait for a core.", value=waiting)

    def _state_families(self) -> Iterator[Metric]:
        status = self._status
        yield GaugeMetricFamily(
            "penstock_ready", "1 while new requests are welcome.", value=int(status.phase is ServerPhase.READY)
        )
        info = InfoMetricFamily(
            "penstock_served",
            "What is served: artefact key, recipe, that of short rows if another, instruction set, guard's verdict.",
        )
        info.add_metric([], identity(status))
        yield info
        cores = GaugeMetricFamily(
            "penstock_cores",
            "Physical cores: found (may be used), granted (in use), pinned (in use and this process's alone), quota "
            "(paid for by the cgroup; absent without a limit).",
            labels=["kind"],
        )
        if status.host is not None:
            cores.add_metric(["found"], status.host.usable)
            if status.host.quota is not None:
                cores.add_metric(["quota"], status.host.quota)
        if status.grant is not None:
            cores.add_metric(["granted"], status.grant.cores)
            cores.add_metric(["pinned"], status.grant.cores if status.grant.pinned else 0)
        yield cores
        throttling = read_throttling()
        yield CounterMetricFamily(
            "penstock_cpu_throttled_seconds",
            "Time in which the kernel stopped the container because its CPU quota was used up.",
            value=0.0 if throttling is None else throttling.throttled_seconds,
        )


def identity(status: ServerStatus) -> dict[str, str]:
    """The labels of the info metric."""
    manifest, plan, candidate = status.manifest, status.plan, status.candidate()
    verdict = "none" if candidate is None else candidate.outcome.value
    return {
        "version": __version__,
        "endpoint": status.name,
        "task": status.task.value,
        "key": "" if manifest is None else manifest.key,
        "recipe": "" if plan is None else plan.recipe.name,
        "short_recipe": "" if plan is None or plan.short is None else plan.short.recipe.name,
        "streams": "" if plan is None else str(plan.streams),
        "isa": "" if status.host is None else status.host.cpu.isa.value,
        "verdict": verdict,
    }
