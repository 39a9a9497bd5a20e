"""Routes batches by length to one of two engines: short rows to one, longer rows to the other.

The length of a row alone decides. The batcher never mixes rows of the two engines in a batch (`batching.BatchPolicy`),
so the length of a batch's longest row decides for the whole batch.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_runtime.engines.base import Engine, EngineFacts, Parallelism, RunsRows, SharesStreams, Streams
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.rows import Batch, Outputs, Row


class RoutedEngine:
    """See `Engine`. Owns both engines."""

    def __init__(self, engine: Engine, short: Engine, longest_tokens: int) -> None:
        """`short` runs batches of rows of up to `longest_tokens` tokens; both have the same outputs."""
        self._long = engine
        self._short = short
        self._longest_tokens = longest_tokens

    @property
    def facts(self) -> EngineFacts:
        """The facts of the engine for long rows, with the other engine's in `short`; weight copies are added up."""
        long, short = self._long.facts, self._short.facts
        return replace(long, weight_copies=long.weight_copies + short.weight_copies, short=short)

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._for(batch).run(batch)

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`: with the threads of the engine that runs the batch."""
        return self._for(batch).run_wide(batch)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._for(batch).run_widening(batch)

    def run_row(self, row: Row, parallelism: Parallelism) -> Outputs | None:
        """See `RunsRows`."""
        engine = self._short if row.length <= self._longest_tokens else self._long
        return engine.run_row(row, parallelism) if isinstance(engine, RunsRows) else None

    def start_streams(self) -> Streams:
        """See `Engine`: the same threads for both engines."""
        streams = None
        if isinstance(self._long, SharesStreams):
            streams = self._long.start_shared_streams(self._short, self._is_short)
        return ThreadStreams(self) if streams is None else streams

    def close(self) -> None:
        """See `Engine`."""
        self._long.close()
        self._short.close()

    def _for(self, batch: Batch) -> Engine:
        return self._short if self._is_short(batch) else self._long

    def _is_short(self, batch: Batch) -> bool:
        return bool(batch.input_ids.shape[1] <= self._longest_tokens)
