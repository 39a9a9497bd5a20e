"""Metrics of the server for Prometheus. docs/reference/metrics.md is made from this file.

A separate registry for each server, so that two servers in one process (tests, a swap) do not mix. What every request
touches is counted with plain integers by the event loop's thread (`Tally`, a fifth of the cost of the client library's
histogram) and made into metric families at each scrape.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from penstock import __version__
from penstock.resources.endpoint_parts.guard_policy import GUARD_TASKS
from penstock_runtime.coverage import GuardMetrics
from penstock_runtime.engines.base import DeviceState
from penstock_runtime.generation.loop import LoopState
from penstock_runtime.generation.scheduler import Step
from penstock_runtime.host import read_throttling
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.serving.shadow import ShadowState
from penstock_runtime.serving.status import ServerPhase, ServerStatus

SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Half a millisecond to half a minute, three to five a decade: an encoder's forward pass is 1 ms to 1 s."""
NOT_READY = 503
"""Refused at once, to be answered by another replica: excluded from the request durations."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
TOKENS = (8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
FIRST_TOKEN_SECONDS = (
    0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0,
)  # fmt: skip
STEP_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)


def with_objective(bounds: Iterable[float], objective_milliseconds: float | None) -> tuple[float, ...]:
    """Bounds in seconds with one exactly on the objective, so that `le="0.02"` counts the good requests exactly."""
    extra = () if objective_milliseconds is None else (objective_milliseconds / 1000,)
    return tuple(sorted({*bounds, *extra}))


class Tally:
    """A histogram for one writing thread. A reader may see an incomplete observation; the next scrape has it."""

    __slots__ = ("_counts", "_sum", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(sorted(set(bounds)))
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a value on a bound belongs below it, as Prometheus' `le` means."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        total = 0
        result: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        return result

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """The metric family for Prometheus."""
        family = HistogramMetricFamily(name, documentation)
        family.add_metric([], self.buckets(), self._sum)
        return family


class GenerationMetrics:
    """A `LoopObserver` that counts the tokens, steps and sequences of text generation, for one server.

    Its families are empty until `state` is set.
    """

    def __init__(self, first_token_seconds: tuple[float, ...] = FIRST_TOKEN_SECONDS) -> None:
        """`first_token_seconds`: upper bounds of the buckets of the time to the first token."""
        self.state: Callable[[], tuple[LoopState, int]] | None = None
        """State of the loop and number of blocks in its pool; None: the server's task is another one."""
        self._lock = threading.Lock()
        self._first_token = Tally(first_token_seconds)
        self._next_token = Tally(TOKEN_SECONDS)
        self._step_rows = Tally(STEP_ROWS)
        self._step_seconds = Tally(TOKEN_SECONDS)
        self._tokens = {"prompt": 0, "cached": 0, "generated": 0}
        self._preemptions = 0

    def first_token(self, seconds: float) -> None:
        """See `LoopObserver`."""
        with self._lock:
            self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """See `LoopObserver`."""
        with self._lock:
            self._next_token.observe(seconds)

    def step(self, step: Step, seconds: float) -> None:
        """See `LoopObserver`."""
        with self._lock:
            self._step_rows.observe(len(step.rows))
            self._step_seconds.observe(seconds)
            self._tokens["prompt"] += sum(row.count for row in step.prompt_rows if not row.sequence.is_bulk)
            self._tokens["generated"] += sum(not one.is_bulk for one in step.sampled)
            self._preemptions += step.preempted

    def reused(self, tokens: int) -> None:
        """See `LoopObserver`."""
        with self._lock:
            self._tokens["cached"] += tokens

    def families(self) -> Iterator[Metric]:
        """For Prometheus."""
        if self.state is None:
            return
        state, blocks = self.state()
        with self._lock:
            yield self._first_token.family(
                "penstock_first_token_seconds",
                "From the arrival of a sequence to its first token. One bucket boundary is the objective.",
            )
            yield self._next_token.family("penstock_token_seconds", "Between two tokens of a sequence.")
            yield self._step_rows.family("penstock_step_rows", "Sequences in a step of the engine.")
            yield self._step_seconds.family("penstock_step_seconds", "Steps of the engine, with sampling.")
            tokens = CounterMetricFamily(
                "penstock_generation_tokens",
                "Tokens of text generation: prompt (computed, again after a preemption too), cached (of prompts, found "
                "in the cache), generated.",
                labels=["kind"],
            )
            for kind, count in self._tokens.items():
                tokens.add_metric([kind], count)
            yield tokens
            yield CounterMetricFamily(
                "penstock_preemptions",
                "Sequences that gave up their cache blocks to older ones, and are computed again.",
                value=self._preemptions,
            )
        sequences = GaugeMetricFamily(
            "penstock_sequences", "Sequences by state: running, or waiting to start.", labels=["state"]
        )
        sequences.add_metric(["running"], state.running)
        sequences.add_metric(["waiting"], state.waiting)
        yield sequences
        cache = GaugeMetricFamily(
            "penstock_cache_blocks",
            "Cache blocks: used by sequences, kept for prompts that begin alike, and free.",
            labels=["state"],
        )
        for name, count in (
            ("used", state.blocks_in_use),
            ("kept", state.blocks_kept),
            ("free", blocks - state.blocks_in_use - state.blocks_kept),
        ):
            cache.add_metric([name], count)
        yield cache


def device_families(state: DeviceState) -> Iterator[Metric]:
    """The metrics of a device other than the CPU, of servers that have one."""
    cores = GaugeMetricFamily(
        "penstock_device_cores",
        "Cores of the device: granted, and in service. If these are fewer, some have failed (event NeuronCoreFailed).",
        labels=["kind"],
    )
    cores.add_metric(["granted"], state.cores)
    cores.add_metric(["in-service"], state.cores_in_service)
    yield cores
    copies = GaugeMetricFamily(
        "penstock_device_copies", "Copies of the model on the device: loaded, and in service.", labels=["kind"]
    )
    copies.add_metric(["loaded"], state.copies)
    copies.add_metric(["in-service"], state.copies - len(state.out_of_service))
    yield copies
    yield CounterMetricFamily("penstock_device_runs", "Runs of a compiled shape that ended well.", value=state.runs)
    errors = CounterMetricFamily(
        "penstock_device_errors",
        "Failed runs by kind: hardware and timed-out take a core out of service, not-a-number and other fail one run.",
        labels=["kind"],
    )
    for kind, count in sorted(state.errors.items()):
        errors.add_metric([kind], count)
    yield errors
    tokens = CounterMetricFamily(
        "penstock_device_tokens",
        "Tokens of compiled shapes that have run: real ones, and padding of lengths and rows.",
        labels=["kind"],
    )
    tokens.add_metric(["real"], state.real_tokens)
    tokens.add_metric(["padding"], state.padded_tokens - state.real_tokens)
    yield tokens


def shadow_families(shadow: ShadowState) -> Iterator[Metric]:
    """The metrics of the guard of live traffic, of servers that have one."""
    evidence = shadow.evidence
    answers = CounterMetricFamily(
        "penstock_shadow_answers",
        "Answers by what the guard of live traffic found: compared with fp32's, severe (outside the budget of one "
        "answer), checked (computed once more by the served plan), failed-check (that gave another result).",
        labels=["kind"],
    )
    for kind, count in (
        ("compared", evidence.answers),
        ("severe", evidence.severe),
        ("checked", evidence.checks),
        ("failed-check", evidence.failed_checks),
    ):
        answers.add_metric([kind], count)
    yield answers
    found = GaugeMetricFamily(
        "penstock_shadow_evidence_log10",
        "Evidence that answers are worse than those that judged the plan (arm answers), and that the comparison itself "
        "is wrong (arm check), as a logarithm: 2 is an alarm with a probability of error of 1 %.",
        labels=["arm"],
    )
    for arm, value in (("answers", evidence.value), ("check", evidence.instrument)):
        found.add_metric([arm], math.log10(max(value, 1e-12)))
    yield found
    yield GaugeMetricFamily(
        "penstock_shadow_divergence",
        "Mean divergence of the compared answers from fp32's, where 1 is a ruined answer.",
        value=evidence.divergence / max(1, evidence.answers),
    )
    yield CounterMetricFamily(
        "penstock_shadow_cpu_seconds", "CPU time of the guard of live traffic.", value=shadow.cpu_seconds
    )
    lost = CounterMetricFamily(
        "penstock_shadow_lost",
        "Answers that were chosen and not compared: no spare time (busy), an error (failed), a text that was compared "
        "before (repeated).",
        labels=["reason"],
    )
    for reason, count in shadow.lost.items():
        lost.add_metric([reason], count)
    yield lost


class ServerMetrics:
    """All metrics of one server. Request methods are for the event loop's thread; batch and cache methods for any."""

    def __init__(self, status: ServerStatus, *, objective_p95_milliseconds: float | None = None) -> None:
        self._status = status
        objective = objective_p95_milliseconds
        self.requests: dict[tuple[str, int], int] = {}
        self.rejected: dict[str, int] = {}
        self.guard = GuardMetrics()
        self.in_flight = 0
        self.bulk_requests: dict[int, int] = {}
        self.bulk_in_flight = 0
        self.bulk_tokens = 0
        self.connections: Callable[[], int] = lambda: 0
        """Number of open connections; set by the server."""
        self.queue_depth: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Waiting rows and tokens; set by the server."""
        self.bulk_depth: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """The same of the bulk lane."""
        self.device: Callable[[], DeviceState | None] = lambda: None
        """State of a device other than the CPU; set by the server."""
        self.live_guard: Callable[[], ShadowState | None] = lambda: None
        """The comparison of live answers; set by the server."""
        self.families: Callable[[], Iterator[Metric]] = self.collect_own
        """Of all models, where a server has several."""
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
        self.generation = GenerationMetrics(with_objective(FIRST_TOKEN_SECONDS, objective))
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

    def bulk_finished(self, status: int) -> None:
        """A request of the bulk lane has been answered, or cancelled."""
        self.bulk_in_flight -= 1
        self.bulk_requests[status] = self.bulk_requests.get(status, 0) + 1

    def answered(self, answer: Answer, *, is_bulk: bool = False) -> None:
        """The model has answered a request."""
        if is_bulk:
            self.bulk_tokens += answer.computed_tokens
            return
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
        yield from self.families()

    def collect_own(self) -> Iterator[Metric]:
        """The families of this model."""
        yield from self._request_families()
        if self._status.task in GUARD_TASKS:
            yield from self.guard.families()
        yield from self._bulk_families()
        yield from self._batch_families()
        yield from self.generation.families()
        yield from self._state_families()
        device = self.device()
        if device is not None:
            yield from device_families(device)
        shadow = self.live_guard()
        if shadow is not None:
            yield from shadow_families(shadow)

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

    def _bulk_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "penstock_bulk_requests",
            "Requests of the bulk lane answered, by status. No other metric of requests has them, so that replicas are "
            "added for interactive load alone.",
            labels=["code"],
        )
        for code, count in sorted(self.bulk_requests.items()):
            requests.add_metric([str(code)], count)
        yield requests
        yield GaugeMetricFamily(
            "penstock_bulk_in_flight_requests",
            "Requests of the bulk lane read and not yet answered.",
            value=self.bulk_in_flight,
        )
        yield CounterMetricFamily(
            "penstock_bulk_tokens", "Tokens computed for answered requests of the bulk lane.", value=self.bulk_tokens
        )
        rows, waiting = self.bulk_depth()
        yield GaugeMetricFamily("penstock_bulk_queue_rows", "Sequences of the bulk lane that wait.", value=rows)
        yield GaugeMetricFamily("penstock_bulk_queue_tokens", "Their tokens.", value=waiting)

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
        yield CounterMetricFamily(
            "penstock_server_crashes",
            "Earlier servers of this pod that a signal ended; the pod's first process started the server again.",
            value=status.crashes,
        )
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
