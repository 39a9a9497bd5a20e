"""Answers requests for generated text: between the event loop, with its requests, and the thread of the engine.

A request has one or more prompts, with one or more continuations each. What is new of all of them is read together, so
that a client that reads slowly gets larger pieces and no queue grows.
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
from penstock_runtime.errors import InvalidInput, NotReady, Overloaded, PromptTooLong, RequestError
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


class PromptInProgress:
    """One of the prompts of a request. Of the event loop's thread."""

    def __init__(self, generation: Generation, tokens: int, continuations: Sequence[Continuation]) -> None:
        self.generation = generation
        self.tokens = tokens
        self.continuations = continuations
        self.reused_tokens = 0
        self.started = False
        """It has its first token."""
        self.later: list[tuple[Continuation, JobRequest]] = []
        """Continuations that start when the prompt is in the cache."""

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompt for all its continuations while it waits for its first token."""
        return 0 if self.started else self.tokens * len(self.continuations)


class Generation:
    """One request in progress: one or more prompts, with a number of continuations each. Of the event loop's thread."""

    def __init__(self, owner: Generator, served: _ServedLoop, prompts: Sequence[int], count: int, client: str) -> None:
        """`prompts`: tokens of each; `count`: continuations of each, which are numbered prompt by prompt."""
        self._owner = owner
        self._served = served
        self.client = client
        self.continuations = [Continuation(choice) for choice in range(len(prompts) * count)]
        self.prompts = [
            PromptInProgress(self, tokens, self.continuations[index * count : (index + 1) * count])
            for index, tokens in enumerate(prompts)
        ]
        self.arrived = perf_counter()
        self._jobs: dict[GenerationJob, tuple[PromptInProgress, Continuation]] = {}
        self._pending: list[tuple[Continuation, Delta]] = []
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; each counts once, whatever the number of its continuations."""
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompts that were in the cache."""
        return sum(prompt.reused_tokens for prompt in self.prompts)

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

    def start(self, prompt: PromptInProgress, requests: Sequence[JobRequest]) -> None:
        """Submit the first continuation of a prompt; the others follow when it has computed the prompt, which they then
        share."""
        first, *later = zip(prompt.continuations, requests, strict=True)
        # The request has started by then: its deadline does not apply to them.
        prompt.later = [(one, replace(request, deadline=math.inf)) for one, request in later]
        self._submit(prompt, *first)

    def _submit(self, prompt: PromptInProgress, one: Continuation, request: JobRequest) -> None:
        job = self._served.loop.submit(request)
        self._served.generations[job] = self
        self._jobs[job] = prompt, one

    def deliver(self, job: GenerationJob, delta: Delta) -> None:
        """A step has added to a continuation."""
        prompt, one = self._jobs[job]
        if not prompt.started:
            self._owner._started(prompt)  # noqa: SLF001 - two halves of one thing
            prompt.started = True
        if delta.error is None:
            later, prompt.later = prompt.later, []
            for each, request in later:
                self._submit(prompt, each, request)
        if one is prompt.continuations[0]:  # the others share the prompt with it
            prompt.reused_tokens = max(prompt.reused_tokens, delta.reused_tokens)
        self._pending.append((one, delta))
        if delta.finish is not None or delta.error is not None:
            del self._jobs[job], self._served.generations[job]
        self._changed.set()

    def refuse(self, error: RequestError) -> None:
        """End it with an error: `read` raises it."""
        for job in self._jobs:
            self._served.loop.cancel(job)
        for prompt in self.prompts:
            prompt.later.clear()
        self._pending.append((self.continuations[0], Delta(error=error)))
        self._changed.set()

    def forget(self) -> None:
        """Remove what is left of its jobs from the served model."""
        for job in self._jobs:
            self._served.generations.pop(job, None)
        self._jobs.clear()
        for prompt in self.prompts:
            prompt.later.clear()


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
        self._waiting: dict[PromptInProgress, None] = {}
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
        self,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[JobRequest],
        *,
        field: str = "prompt",
        deadline_seconds: float | None = None,
    ) -> Generation:
        """Start a request: for each of the prompts a continuation for each of `requests`, whose prompts, limits and
        deadlines are set here. `field`: of the prompts, for errors.

        PromptTooLong if a prompt and its continuation can never fit; InvalidInput for more continuations than one
        request may have; Overloaded if too many requests wait, and none of a client with more of them; NotReady when
        draining.
        """
        if self._draining:
            raise NotReady("the server is shutting down", remedy="Try again: another replica will answer")
        served = self._served
        rows = len(prompts) * len(requests)
        if rows > self._limits.rows:
            raise InvalidInput(
                f"{len(prompts)} prompts with {len(requests)} answers each are {rows}; at most {self._limits.rows} fit "
                "into one request",
                field=field,
                remedy="Split it over several requests",
            )
        paths = [field] if len(prompts) == 1 else [f"{field}[{index}]" for index in range(len(prompts))]
        limits = [
            [self._limit(len(tokens), request, path) for request in requests]
            for tokens, path in zip(prompts, paths, strict=True)
        ]
        sizes = [len(tokens) for tokens in prompts]
        client = requests[0].client
        self._make_room(sum(sizes) * len(requests), rows, client)
        generation = Generation(self, served, sizes, len(requests), client)
        wait = self._queue.deadline_seconds if deadline_seconds is None else deadline_seconds
        # The first prompt starts first. When it has, so has the request: its deadline does not apply to the others.
        deadlines = [generation.arrived + wait, *[math.inf] * (len(prompts) - 1)]
        served.requests += 1
        for prompt in generation.prompts:
            self._waiting[prompt] = None
            self._waiting_tokens += prompt.waiting_tokens
        try:
            for prompt, tokens, most, deadline in zip(generation.prompts, prompts, limits, deadlines, strict=True):
                generation.start(
                    prompt,
                    [
                        replace(
                            request,
                            prompt=tokens,
                            max_tokens=limit,
                            # With a seed a prompt has the answers that it has alone.
                            choice=one.choice if request.sampling.is_default_seed else choice,
                            deadline=deadline,
                        )
                        for choice, (one, request, limit) in enumerate(
                            zip(prompt.continuations, requests, most, strict=True)
                        )
                    ],
                )
        except BaseException:
            generation.close()
            raise
        return generation

    def _limit(self, prompt: int, request: JobRequest, path: str) -> int:
        """The number of tokens to generate; `max_tokens` 0: as many as fit. `path`: of the prompt, for errors."""
        name = path if path.endswith("]") else "the prompt"
        room = self.longest - prompt
        max_tokens = min(request.max_tokens, max(1, room)) if request.is_default_limit else request.max_tokens
        if prompt == 0:
            raise PromptTooLong(f"{name} has no tokens", field=path, remedy="Send a prompt with at least one token")
        if room < max(1, max_tokens):
            wanted = f" and {max_tokens} tokens to generate" if max_tokens else ""
            raise PromptTooLong(
                f"{name} has {prompt} tokens{wanted}; prompt and continuation may have {self.longest} together",
                field=path,
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
                held[one.generation.client] += one.waiting_tokens
            largest = larger_client(held, client, tokens)
            if largest is None:
                raise error
            newest = next(one.generation for one in reversed(self._waiting) if one.generation.client == largest)
            for prompt in newest.prompts:
                self._started(prompt)
            newest.refuse(error)

    def _started(self, prompt: PromptInProgress) -> None:
        if prompt in self._waiting:
            del self._waiting[prompt]
            self._waiting_tokens -= prompt.waiting_tokens

    def _ended(self, generation: Generation, served: _ServedLoop) -> None:
        for prompt in generation.prompts:
            self._started(prompt)
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
        prompts = await self.tokens(request.prompts)
        tokenised = perf_counter()
        generation = self.generate(prompts, jobs, field="inputs", deadline_seconds=deadline_seconds)
        await generation.read_all()
        texts = [[each.text for each in prompt.continuations] for prompt in generation.prompts]
        tokens = generation.prompt_tokens + generation.generated_tokens
        return Answer(pipeline_answer(request, texts), timings(arrived, tokenised), tokens, 0)

    async def tokens(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The tokens of prompts; of long ones in another thread."""
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
