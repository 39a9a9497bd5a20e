"""Answers requests for generated text: between the event loop, with its requests, and the thread of the engine.

A request (`generation_request.Generation`) has one or more prompts, with one or more continuations each.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from penstock_runtime.admission import Admission, Entry, Waiting, client_of
from penstock_runtime.errors import InvalidInput, NotReady, PromptTooLong, RequestError
from penstock_runtime.generation.loop import (
    Delta,
    GenerationJob,
    GenerationLoop,
    JobRequest,
    LoopObserver,
    LoopState,
)
from penstock_runtime.generation.scheduler import Step
from penstock_runtime.generation.templates import Conversation
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.generation_request import Generation, PromptInProgress, ServedLoop
from penstock_runtime.serving.predictor import Answer, Timings
from penstock_runtime.serving.tokenizing import TokenizerThread, about_tokens
from penstock_runtime.settings import GenerationSettings, QueueSettings
from penstock_runtime.tasks.base import DEFAULT_LIMITS, RequestLimits
from penstock_runtime.tasks.text_generation import Prompt, parse_request, pipeline_answer, require_template
from penstock_runtime.tokens import Tokenizer

if TYPE_CHECKING:  # servers of one model do not load it
    from penstock_runtime.batching.shared_cores import CoreShare

T = TypeVar("T")

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
        share: CoreShare | None = None,
    ) -> None:
        """`share`: of the cores, if other models have them, too."""
        self._share = share
        self._observer = observer or NullLoopObserver()
        self._admission = Admission(queue)
        self._tokenizer_thread = TokenizerThread(queue)
        self._settings = settings
        self._limits = limits
        self._event_loop = asyncio.get_running_loop()
        self._swapping = asyncio.Lock()
        self._draining = False
        self._waiting: dict[PromptInProgress, None] = {}
        self._waiting_tokens = 0
        self._open: list[ServedLoop] = []
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

    def generate(self, prompts: Sequence[Sequence[int]], requests: Sequence[JobRequest], **given: Any) -> Generation:
        """Start a request. Arguments and errors as for `admit`."""
        generation = self.admit(prompts, requests, **given)
        generation.start()
        return generation

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[JobRequest],
        *,
        field: str = "prompt",
        deadline_seconds: float | None = None,
        arrived: float | None = None,
    ) -> Generation:
        """Admit a request, which is to be started: for each of the prompts a continuation for each of `requests`, whose
        prompts, limits and deadlines are set here. `field`: of the prompts, for errors. `arrived`: when the request
        came, `perf_counter` seconds; None: now.

        PromptTooLong if a prompt and its continuation can never fit; InvalidInput for more continuations than one
        request may have; errors of `Admission.admit`; NotReady when draining.
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
        arrived = perf_counter() if arrived is None else arrived
        deadline = self._admission.deadline(arrived, deadline_seconds)
        priority = int(requests[0].is_bulk)
        entry = Entry(requests[0].client, rows, sum(sizes) * len(requests), deadline, priority=priority)
        rate = served.loop.state.prompt_tokens_per_second
        self._admission.admit(entry, lambda: Waiting(*self.queue_depth()), rate, field=field)
        entry.work = generation = Generation(self, served, sizes, len(requests), entry)
        # When the first continuation has started, so has the request: its deadline does not apply to later ones.
        begins = generation.continuations[0]
        generation.requests = [
            [
                replace(
                    request,
                    prompt=tokens,
                    max_tokens=limit,
                    # With a seed a prompt has the answers that it has alone.
                    choice=one.choice if request.sampling.is_default_seed else choice,
                    deadline=deadline if one is begins else math.inf,
                    prompt_logprobs=None if choice else request.prompt_logprobs,
                )
                for choice, (one, request, limit) in enumerate(zip(prompt.continuations, requests, most, strict=True))
            ]
            for prompt, tokens, most in zip(generation.prompts, prompts, limits, strict=True)
        ]
        served.requests += 1
        for prompt in generation.prompts:
            self._waiting[prompt] = None
            self._waiting_tokens += prompt.waiting_tokens
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
            count = f"more than {self.longest}" if prompt == self.longest + 1 else prompt  # as `encode_prompt` counts
            raise PromptTooLong(
                f"{name} has {count} tokens{wanted}; prompt and continuation may have {self.longest} together",
                field=path,
                remedy="Shorten the prompt, or generate fewer tokens",
            )
        return max_tokens or room

    def started(self, prompt: PromptInProgress) -> None:
        """See `Queue`."""
        if prompt in self._waiting:
            del self._waiting[prompt]
            self._waiting_tokens -= prompt.waiting_tokens

    def ended(self, generation: Generation, served: ServedLoop) -> None:
        """See `Queue`."""
        for prompt in generation.prompts:
            self.started(prompt)
        self._admission.release(generation.entry)
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
        is_bulk: bool = False,
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
        client = client_of(tenant, client)
        jobs = [replace(job, tenant=tenant, client=client, is_bulk=is_bulk) for job in request.jobs]
        prompts = await self.tokens(request.prompts, client)
        tokenised = perf_counter()
        generation = self.generate(prompts, jobs, field="inputs", deadline_seconds=deadline_seconds, arrived=arrived)
        await generation.read_all()
        texts = [[each.text for each in prompt.continuations] for prompt in generation.prompts]
        tokens = generation.prompt_tokens + generation.generated_tokens
        return Answer(pipeline_answer(request, texts), timings(arrived, tokenised), tokens, 0)

    async def tokens(self, prompts: Sequence[Prompt | Conversation], client: str = "") -> list[list[int]]:
        """The tokens of prompts. Overloaded if too many wait, also before the texts are tokenised; InvalidInput if the
        model's template refuses one."""
        model, longest = self.model, self.longest
        about = sum(
            about_tokens(one.messages if isinstance(one, Conversation) else one.text, longest) for one in prompts
        )
        rate = self._served.loop.state.prompt_tokens_per_second
        self._admission.check(client, Waiting(*self.queue_depth()), rate, tokens=max(1, about))
        texts = [
            Prompt(await require_template(model.template, "messages").prompt(one, client), special=False)
            if isinstance(one, Conversation)
            else one
            for one in prompts
        ]

        def work() -> list[list[int]]:
            return [
                model.encode_prompt(prompt.text, with_special_tokens=prompt.special, most=longest) for prompt in texts
            ]

        return await self._tokenizer_thread.run(work, sum(len(prompt.text) for prompt in texts), client)

    async def with_tokenizer(self, work: Callable[[Tokenizer], T], size: int, client: str) -> T:
        """What `work` makes of the model's tokenizer and texts of `size` characters. Overloaded. `client`: see
        `admission.client_of`."""
        return await self._tokenizer_thread.run(partial(work, self.model.tokenizer), size, client)

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
        self._tokenizer_thread.close()

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
                "max_rows": self._admission.limits.max_queue_rows,
                "max_tokens": self._admission.limits.max_queue_tokens,
            },
        }

    def state(self) -> tuple[LoopState, int]:
        """The loop after its last step, and the number of blocks in its pool, for the metrics."""
        return self._served.loop.state, self._served.model.engine.blocks

    def _start(self, model: GenerationModel) -> ServedLoop:
        served: ServedLoop

        def publish(events: list[tuple[GenerationJob, Delta]]) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                self._event_loop.call_soon_threadsafe(_deliver, served, events)

        gap = self._settings.target_gap_milliseconds / 1000
        turns = None
        if self._share is not None:
            turns = self._share.turns(self._event_loop, gap)
            gap = min(gap, self._share.longest_step)
        loop = GenerationLoop(
            model.engine,
            model.decode,
            publish,
            self._observer,
            max_sequences=self._settings.max_sequences,
            target_gap_seconds=gap,
            reuse=self._settings.prefix_reuse,
            turns=turns,
        )
        served = ServedLoop(model, loop, turns)
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


def _deliver(served: ServedLoop, events: list[tuple[GenerationJob, Delta]]) -> None:
    for job, delta in events:
        generation = served.generations.get(job)
        if generation is not None:
            generation.deliver(job, delta)


async def _close(served: ServedLoop) -> None:
    """Wait for the requests in progress, then end the thread and free the model."""
    while served.requests:
        served.idle = asyncio.Event()
        await served.idle.wait()
    await asyncio.to_thread(served.loop.close)
    if served.turns is not None:
        served.turns.close()
    if served.model.template is not None:
        served.model.template.close()
