"""Answers requests for generated text: between the event loop, with its requests, and the thread of the engine.

A request has one or more continuations. What is new of all of them is read together, so that a client that reads slowly
gets larger pieces and no queue grows.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

from penstock_runtime.batching.queue import larger_client
from penstock_runtime.errors import NotReady, Overloaded, PromptTooLong, RequestError
from penstock_runtime.generation.loop import (
    Delta,
    FinishReason,
    GenerationJob,
    GenerationLoop,
    JobRequest,
    LoopObserver,
    LoopState,
)
from penstock_runtime.generation.sampling import SampledToken
from penstock_runtime.generation.scheduler import Step
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.predictor import Answer, Timings
from penstock_runtime.settings import GenerationSettings, QueueSettings
from penstock_runtime.tasks.base import DEFAULT_LIMITS, RequestLimits
from penstock_runtime.tasks.text_generation import Prompt, parse_request, pipeline_answer
from penstock_runtime.tokens import Tokenizer

T = TypeVar("T")

LONG_CHARACTERS = 4000
"""Of a request. Longer prompts are tokenised in another thread, so that other streams go on."""
MOST_SECONDS_TO_RETRY = 60
DEFAULT_QUEUE = QueueSettings()
DEFAULT_GENERATION = GenerationSettings()


class NullLoopObserver:
    """Observes nothing."""

    def first_token(self, seconds: float) -> None:
        """See `LoopObserver`."""

    def next_token(self, seconds: float) -> None:
        """See `LoopObserver`."""

    def step(self, step: Step, seconds: float) -> None:
        """See `LoopObserver`."""

    def reused(self, tokens: int) -> None:
        """See `LoopObserver`."""


@dataclass(slots=True)
class Continuation:
    """One continuation of a request, as far as it has got."""

    choice: int
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    finish: FinishReason | None = None
    new: list[Delta] = field(default_factory=list)
    """What `Generation.read` returned last."""

    @property
    def new_text(self) -> str:
        """The text of `new`."""
        return "".join(delta.text for delta in self.new)


class Generation:
    """One request in progress. Of the event loop's thread."""

    def __init__(self, owner: Generator, served: _ServedLoop, prompt_tokens: int, count: int, client: str) -> None:
        self._owner = owner
        self._served = served
        self.prompt_tokens = prompt_tokens
        self.client = client
        self.reused_tokens = 0
        self.continuations = [Continuation(choice) for choice in range(count)]
        self.arrived = perf_counter()
        self.first_token_at = 0.0
        self._jobs: dict[GenerationJob, Continuation] = {}
        self._later: list[tuple[Continuation, JobRequest]] = []
        """Continuations that start when the prompt is in the cache."""
        self._pending: list[tuple[Continuation, Delta]] = []
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def generated_tokens(self) -> int:
        """Of all continuations so far."""
        return sum(len(one.tokens) for one in self.continuations)

    @property
    def ended(self) -> bool:
        """All continuations have ended and been read."""
        return not self._pending and all(one.finish is not None for one in self.continuations)

    async def read(self) -> list[Continuation]:
        """The continuations with something new; empty when all have ended. Waits for the next tokens.

        RequestError: a continuation cannot be finished; the others are cancelled.
        """
        while not self._pending:
            if self.ended:
                return []
            self._changed.clear()
            await self._changed.wait()
        pending, self._pending = self._pending, []
        changed: dict[int, Continuation] = {}
        for one, delta in pending:
            if one.choice not in changed:
                changed[one.choice] = one
                one.new = []
            one.new.append(delta)
            one.text += delta.text
            if delta.token is not None:
                one.tokens.append(delta.token)
            one.finish = delta.finish or one.finish
            if one.choice == 0:  # the others share the prompt with it
                self.reused_tokens = max(self.reused_tokens, delta.reused_tokens)
            if delta.error is not None:
                raise delta.error
        return list(changed.values())

    async def read_all(self) -> list[Continuation]:
        """The finished continuations. Errors as `read`."""
        try:
            while await self.read():
                pass
        finally:
            self.close()
        return self.continuations

    def close(self) -> None:
        """End it, and cancel what has not ended. Must be called; further calls do nothing."""
        if not self._closed:
            self._closed = True
            for job in self._jobs:
                self._served.loop.cancel(job)
            self._owner._ended(self, self._served)  # noqa: SLF001 - two halves of one thing

    def start(self, requests: Sequence[JobRequest]) -> None:
        """Submit the first continuation; the others follow when it has computed the prompt, which they then share."""
        first, *later = zip(self.continuations, requests, strict=True)
        # The request has started by then: its deadline does not apply to them.
        self._later = [(one, replace(request, deadline=math.inf)) for one, request in later]
        self._submit(*first)

    def _submit(self, one: Continuation, request: JobRequest) -> None:
        job = self._served.loop.submit(request)
        self._served.generations[job] = self
        self._jobs[job] = one

    def deliver(self, job: GenerationJob, delta: Delta) -> None:
        """A step has added to a continuation."""
        if not self.first_token_at:
            self.first_token_at = perf_counter()
            self._owner._started(self)  # noqa: SLF001 - two halves of one thing
        if delta.error is None:
            later, self._later = self._later, []
            for one, request in later:
                self._submit(one, request)
        self._pending.append((self._jobs[job], delta))
        if delta.finish is not None or delta.error is not None:
            del self._jobs[job], self._served.generations[job]
        self._changed.set()

    def refuse(self, error: RequestError) -> None:
        """End it with an error before its first token: `read` raises it."""
        for job in self._jobs:
            self._served.loop.cancel(job)
        self._later.clear()
        self._pending.append((self.continuations[0], Delta(error=error)))
        self._changed.set()

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the request while it waits for its first token."""
        return 0 if self.first_token_at else self.prompt_tokens * len(self.continuations)

    def forget(self) -> None:
        """Remove what is left of its jobs from the served model."""
        for job in self._jobs:
            self._served.generations.pop(job, None)
        self._jobs.clear()
        self._later.clear()


@dataclass(eq=False)
class _ServedLoop:
    """A model, its loop, and the requests in progress on it."""

    model: GenerationModel
    loop: GenerationLoop
    generations: dict[GenerationJob, Generation] = field(default_factory=dict)
    requests: int = 0
    idle: asyncio.Event | None = None


class Generator:
    """Generates text with one model at a time. To be used from one event loop."""

    def __init__(
        self,
        model: GenerationModel,
        observer: LoopObserver | None = None,
        *,
        queue: QueueSettings = DEFAULT_QUEUE,
        settings: GenerationSettings = DEFAULT_GENERATION,
        limits: RequestLimits = DEFAULT_LIMITS,
    ) -> None:
        self._observer = observer or NullLoopObserver()
        self._queue = queue
        self._settings = settings
        self._limits = limits
        self._event_loop = asyncio.get_running_loop()
        self._swapping = asyncio.Lock()
        self._draining = False
        self._waiting: dict[Generation, None] = {}
        self._waiting_tokens = 0
        self._open: list[_ServedLoop] = []
        """With requests: the one that answers new requests, and one that was replaced and finishes its own."""
        self._served = self._start(model)

    @property
    def model(self) -> GenerationModel:
        """The model that answers new requests."""
        return self._served.model

    @property
    def longest(self) -> int:
        """The largest number of tokens of prompt and continuation together."""
        return self._served.loop.longest

    def generate(
        self, prompt: Sequence[int], requests: Sequence[JobRequest], *, deadline_seconds: float | None = None
    ) -> Generation:
        """Start a request: a continuation for each of `requests`, whose prompts, limits and deadlines are set here.

        PromptTooLong if prompt and continuation can never fit; Overloaded if too many requests wait, and none of a
        client with more of them; NotReady when draining.
        """
        if self._draining:
            raise NotReady("the server is shutting down", remedy="Try again: another replica will answer")
        served = self._served
        limits = [self._limit(len(prompt), request) for request in requests]
        client = requests[0].client
        self._make_room(len(prompt) * len(requests), len(requests), client)
        generation = Generation(self, served, len(prompt), len(requests), client)
        wait = self._queue.deadline_seconds if deadline_seconds is None else deadline_seconds
        deadline = generation.arrived + wait
        served.requests += 1
        self._waiting[generation] = None
        self._waiting_tokens += generation.waiting_tokens
        try:
            generation.start(
                [
                    replace(request, prompt=prompt, max_tokens=limit, choice=choice, deadline=deadline)
                    for choice, (request, limit) in enumerate(zip(requests, limits, strict=True))
                ]
            )
        except BaseException:
            generation.close()
            raise
        return generation

    def _limit(self, prompt: int, request: JobRequest) -> int:
        """The number of tokens to generate; `max_tokens` 0: as many as fit."""
        room = self.longest - prompt
        max_tokens = min(request.max_tokens, max(1, room)) if request.is_default_limit else request.max_tokens
        if prompt == 0:
            raise PromptTooLong("the prompt has no tokens", remedy="Send a prompt with at least one token")
        if room < max(1, max_tokens):
            wanted = f" and {max_tokens} tokens to generate" if max_tokens else ""
            raise PromptTooLong(
                f"the prompt has {prompt} tokens{wanted}; prompt and continuation may have {self.longest} together",
                remedy="Shorten the prompt, or generate fewer tokens",
            )
        return max_tokens or room

    def _make_room(self, tokens: int, rows: int, client: str) -> None:
        """If the queue is full, refuse the newest requests of clients that would still have more tokens in it than this
        one; Overloaded if there are none."""
        while True:
            waiting = sum(len(one.continuations) for one in self._waiting)
            too_many = waiting + rows > self._queue.max_queue_rows
            if not (too_many or (self._waiting and self._waiting_tokens + tokens > self._queue.max_queue_tokens)):
                return
            rate = self._served.loop.state.prompt_tokens_per_second
            seconds = math.ceil(self._waiting_tokens / rate) if rate else 1
            error = Overloaded(
                f"{waiting} sequences with {self._waiting_tokens} tokens wait already",
                retry_after_seconds=max(1, min(MOST_SECONDS_TO_RETRY, seconds)),
            )
            held: Counter[str] = Counter()
            for one in self._waiting:
                held[one.client] += one.waiting_tokens
            largest = larger_client(held, client, tokens)
            if largest is None:
                raise error
            newest = next(one for one in reversed(self._waiting) if one.client == largest)
            self._started(newest)
            newest.refuse(error)

    def _started(self, generation: Generation) -> None:
        if generation in self._waiting:
            del self._waiting[generation]
            self._waiting_tokens -= generation.prompt_tokens * len(generation.continuations)

    def _ended(self, generation: Generation, served: _ServedLoop) -> None:
        self._started(generation)
        generation.forget()
        served.requests -= 1
        if not served.requests and served.idle is not None:
            served.idle.set()

    async def predict(
        self,
        inputs: Any,
        parameters: Mapping[str, Any],
        *,
        deadline_seconds: float | None = None,
        caller: int = 0,
        client: str = "",
        tenant: str = "",
    ) -> Answer:
        """Answer one request in the format of Hugging Face's pipeline. Errors as `generate`, and InvalidInput."""
        _ = caller
        arrived = perf_counter()
        model = self.model
        request = parse_request(
            inputs,
            parameters,
            template=model.template,
            defaults=model.defaults,
            end_tokens=model.end_tokens,
            limits=self._limits,
        )
        jobs = [replace(job, tenant=tenant, client=tenant or client) for job in request.jobs]
        prompts = await self._tokens_of(request.prompts)
        tokenised = perf_counter()
        generations: list[Generation] = []
        try:
            for prompt in prompts:
                one = self.generate(prompt, jobs, deadline_seconds=deadline_seconds)
                generations.append(one)
            texts = [[each.text for each in await generation.read_all()] for generation in generations]
        finally:
            for generation in generations:
                generation.close()
        tokens = sum(each.prompt_tokens + each.generated_tokens for each in generations)
        return Answer(pipeline_answer(request, texts), timings(arrived, tokenised), tokens, 0)

    async def tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt; of a long one in another thread."""
        (tokens,) = await self._tokens_of([prompt])
        return tokens

    async def _tokens_of(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        encode = self.model.encode_prompt

        def work() -> list[list[int]]:
            return [encode(prompt.text, with_special_tokens=prompt.special) for prompt in prompts]

        size = sum(len(prompt.text) for prompt in prompts)
        return work() if size <= LONG_CHARACTERS else await asyncio.to_thread(work)

    async def with_tokenizer(self, work: Callable[[Tokenizer], T], size: int) -> T:
        """What `work` makes of the model's tokenizer and texts of `size` characters."""
        tokenizer = self.model.tokenizer
        return work(tokenizer) if size <= LONG_CHARACTERS else await asyncio.to_thread(work, tokenizer)

    async def replace(self, model: GenerationModel) -> None:
        """Answer new requests with another model. The old one finishes its streams, and is closed before this returns.

        NotReady when draining: the old model stays.
        """
        async with self._swapping:
            if self._draining:
                await asyncio.to_thread(model.engine.close)
                raise NotReady("the server is shutting down", remedy="Start it again with the other model")
            old, self._served = self._served, self._start(model)
            await _close(old)
            self._open.remove(old)

    def interrupt(self, error: RequestError) -> None:
        """End all requests with this error: the time to finish them is over."""
        self._draining = True
        for served in self._open:
            served.loop.interrupt(error)

    async def drain(self) -> None:
        """Refuse new requests, finish the accepted ones, and free the model."""
        self._draining = True
        async with self._swapping:
            await _close(self._served)

    def queue_depth(self) -> tuple[int, int]:
        """Sequences and tokens that wait for their first token."""
        return sum(len(one.continuations) for one in self._waiting), self._waiting_tokens

    def facts(self) -> dict[str, Any]:
        """Engine, cache and queue as JSON values, for `/info`."""
        served = self._served
        engine, state = served.model.engine, served.loop.state
        rows, tokens = self.queue_depth()
        return {
            "engine": dict(served.model.facts),
            "context_tokens": engine.context,
            "longest_sequence_tokens": served.loop.longest,
            "cache": {
                "block_tokens": engine.block_size,
                "blocks": engine.blocks,
                "blocks_in_use": state.blocks_in_use,
                "blocks_kept": state.blocks_kept,
            },
            "sequences": {"running": state.running, "waiting": state.waiting, "preemptions": state.preemptions},
            "chat": served.model.template is not None,
            "queue": {
                "rows": rows,
                "tokens": tokens,
                "max_rows": self._queue.max_queue_rows,
                "max_tokens": self._queue.max_queue_tokens,
            },
        }

    def state(self) -> tuple[LoopState, int]:
        """The loop after its last step, and the number of blocks in its pool, for the metrics."""
        return self._served.loop.state, self._served.model.engine.blocks

    def _start(self, model: GenerationModel) -> _ServedLoop:
        served: _ServedLoop

        def publish(events: list[tuple[GenerationJob, Delta]]) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                self._event_loop.call_soon_threadsafe(_deliver, served, events)

        loop = GenerationLoop(
            model.engine,
            model.decode,
            publish,
            self._observer,
            max_sequences=self._settings.max_sequences,
            target_gap_seconds=self._settings.target_gap_milliseconds / 1000,
            reuse=self._settings.prefix_reuse,
        )
        served = _ServedLoop(model, loop)
        self._open.append(served)
        return served


def timings(arrived: float, tokenised: float) -> Timings:
    """Of a request that ends now. Waiting counts as inference: its steps have tokens of other requests too."""
    ended = perf_counter()
    return Timings(
        tokenization_milliseconds=(tokenised - arrived) * 1e3,
        inference_milliseconds=(ended - tokenised) * 1e3,
        compute_milliseconds=(ended - arrived) * 1e3,
    )


def _deliver(served: _ServedLoop, events: list[tuple[GenerationJob, Delta]]) -> None:
    for job, delta in events:
        generation = served.generations.get(job)
        if generation is not None:
            generation.deliver(job, delta)


async def _close(served: _ServedLoop) -> None:
    """Wait for the requests in progress, then end the thread and free the model."""
    while served.requests:
        served.idle = asyncio.Event()
        await served.idle.wait()
    await asyncio.to_thread(served.loop.close)
