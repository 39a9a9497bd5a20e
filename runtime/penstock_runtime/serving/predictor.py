"""Answers requests: tokenises inputs, runs their rows in batches, assembles answers. Used by HTTP and the search."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock.vector_space import ARTEFACT_HEADER, HEADER
from penstock_runtime.admission import Admission, Entry, Waiting, client_of
from penstock_runtime.batching.batcher import BatchObserver, NullObserver
from penstock_runtime.batching.dispatcher import Dispatcher, RequestResult
from penstock_runtime.engines.base import DeviceState, HasDevice
from penstock_runtime.errors import NotReady
from penstock_runtime.host import is_on_one_core
from penstock_runtime.rows import Row
from penstock_runtime.serving.cache import BoundedCache, content_key, memory_size
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.probes import check_probes
from penstock_runtime.serving.shadow import Shadow, ShadowState
from penstock_runtime.serving.tokenizing import LEAST_CHARACTERS, LONG_CHARACTERS, TokenizerThread, about_tokens
from penstock_runtime.serving.warmup import warm_up
from penstock_runtime.settings import CacheSettings, QueueSettings
from penstock_runtime.tasks.base import HeadInAssemble, Prepared
from penstock_runtime.tokens import Tokenizer

if TYPE_CHECKING:  # servers of one model do not load it
    from penstock_runtime.batching.shared_cores import CoreShare

T = TypeVar("T")

MANY_ROWS = 64
LARGE_BYTES = 64 * 2**10
"""Answers with more rows, or longer as JSON, are assembled in another thread, so that the event loop serves other
requests meanwhile: `LARGE_BYTES` take 2 ms (labels) to 8 ms (words for masks). If they are cached, their size is also
computed in a thread."""

DEFAULT_QUEUE = QueueSettings()
DEFAULT_CACHES = CacheSettings()


class Timings(NamedTuple):
    """Durations of a request's steps, milliseconds of wall time."""

    queue_milliseconds: float = 0.0
    """Waiting for a stream."""
    tokenization_milliseconds: float = 0.0
    inference_milliseconds: float = 0.0
    """While at least one of its rows ran."""
    compute_milliseconds: float = 0.0
    """Checking, tokenising, running and assembling: everything but the queue."""


class Answer(NamedTuple):
    """The answer to a request."""

    value: Any
    """As returned by `Task.assemble`. May be shared between answers: not to be changed."""
    timings: Timings
    tokens: int
    """Tokens of its texts, special tokens included."""
    truncated: int
    """Rows that were cut to the model's maximum."""
    remembered: bool = False
    """True for an answer from the cache."""
    cut_at: Sequence[int | None] = ()
    """As `Prepared.cut_at`."""
    fingerprint: str = ""
    """Of an answer with vectors: their space and the artefact, see `LoadedModel.fingerprint`; empty if not known."""
    identity: bytes = b""
    """The same as headers, with what the request chose of its vectors."""

    @property
    def computed_tokens(self) -> int:
        """Tokens that the model ran for it."""
        return 0 if self.remembered else self.tokens


@dataclass(slots=True, eq=False)
class _ServedModel:
    """A model, its dispatcher, and the number of its requests in progress."""

    model: LoadedModel
    dispatcher: Dispatcher
    head_in_assemble: bool
    """The task's `assemble` computes a part of the model."""
    fingerprint: str
    """See `LoadedModel`."""
    identity: bytes
    """See `vector_headers`."""
    number: int
    """Counts replacements: part of the cache keys, since each model has different answers."""
    shadow: Shadow | None = None
    """None: its answers are not compared with fp32's."""
    requests: int = 0
    idle: asyncio.Event | None = None
    """Set when the last request ends, if `_close` waits for it."""

    def end_request(self) -> None:
        """A request that was added to `requests` has ended. The model is not closed before. No context manager: that of
        the standard library costs as much as parsing a request."""
        self.requests -= 1
        if not self.requests and self.idle is not None:
            self.idle.set()


class _Asked(NamedTuple):
    """One request."""

    inputs: Any
    parameters: Mapping[str, Any]
    arrived: float
    deadline: float
    """Both by `perf_counter`, seconds."""
    caller: int
    client: str
    """See `admission.client_of`."""
    tenant: str
    is_bulk: bool


class _InProgress(NamedTuple):
    """An answer that is being computed, for requests with the same content."""

    answer: asyncio.Future[Answer | None]
    """None: it failed. Cancelled: the request was."""
    deadline: float
    is_bulk: bool


class Predictor:
    """Answers requests with one model at a time. To be used from one event loop."""

    def __init__(
        self,
        model: LoadedModel,
        observer: BatchObserver | None = None,
        *,
        queue: QueueSettings = DEFAULT_QUEUE,
        caches: CacheSettings = DEFAULT_CACHES,
        owns_model: bool = True,
        live_guard_share: float = 0.0,
        share: CoreShare | None = None,
    ) -> None:
        """`owns_model`: whether `drain` frees the model. `live_guard_share`: see `ObservationSettings`. `share`: of the
        cores, if other models have them, too."""
        self._owns_model = owns_model
        self._share = share
        self._live_guard_share = live_guard_share
        self._admission = Admission(queue)
        self._observer = observer or NullObserver()
        self._swapping = asyncio.Lock()
        self._draining = False
        self._tokenizer_thread = TokenizerThread(queue)
        self._answers = _cache(caches.answer_cache_bytes)
        self._prepared = _cache(caches.token_cache_bytes)
        self._in_progress: dict[bytes, _InProgress] = {}
        self._served = self._start(model, 0)

    async def predict(
        self,
        inputs: Any,
        parameters: Mapping[str, Any],
        *,
        deadline_seconds: float | None = None,
        caller: int = 0,
        client: str = "",
        tenant: str = "",
        is_bulk: bool = False,
    ) -> Answer:
        """Answer one request in the format of Hugging Face.

        `deadline_seconds`: the request is dropped unless all of it has started to run by then; None: the setting's.
        `caller`: number of the connection, which has one request at a time. `client`: address of the client. `tenant`:
        name of the token; caches and computations are shared by its requests only. Tokens, or addresses without one,
        share the queue. `is_bulk`: it runs in the bulk lane (see `batching.queue`).
        Any RequestError: InvalidInput, Overloaded, DeadlineExceeded, InferenceFailed, NotReady (draining).
        """
        if self._draining:
            raise NotReady("the server is shutting down", remedy="Try again: another replica will answer")
        arrived = perf_counter()
        deadline = self._admission.deadline(arrived, deadline_seconds)
        asked = _Asked(inputs, parameters, arrived, deadline, caller, client_of(tenant, client), tenant, is_bulk)
        if self._answers is None:
            return (await self._compute(self._served, asked))[0]
        return await self._remembered_or_computed(self._answers, asked)

    async def _remembered_or_computed(self, answers: BoundedCache[Any], asked: _Asked) -> Answer:
        """The answer from the cache, from the same request that is in progress, or computed."""
        while True:
            served = self._served
            key = content_key(served.number, asked.tenant, asked.inputs, asked.parameters)
            remembered: Answer | None = self._look_up("answers", answers, key)
            if remembered is not None:
                timings = Timings(compute_milliseconds=(perf_counter() - asked.arrived) * 1e3)
                return remembered._replace(timings=timings, remembered=True)
            same = None if key is None else self._in_progress.get(key)
            # A request that may have to start earlier than the one in progress, or in another lane, does not wait for
            # it.
            if same is None or same.deadline > asked.deadline or same.is_bulk > asked.is_bulk:
                break
            served.requests += 1
            try:
                # Unlike awaiting it, this does not cancel the answer for other requests if this one is cancelled.
                await asyncio.wait((same.answer,))
            finally:
                served.end_request()
            if same.answer.cancelled():
                continue  # its client has left: the first request that waited computes it
            found = same.answer.result()
            if found is None:  # it failed: this one may not
                return (await self._compute(self._served, asked))[0]
            self._observer.cache("in-progress", hit=True)
            timings = Timings(queue_milliseconds=(perf_counter() - asked.arrived) * 1e3)
            return found._replace(timings=timings, remembered=True)
        if key is None or same is not None:
            return (await self._compute(served, asked))[0]
        return await self._compute_for_all(answers, key, served, asked)

    async def _compute_for_all(
        self, answers: BoundedCache[Any], key: bytes, served: _ServedModel, asked: _Asked
    ) -> Answer:
        """Compute an answer for all requests that wait for it, and keep it."""
        own = _InProgress(asyncio.get_running_loop().create_future(), asked.deadline, asked.is_bulk)
        self._in_progress[key] = own
        try:
            answer, is_large = await self._compute(served, asked)
            own.answer.set_result(answer)
        except asyncio.CancelledError:
            own.answer.cancel()
            raise
        except BaseException:
            own.answer.set_result(None)
            raise
        finally:
            del self._in_progress[key]
        size = await asyncio.to_thread(memory_size, answer) if is_large else memory_size(answer)
        if served is self._served:  # no later request needs an answer of a model that was replaced
            answers.put(key, answer, size)
        return answer

    async def warm_up(self) -> None:
        """Run the expected batch shapes on every stream before the first request."""
        await _warm_up(self._served)

    async def replace(self, model: LoadedModel) -> None:
        """Warm up another model and answer new requests with it. The old one finishes its requests and is closed before
        this returns; no request fails.

        NotReady when draining; InferenceFailed if the model does not run, CorruptModel if its outputs are not finite
        numbers, ArtefactError as `check_probes`: the old one stays.
        """
        async with self._swapping:
            if self._draining:
                await asyncio.to_thread(model.engine.close)
                raise NotReady("the server is shutting down", remedy="Start it again with the other model")
            fresh = self._start(model, self._served.number + 1)
            try:
                await _warm_up(fresh)
            except Exception:  # not a cancellation: the thread of the warm-up would still use the model
                await _close(fresh)
                raise
            old, self._served = self._served, fresh
            for cache in (self._answers, self._prepared):
                if cache is not None:
                    cache.clear()
            await _close(old)

    async def drain(self) -> None:
        """Refuse new requests, finish the accepted ones, and free the model. A second call waits as well."""
        self._draining = True
        async with self._swapping:
            if not self._served.model.closed:
                await _close(self._served, frees=self._owns_model)
                self._tokenizer_thread.close()

    def queue_depth(self) -> tuple[int, int]:
        """Waiting rows and tokens, without those of the bulk lane."""
        batcher = self._served.dispatcher.batcher
        (rows, tokens), (bulk_rows, bulk_tokens) = batcher.depth, batcher.bulk_depth
        return rows - bulk_rows, tokens - bulk_tokens

    def bulk_depth(self) -> tuple[int, int]:
        """Waiting rows and tokens of the bulk lane."""
        return self._served.dispatcher.batcher.bulk_depth

    def live_guard(self) -> ShadowState | None:
        """What was compared with fp32; None: it is off, or the artefact has no limits for it."""
        return None if self._served.shadow is None else self._served.shadow.state

    def device(self) -> DeviceState | None:
        """State of the device that the model runs on; None: it runs on the CPU. From any thread."""
        engine = self._served.model.engine
        return engine.device() if isinstance(engine, HasDevice) else None

    def facts(self) -> dict[str, Any]:
        """Model, plan, engine, queue and caches as JSON values, for `/info`."""
        model = self._served.model
        engine = model.engine.facts
        rows, tokens = self.queue_depth()
        device = self.device()
        return {
            "task": model.task.name.value,
            "which": model.which,
            "plan": model.plan.model_dump(mode="json"),
            "engine": {
                **engine.as_json(),
                # Of both, if short rows have a separate engine.
                "weight_copies": engine.weight_copies,
                **({"short": engine.short.as_json()} if engine.short is not None else {}),
            },
            **({"device": device.as_json()} if device is not None else {}),
            "findings": list(model.findings),
            "queue": {
                "rows": rows,
                "tokens": tokens,
                "max_rows": self._admission.limits.max_queue_rows,
                "max_tokens": self._admission.limits.max_queue_tokens,
                "tokens_per_second": round(self._served.dispatcher.batcher.tokens_per_second),
            },
            "caches": {
                name: {"entries": len(cache), "bytes": cache.bytes, "hits": cache.hits, "misses": cache.misses}
                for name, cache in (("answers", self._answers), ("tokens", self._prepared))
                if cache is not None
            },
        }

    def _start(self, model: LoadedModel, number: int) -> _ServedModel:
        dispatcher = Dispatcher(
            model.engine,
            model.io,
            model.plan,
            model.task.reduce,
            observer=self._observer,
            one_core=is_on_one_core(),
            share=self._share,
        )
        if self._share is not None:
            self._share.measured(model.plan, model.manifest)
        fingerprint = model.fingerprint
        in_assemble = isinstance(model.task, HeadInAssemble)
        served = _ServedModel(model, dispatcher, in_assemble, fingerprint, vector_headers(fingerprint), number)
        if self._live_guard_share and model.live is not None:
            served.shadow = Shadow(
                model,
                model.live,
                cpu_share=self._live_guard_share,
                is_idle=lambda: not dispatcher.batcher.depth[0],
                again=partial(self._again, dispatcher),
            )
        return served

    async def _again(self, dispatcher: Dispatcher, row: Row) -> Any:
        """The result of a row that has run before."""
        now = perf_counter()
        return (await dispatcher.result(dispatcher.start([row], arrived=now, deadline=math.inf))).reduced[0]

    async def _compute(self, served: _ServedModel, asked: _Asked) -> tuple[Answer, bool]:
        """The answer of the model, and whether it is large."""
        task, dispatcher, shadow = served.model.task, served.dispatcher, served.shadow
        is_compared = shadow is not None and shadow.wants(asked.arrived)
        served.requests += 1
        try:
            # Refuse before tokenising if the queue is full.
            batcher = dispatcher.batcher
            waiting = Waiting(*batcher.depth)
            self._admission.check(asked.client, waiting, batcher.tokens_per_second, priority=int(asked.is_bulk))
            request = task.parse(asked.inputs, asked.parameters)
            parsed = perf_counter()
            prepared = await self._prepare(served, request, asked)
            tokenised = perf_counter()
            ran = None
            if not asked.is_bulk or not prepared.rows:
                ran = dispatcher.run_inline(
                    prepared.rows, arrived=tokenised, deadline=asked.deadline, caller=asked.caller
                )
            ran = ran or await self._run(dispatcher, prepared.rows, tokenised, asked)
            resumed = perf_counter()
            if is_compared and shadow is not None and prepared.rows:
                shadow.offer(prepared.rows, ran.reduced)
            is_large = len(prepared.rows) > MANY_ROWS or prepared.answer_bytes > LARGE_BYTES
            if is_large:
                value = await asyncio.to_thread(task.assemble, prepared, ran.reduced)
            else:
                value = task.assemble(prepared, ran.reduced)
            assembling = perf_counter() - resumed
        finally:
            served.end_request()
        timings = Timings(
            queue_milliseconds=ran.queue_milliseconds,
            tokenization_milliseconds=(tokenised - parsed) * 1e3,
            inference_milliseconds=ran.inference_milliseconds + (assembling * 1e3 if served.head_in_assemble else 0.0),
            compute_milliseconds=(tokenised - asked.arrived + assembling) * 1e3 + ran.inference_milliseconds,
        )
        answer = Answer(value, timings, prepared.tokens, prepared.truncated, cut_at=prepared.cut_at)
        if prepared.vectors and served.identity:
            answer = answer._replace(fingerprint=served.fingerprint, identity=served.identity % prepared.vectors)
        return answer, is_large

    async def _run(self, dispatcher: Dispatcher, rows: Sequence[Row], arrived: float, asked: _Asked) -> RequestResult:
        """Admit rows to the queue, and run them."""
        batcher = dispatcher.batcher
        tokens = sum(row.length for row in rows)
        entry = Entry(asked.client, len(rows), tokens, asked.deadline, priority=int(asked.is_bulk))
        self._admission.admit(entry, lambda: Waiting(*batcher.depth), batcher.tokens_per_second)
        share, claim = self._share, None
        try:
            if share is not None:
                seconds, longest = batcher.core_seconds(rows)
                claim = share.claim(
                    seconds, longest, arrived=asked.arrived, deadline=entry.deadline, is_bulk=asked.is_bulk
                )
            entry.work = call = dispatcher.start(
                rows,
                arrived=arrived,
                deadline=entry.deadline,
                client=entry.client,
                is_bulk=asked.is_bulk,
                claim=claim,
            )
            return await dispatcher.result(call)
        finally:
            self._admission.release(entry)
            if share is not None and claim is not None:
                share.cores.release(claim)

    async def _prepare(self, served: _ServedModel, request: Any, asked: _Asked) -> Prepared:
        inputs, parameters = asked.inputs, asked.parameters
        key = None
        if self._prepared is not None:
            key = content_key(served.number, asked.tenant, inputs, parameters)
            remembered: Prepared | None = self._look_up("tokens", self._prepared, key)
            if remembered is not None:
                return remembered
        size = characters(inputs) + characters(parameters)
        if size <= LONG_CHARACTERS:
            prepared = served.model.task.prepare(request)
        else:
            # Refuse what the queue has no room for before its texts are tokenised.
            batcher = served.dispatcher.batcher
            about = about_tokens((inputs, parameters), served.model.max_tokens)
            waiting = Waiting(*batcher.depth)
            self._admission.check(
                asked.client, waiting, batcher.tokens_per_second, tokens=about, priority=int(asked.is_bulk)
            )
            work = partial(served.model.task.prepare, request)
            prepared = await self._tokenizer_thread.run(work, size, asked.client)
        if key is not None and self._prepared is not None:
            # Tasks also keep results for parameters: a hypothesis for each label, the token of each target.
            held = prepared.rows_bytes + memory_size(inputs) + 2 * memory_size(parameters)
            self._prepared.put(key, prepared, held)
        return prepared

    async def with_tokenizer(self, work: Callable[[Tokenizer], T], size: int, client: str) -> T:
        """What `work` makes of the model's tokenizer and texts of `size` characters. NotReady, Overloaded. `client`:
        see `admission.client_of`."""
        if self._draining:
            raise NotReady("the server is shutting down", remedy="Try again: another replica will answer")
        tokenizer = self._served.model.task.tokenizer
        return await self._tokenizer_thread.run(partial(work, tokenizer), size, client)

    def _look_up(self, name: str, cache: BoundedCache[Any], key: bytes | None) -> Any:
        found = None if key is None else cache.get(key)
        self._observer.cache(name, hit=found is not None)
        return found


def vector_headers(fingerprint: str) -> bytes:
    """The headers with the identity of vectors; `%b` takes what a request chose (`Prepared.vectors`)."""
    space, _, artefact = fingerprint.partition("/")
    return f"{HEADER}: {space}; %b\r\n{ARTEFACT_HEADER}: {artefact}\r\n".encode() if space else b""


def characters(value: Any) -> int:
    """Characters of all texts in a JSON value, at least `LEAST_CHARACTERS` of each: what it costs to tokenise them."""
    if isinstance(value, str):
        return max(len(value), LEAST_CHARACTERS)
    if not value:  # most parameters are empty, and the check for a mapping is slow
        return 0
    if isinstance(value, Mapping):
        return sum(map(characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(characters, value))
    return 0


def _cache(max_bytes: int) -> BoundedCache[Any] | None:
    return BoundedCache(max_bytes) if max_bytes else None


async def _warm_up(served: _ServedModel) -> None:
    await asyncio.to_thread(check_probes, served.model)
    for tokens, seconds in await asyncio.to_thread(warm_up, served.model):
        served.dispatcher.batcher.add_measurement(tokens, seconds)


async def _close(served: _ServedModel, *, frees: bool = True) -> None:
    """Wait for the requests in progress, then stop the streams and free the model."""
    while served.requests:
        served.idle = asyncio.Event()
        await served.idle.wait()
    if served.shadow is not None:
        await served.shadow.close()
    await served.dispatcher.close()
    if frees:
        await asyncio.to_thread(served.model.close)
