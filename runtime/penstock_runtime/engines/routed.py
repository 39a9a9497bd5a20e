"""Two engines behind one face: short rows run on the one, all others on the other.

Which one is a matter of a row's own length only. The batcher never puts rows of the two sides together
(`batching.Company`), so that the length of a batch's longest row says it for each of them.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_runtime.engines.base import Breadth, Engine, EngineFacts, RunsRows, Streams
from penstock_runtime.engines.native import NativeEngine
from penstock_runtime.engines.native.job import NativeJob
from penstock_runtime.engines.native.streams import NativeStreams
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.rows import Batch, Outputs, Row


class RoutedEngine:
    """See `Engine`. Closes both."""

    def __init__(self, engine: Engine, short: Engine, longest_tokens: int) -> None:
        """`short` runs batches whose rows have up to `longest_tokens` tokens; both give the same outputs."""
        self._long = engine
        self._short = short
        self._longest_tokens = longest_tokens

    @property
    def facts(self) -> EngineFacts:
        """Those of the engine of the long rows, with those of the other one; the weights of both count."""
        long, short = self._long.facts, self._short.facts
        return replace(
            long,
            weight_copies=long.weight_copies + short.weight_copies,
            short=short,
        )

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._for(batch).run(batch)

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`: with the threads that each of the two was loaded with."""
        return self._for(batch).run_wide(batch)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._for(batch).run_widening(batch)

    def run_row(self, row: Row, breadth: Breadth) -> Outputs | None:
        """See `RunsRows`."""
        engine = self._short if row.length <= self._longest_tokens else self._long
        return engine.run_row(row, breadth) if isinstance(engine, RunsRows) else None

    def start_streams(self) -> Streams:
        """See `Engine`: the same threads for both."""
        long, short = self._long, self._short
        if not (isinstance(long, NativeEngine) and isinstance(short, NativeEngine)):
            return ThreadStreams(self)

        def job(batch: Batch, breadth: Breadth) -> NativeJob:
            return (short if self._is_short(batch) else long).job(batch, breadth)

        return NativeStreams(job, long.facts.threads)

    def close(self) -> None:
        """See `Engine`."""
        self._long.close()
        self._short.close()

    def _for(self, batch: Batch) -> Engine:
        return self._short if self._is_short(batch) else self._long

    def _is_short(self, batch: Batch) -> bool:
        return bool(batch.input_ids.shape[1] <= self._longest_tokens)
