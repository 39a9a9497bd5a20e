"""Metrics of text generation: time to the first token and between tokens, sequences, cache blocks, tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from penstock_runtime.generation.loop import LoopState
from penstock_runtime.generation.scheduler import Step
from penstock_runtime.serving.tally import Tally

FIRST_TOKEN_SECONDS = (
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
    30.0,
)
TOKEN_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0,
)  # fmt: skip
STEP_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)


class GenerationMetrics:
    """A `LoopObserver` that counts, for one server. Its families are empty until `state` is set."""

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
            self._tokens["prompt"] += step.prompt_tokens
            self._tokens["generated"] += len(step.sampled)
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
