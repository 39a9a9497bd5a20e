"""The engines of a candidate's process: loaded when a plan asks for them, and kept for the next one that does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

from penstock.recipe import Plan, Recipe
from penstock_optimizer.candidate.lab import GraphFile
from penstock_runtime.engines.base import Engine, EngineFacts, Streams, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.engines.routed import RoutedEngine
from penstock_runtime.rows import Batch, Outputs
from penstock_runtime.serving.loaded_model import check_same_outputs

ENGINES_KEPT = 2
LARGE_BYTES = 600_000_000
"""Of a graph's files: of larger ones only one engine is kept."""

Shape = tuple[Recipe, Threads, bool]
"""What an engine runs, its threads, and whether it runs wide."""


def shapes(plan: Plan) -> tuple[Shape, ...]:
    """Of the engines that a plan takes: its own, and that of its short rows."""
    sides = [side for side in (plan, plan.of_short_rows) if side is not None]
    return tuple((side.recipe, Threads(side.streams, side.threads_per_stream), side.may_run_wide) for side in sides)


class Kept:
    """An engine that its user may not close: it is used again for the next plan."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._engine.facts

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._engine.run(batch)

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._engine.run_wide(batch)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._engine.run_widening(batch)

    def start_streams(self) -> Streams:
        """See `Engine`."""
        return self._engine.start_streams()

    def close(self) -> None:
        """Nothing: whoever keeps it closes it."""


class KeptEngines:
    """Engines of one recipe's graph, and of those that serve short rows beside it."""

    def __init__(self, recipe: Recipe, graph: GraphFile) -> None:
        self._recipe = recipe
        self._graphs = {recipe: graph}
        self._engines: dict[Shape, Engine] = {}
        self._warm: set[tuple[Shape, ...] | Plan] = set()

    def know(self, recipe: Recipe, graph: GraphFile) -> None:
        """Where another recipe's graph lies. ArtefactError when its answers cannot be read like the own one's."""
        check_same_outputs(self._graphs[self._recipe].io, graph.io)
        self._graphs[recipe] = graph

    def of(self, plan: Plan) -> Engine:
        """The engine of a plan, or its two as one."""
        own, *short = [self.get(shape) for shape in shapes(plan)]
        return own if plan.short is None else RoutedEngine(own, short[0], plan.short.longest_tokens)

    def get(self, shape: Shape) -> Engine:
        """A graph, loaded with these threads. The last few are kept: a challenger and its incumbent take turns."""
        engine = self._engines.pop(shape, None)
        if engine is None:
            recipe, threads, wide = shape
            graph = self._graphs[recipe]
            # That of short rows comes on top: the one that it is beside was asked for just before.
            most = _kept_of(graph) + (recipe != self._recipe)
            while len(self._engines) >= most:
                self._forget(next(iter(self._engines)))
            engine = load_engine(Path(graph.path), graph.io, recipe, threads, wide=wide)
        # At the end again: the first one is the one that was not used for the longest time.
        self._engines[shape] = engine
        return engine

    @property
    def most(self) -> int:
        """How many of the own graph are kept at once."""
        return _kept_of(self._graphs[self._recipe])

    def is_warm(self, what: tuple[Shape, ...] | Plan) -> bool:
        """True when `warmed` was said of it since its engines were loaded."""
        return what in self._warm

    def warmed(self, what: tuple[Shape, ...] | Plan) -> None:
        """Remember that these engines, or the batches of this plan, have run."""
        self._warm.add(what)

    def close(self, *, but: Shape | None = None) -> None:
        """Free all of them, or all but one."""
        for shape in list(self._engines):
            if shape != but:
                self._forget(shape)

    def _forget(self, shape: Shape) -> None:
        self._engines.pop(shape).close()
        self._warm = {one for one in self._warm if shape not in (shapes(one) if isinstance(one, Plan) else one)}


def _kept_of(graph: GraphFile) -> int:
    size = sum(file.stat().st_size for file in Path(graph.path).parent.iterdir() if file.is_file())
    return ENGINES_KEPT if size < LARGE_BYTES else 1


def resident_bytes() -> int:
    """Memory of this process that is in use now: what was freed is given back first."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc keeps what it keeps
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
