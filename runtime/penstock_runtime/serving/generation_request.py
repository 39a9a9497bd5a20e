"""Requests for generated text in progress: their prompts, and the continuations of each as far as they have got.

What is new of all continuations is read together, so that a client that reads slowly gets larger pieces and no queue
grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from penstock_runtime.admission import Entry
from penstock_runtime.errors import RequestError
from penstock_runtime.generation.grammar import Grammar
from penstock_runtime.generation.loop import Delta, FinishReason, GenerationJob, GenerationLoop, JobRequest
from penstock_runtime.generation.sampling import SampledToken
from penstock_runtime.serving.generation_model import GenerationModel

if TYPE_CHECKING:  # servers of one model do not load it
    from penstock_runtime.batching.shared_cores import StepTurns


@dataclass(slots=True)
class Continuation:
    """One continuation of a request, as far as it has got."""

    choice: int
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    prompt: tuple[SampledToken, ...] = ()
    """The prompt's tokens from the second one on, with their probabilities, if they were wanted."""
    finish: FinishReason | None = None
    stop: str = ""
    """The stop string that ended it."""
    new: list[Delta] = field(default_factory=list)
    """What `Generation.read` returned last."""

    @property
    def new_text(self) -> str:
        """The text of `new`."""
        return "".join(delta.text for delta in self.new)


class Queue(Protocol):
    """Is called when a prompt leaves the queue, and when a request ends."""

    def started(self, prompt: PromptInProgress) -> None:
        """It has its first token, or its request has ended."""
        ...

    def ended(self, generation: Generation, served: ServedLoop) -> None:
        """Called once for each request."""
        ...


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

    def __init__(self, queue: Queue, served: ServedLoop, prompts: Sequence[int], count: int, entry: Entry) -> None:
        """`prompts`: tokens of each; `count`: continuations of each, which are numbered prompt by prompt; `entry`: of
        the request in the queue."""
        self._queue = queue
        self._served = served
        self.entry = entry
        self.continuations = [Continuation(choice) for choice in range(len(prompts) * count)]
        self.prompts = [
            PromptInProgress(self, tokens, self.continuations[index * count : (index + 1) * count])
            for index, tokens in enumerate(prompts)
        ]
        self.requests: list[list[JobRequest]] = []
        """What `start` submits: for each prompt its continuations."""
        self._jobs: dict[GenerationJob, tuple[PromptInProgress, Continuation]] = {}
        self._pending: list[tuple[Continuation, Delta]] = []
        self._changed = asyncio.Event()
        self._closed = self._refused = False

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

        RequestError: a continuation cannot be finished; the remaining ones are cancelled.
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
            one.prompt = delta.prompt or one.prompt
            one.finish = delta.finish or one.finish
            one.stop = delta.stop or one.stop
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
        """End it, and cancel the unfinished continuations. Must be called; further calls do nothing."""
        if not self._closed:
            self._closed = True
            for job in self._jobs:
                self._served.loop.cancel(job)
            self._queue.ended(self, self._served)

    def start(self, grammar: Grammar | None = None) -> None:
        """Submit the first continuation of each prompt; the others follow when it has computed the prompt, which they
        then share. `grammar`: of all texts."""
        if self._closed or self._refused:
            return
        try:
            for prompt, requests in zip(self.prompts, self.requests, strict=True):
                given = [replace(one, grammar=grammar) for one in requests] if grammar is not None else requests
                first, *prompt.later = zip(prompt.continuations, given, strict=True)
                self._submit(prompt, *first)
        except BaseException:
            self.close()
            raise

    def _submit(self, prompt: PromptInProgress, one: Continuation, request: JobRequest) -> None:
        job = self._served.loop.submit(request)
        self._served.generations[job] = self
        self._jobs[job] = prompt, one

    def deliver(self, job: GenerationJob, delta: Delta) -> None:
        """A step has added to a continuation."""
        prompt, one = self._jobs[job]
        if not prompt.started:
            self._queue.started(prompt)
            prompt.started = True
        if delta.error is None:
            later, prompt.later = prompt.later, []
            for each, request in later:
                self._submit(prompt, each, request)
        if one is prompt.continuations[0]:  # all share the prompt with it
            prompt.reused_tokens = max(prompt.reused_tokens, delta.reused_tokens)
        self._pending.append((one, delta))
        if delta.finish is not None or delta.error is not None:
            del self._jobs[job], self._served.generations[job]
        self._changed.set()

    def is_waiting(self) -> bool:
        """Whether one of the prompts has no token yet."""
        return not self._closed and any(not prompt.started for prompt in self.prompts)

    def refuse(self, error: RequestError) -> None:
        """End it with an error, which `read` raises; none of its prompts waits any longer."""
        self._refused = True
        for prompt in self.prompts:
            self._queue.started(prompt)
        for job in self._jobs:
            self._served.loop.cancel(job)
        for prompt in self.prompts:
            prompt.later.clear()
        self._pending.append((self.continuations[0], Delta(error=error)))
        self._changed.set()

    def forget(self) -> None:
        """Remove its remaining jobs from the served model."""
        for job in self._jobs:
            self._served.generations.pop(job, None)
        self._jobs.clear()
        for prompt in self.prompts:
            prompt.later.clear()


@dataclass(eq=False)
class ServedLoop:
    """A model, its loop, and the requests in progress on it."""

    model: GenerationModel
    loop: GenerationLoop
    turns: StepTurns | None = None
    """On the cores, if other models have them, too."""
    generations: dict[GenerationJob, Generation] = field(default_factory=dict)
    requests: int = 0
    idle: asyncio.Event | None = None
