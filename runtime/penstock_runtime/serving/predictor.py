"""From a request's inputs to its answer: tokenise, wait, run, assemble. The face of the runtime to HTTP and search."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

from penstock_runtime.batching.batcher import Batcher
from penstock_runtime.batching.bounds import QueueBounds
from penstock_runtime.batching.dispatcher import Lane
from penstock_runtime.batching.observer import Observer, Unobserved
from penstock_runtime.engines.base import EngineFacts
from penstock_runtime.errors import NotReady, Overloaded
from penstock_runtime.host import is_on_one_core
from penstock_runtime.serving.cache import BoundedCache, content_key, memory_size
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.warmup import warm_up
from penstock_runtime.tasks.base import Prepared

__all__ = ["Answer", "Limits", "LoadedModel", "Predictor", "Timings"]

LONG_CHARACTERS = 4000
"""Requests of more text than this are tokenised in another thread: 2 ms and more where the library does it, in which
the loop reads and answers others. Shorter ones would pay 0.05 ms for the way there and back."""

MANY_ROWS = 64
LARGE_BYTES = 64 * 2**10
"""Answers of more rows than this, or longer than this as JSON, are assembled in another thread, for the same reason: of
so many bytes it takes 2 ms (labels), and up to 8 (words for masks). Where they are remembered, they are measured in one
as well."""


class Timings(NamedTuple):
    """Where a request's time went, milliseconds of wall time."""

    queue_milliseconds: float = 0.0
    """Waiting for a core."""
    tokenization_milliseconds: float = 0.0
    inference_milliseconds: float = 0.0
    """While at least one of its rows ran, alone or in company."""
    compute_milliseconds: float = 0.0
    """Checking, tokenising, running and assembling: all but the queue."""


class Answer(NamedTuple):
    """What a request gets."""

    value: Any
    """As `Task.assemble` gives it. May be shared between answers: not to be changed."""
    timings: Timings
    tokens: int
    """Of its texts, special ones included."""
    truncated: int
    """Rows that were cut to the model's maximum."""
    remembered: bool = False
    """It was computed for an earlier request."""

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model for it."""
        return 0 if self.remembered else self.tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What may wait and be remembered."""

    max_queue_rows: int = 1024
    max_queue_tokens: int = 131_072
    deadline_seconds: float = 30.0
    """For requests that bring none of their own."""
    answer_cache_bytes: int = 0
    """0: off."""
    token_cache_bytes: int = 0
    """For tokenised requests; 0: off."""


@dataclass(slots=True, eq=False)
class _Serving:
    """A model, its lane, and who is inside."""

    model: LoadedModel
    lane: Lane
    number: int
    """Counts swaps: answers of one model must not be remembered for another."""
    visitors: int = 0
    emptied: asyncio.Event | None = None
    """Set when the last visitor leaves; where somebody waits for that."""


class Predictor:
    """Answers requests with one model at a time. Use it from one event loop."""

    def __init__(self, model: LoadedModel, limits: Limits | None = None, observer: Observer | None = None) -> None:
        self.limits = limits or Limits()
        self._observer = observer or Unobserved()
        self._swapping = asyncio.Lock()
        self._draining = False
        self._tokenizers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-tokens")
        self._preparing_characters = 0
        self._answers = _cache(self.limits.answer_cache_bytes)
        self._prepared = _cache(self.limits.token_cache_bytes)
        self._serving = self._start(model, 0)

    async def predict(
        self, inputs: Any, parameters: Mapping[str, Any], *, deadline_seconds: float | None = None, caller: int = 0
    ) -> Answer:
        """Answer one request of the HF shape.

        `deadline_seconds`: it is dropped unless all of it has started to run by then; None: the limit's. `caller`: who
        asks, a number of any kind: nobody asks anew before the answer.
        Any RequestError: InvalidInput, Overloaded, DeadlineExceeded, InferenceFailed, NotReady (draining).
        """
        if self._draining:
            raise NotReady("the server is shutting down", remedy="Try again: another replica will answer")
        arrived = perf_counter()
        key = None
        serving = self._serving
        if self._answers is not None:
            key = content_key(serving.number, inputs, parameters)
            remembered: Answer | None = self._remembered("answers", self._answers, key)
            if remembered is not None:
                timings = Timings(compute_milliseconds=(perf_counter() - arrived) * 1e3)
                return remembered._replace(timings=timings, remembered=True)
        deadline = arrived + (self.limits.deadline_seconds if deadline_seconds is None else deadline_seconds)
        serving.visitors += 1
        try:
            answer, is_large = await self._answer(
                serving, inputs, parameters, arrived=arrived, deadline=deadline, caller=caller
            )
        finally:
            serving.visitors -= 1
            if not serving.visitors and serving.emptied is not None:
                serving.emptied.set()
        if key is not None and self._answers is not None:
            size = await asyncio.to_thread(memory_size, answer) if is_large else memory_size(answer)
            self._answers.put(key, answer, size)
        return answer

    async def warm_up(self) -> None:
        """Run the shapes that will come, on every stream, before the first request."""
        await _warm_up(self._serving)

    async def replace(self, model: LoadedModel) -> None:
        """Serve with another model, warmed up first. New requests go to it at once; the old one finishes what it has
        accepted and is closed before this returns. Nobody's request fails. NotReady when draining; InferenceFailed of a
        model that does not run, CorruptModel of one that gives no numbers: the old one goes on."""
        async with self._swapping:
            if self._draining:
                await asyncio.to_thread(model.engine.close)
                raise NotReady("the server is shutting down", remedy="Start it again with the other model")
            fresh = self._start(model, self._serving.number + 1)
            try:
                await _warm_up(fresh)
            except Exception:  # not a cancellation: its thread would go on with what is closed here
                await _close(fresh)
                raise
            old, self._serving = self._serving, fresh
            for cache in (self._answers, self._prepared):
                if cache is not None:
                    cache.clear()
            await _close(old)

    async def drain(self) -> None:
        """Refuse new requests, answer those that were accepted, and free everything. A second call waits as well."""
        self._draining = True
        async with self._swapping:
            if not self._serving.model.closed:
                await _close(self._serving)
                self._tokenizers.shutdown()

    def queue_depth(self) -> tuple[int, int]:
        """Rows and tokens that wait."""
        return self._serving.lane.batcher.depth

    def facts(self) -> dict[str, Any]:
        """What is served and how, as JSON values."""
        model = self._serving.model
        engine = model.engine.facts
        rows, tokens = self.queue_depth()
        return {
            "task": model.task.name.value,
            "which": model.which,
            "plan": model.plan.model_dump(mode="json"),
            "engine": {
                **_engine_facts(engine),
                # Of both, where short rows have an engine of their own.
                "weight_copies": engine.weight_copies,
                **({"short": _engine_facts(engine.short)} if engine.short is not None else {}),
            },
            "findings": list(model.findings),
            "queue": {
                "rows": rows,
                "tokens": tokens,
                "max_rows": self.limits.max_queue_rows,
                "max_tokens": self.limits.max_queue_tokens,
                "tokens_per_second": round(self._serving.lane.batcher.tokens_per_second),
            },
            "caches": {
                name: {"entries": len(cache), "bytes": cache.bytes, "hits": cache.hits, "misses": cache.misses}
                for name, cache in (("answers", self._answers), ("tokens", self._prepared))
                if cache is not None
            },
        }

    def _start(self, model: LoadedModel, number: int) -> _Serving:
        bounds = QueueBounds(self.limits.max_queue_rows, self.limits.max_queue_tokens)
        batcher = Batcher(
            model.engine, model.io, model.plan, model.task.reduce,
            bounds=bounds, observer=self._observer, one_core=is_on_one_core(),
        )  # fmt: skip
        return _Serving(model, Lane(batcher), number)

    async def _answer(
        self,
        serving: _Serving,
        inputs: Any,
        parameters: Mapping[str, Any],
        *,
        arrived: float,
        deadline: float,
        caller: int,
    ) -> tuple[Answer, bool]:
        """The answer, and whether it is a large one."""
        task = serving.model.task
        # A full queue refuses before the text costs anything.
        serving.lane.batcher.check_room(1, 1)
        request = task.parse(inputs, parameters)
        parsed = perf_counter()
        prepared = await self._prepare(serving, request, inputs, parameters)
        tokenised = perf_counter()
        ran = await serving.lane.run(prepared.rows, arrived=tokenised, deadline=deadline, caller=caller)
        resumed = perf_counter()
        is_large = len(prepared.rows) > MANY_ROWS or prepared.answer_bytes > LARGE_BYTES
        if is_large:
            value = await asyncio.to_thread(task.assemble, prepared, ran.reduced)
        else:
            value = task.assemble(prepared, ran.reduced)
        assembling = perf_counter() - resumed
        timings = Timings(
            queue_milliseconds=ran.queue_milliseconds,
            tokenization_milliseconds=(tokenised - parsed) * 1e3,
            inference_milliseconds=ran.inference_milliseconds,
            compute_milliseconds=(tokenised - arrived + assembling) * 1e3 + ran.inference_milliseconds,
        )
        return Answer(value, timings, prepared.tokens, prepared.truncated), is_large

    async def _prepare(self, serving: _Serving, request: Any, inputs: Any, parameters: Mapping[str, Any]) -> Prepared:
        key = None
        if self._prepared is not None:
            key = content_key(serving.number, inputs, parameters)
            remembered: Prepared | None = self._remembered("tokens", self._prepared, key)
            if remembered is not None:
                return remembered
        size = characters(inputs) + characters(parameters)
        if size <= LONG_CHARACTERS:
            prepared = serving.model.task.prepare(request)
        else:
            prepared = await self._prepare_elsewhere(serving, request, size)
        if key is not None and self._prepared is not None:
            # Tasks keep what they make of parameters beside them: a hypothesis of each label, the token of each target.
            held = prepared.rows_bytes + memory_size(inputs) + 2 * memory_size(parameters)
            self._prepared.put(key, prepared, held)
        return prepared

    async def _prepare_elsewhere(self, serving: _Serving, request: Any, size: int) -> Prepared:
        # What waits for its tokens is bounded like what waits for a core; four characters are about a token.
        if self._preparing_characters and self._preparing_characters + size > 4 * self.limits.max_queue_tokens:
            raise Overloaded(f"texts of {self._preparing_characters} characters wait to be tokenised already")
        self._preparing_characters += size
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._tokenizers, serving.model.task.prepare, request)
        finally:
            self._preparing_characters -= size

    def _remembered(self, name: str, cache: BoundedCache[Any], key: bytes | None) -> Any:
        found = None if key is None else cache.get(key)
        self._observer.cache(name, hit=found is not None)
        return found


def characters(value: Any) -> int:
    """How much text a JSON value holds."""
    if isinstance(value, str):
        return len(value)
    if not value:  # as most parameters are: not asked whether they are a mapping, which is slow
        return 0
    if isinstance(value, Mapping):
        return sum(map(characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(characters, value))
    return 0


def _engine_facts(facts: EngineFacts) -> dict[str, Any]:
    return {
        "name": facts.engine,
        "version": facts.version,
        "precision": facts.precision,
        "streams": facts.threads.streams,
        "threads_per_stream": facts.threads.per_stream,
        "fused_nodes": facts.fused_nodes,
        "weight_copies": facts.weight_copies,
    }


def _cache(max_bytes: int) -> BoundedCache[Any] | None:
    return BoundedCache(max_bytes) if max_bytes else None


async def _warm_up(serving: _Serving) -> None:
    for tokens, seconds in await asyncio.to_thread(warm_up, serving.model):
        serving.lane.batcher.warmed(tokens, seconds)


async def _close(serving: _Serving) -> None:
    """Let everybody out who is inside, then end the threads and free the model."""
    while serving.visitors:
        serving.emptied = asyncio.Event()
        await serving.emptied.wait()
    await serving.lane.close()
    await asyncio.to_thread(serving.model.close)
