"""The thread that runs an engine: schedules steps, samples tokens, makes text of them, and publishes them.

The event loop submits and cancels jobs through a queue of commands, which is read before each step: a cancelled job
takes part in no further step. After each step all new tokens are published with one call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.logs import log_event
from penstock_runtime.engines.base import StepEngine
from penstock_runtime.errors import InferenceFailed, NotReady, RequestError, deadline_exceeded
from penstock_runtime.generation import scheduler
from penstock_runtime.generation.detokeniser import Detokeniser, StopStrings
from penstock_runtime.generation.grammar import Grammar, GrammarState
from penstock_runtime.generation.sampling import (
    SampledToken,
    SamplingParameters,
    TokenHistory,
    sample,
    with_probabilities,
)
from penstock_runtime.generation.scheduler import DEFAULT_SEQUENCES, ChunkBudget, Scheduler, Step

logger = logging.getLogger("penstock.generation")

TARGET_GAP_SECONDS = 0.05
"""Prompt chunks are as large as this time between two tokens of a running stream allows."""

NO_TOKEN = 0
"""The token of a job that ends because it has none."""


class FinishReason(StrEnum):
    """Why a continuation ended."""

    END_TOKEN = "end token"  # noqa: S105 - not a password
    STOP_STRING = "stop string"
    GRAMMAR = "grammar"
    """The text has the requested form, and nothing may follow."""
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One continuation of one prompt."""

    prompt: Sequence[int]
    max_tokens: int
    """At least 1; prompt and these tokens fit into the engine's context and pool."""
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """The stop string is part of the text."""
    end_tokens: frozenset[int] = frozenset()
    choice: int = 0
    tenant: str = ""
    """Beginnings of prompts are shared within a tenant only."""
    client: str = ""
    """Clients get equal shares of steps and blocks."""
    is_bulk: bool = False
    """It starts after those that are not, and is not counted as load."""
    grammar: Grammar | None = None
    """The form of the text; each job has a state in it."""
    deadline: float = float("inf")
    """It is dropped unless it has started by then, `perf_counter` seconds."""
    is_default_limit: bool = False
    """`max_tokens` is a default: fewer if not as many fit."""
    min_tokens: int = 0
    """Until then no end token is chosen, and no stop string ends the text."""
    prompt_logprobs: int | None = None
    """The number of most probable tokens to report for each token of the prompt; None: no probabilities at all."""
    is_prompt_only: bool = False
    """Nothing is generated."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The result of a step for one continuation."""

    text: str = ""
    """May be empty: a character or a possible stop string is not complete."""
    token: SampledToken | None = None
    finish: FinishReason | None = None
    stop: str = ""
    """The stop string that ended it."""
    error: RequestError | None = None
    """The job ended without a finish reason."""
    reused_tokens: int = 0
    """Tokens of the prompt that were in the cache."""
    prompt: tuple[SampledToken, ...] = ()
    """With the first token: those of the prompt but its first one, with their probabilities."""


@dataclass(eq=False, slots=True)
class GenerationJob:
    """A continuation in progress. Of the loop's thread, but for `request`."""

    request: JobRequest
    sequence: scheduler.Sequence
    detokeniser: Detokeniser
    stops: StopStrings
    history: TokenHistory
    arrived: float
    grammar: GrammarState | None = None
    last_token: float = 0.0
    """When the last token was sampled, `perf_counter` seconds; 0 before the first."""
    generated: int = 0
    scored: list[SampledToken] = field(default_factory=list)
    """Tokens of the prompt from its second one on, with their probabilities."""


class LoopObserver(Protocol):
    """Is called by the loop's thread."""

    def first_token(self, seconds: float) -> None:
        """From the arrival of a job to its first token."""
        ...

    def next_token(self, seconds: float) -> None:
        """Between two tokens of a job."""
        ...

    def step(self, step: Step, seconds: float) -> None:
        """A step was computed."""
        ...

    def reused(self, tokens: int) -> None:
        """Tokens of a prompt were found in the cache."""
        ...


class Turns(Protocol):
    """Turns on cores that several models share. Is called by the loop's thread."""

    def begin(self) -> None:
        """Wait for the cores."""
        ...

    def end(self, seconds: float) -> None:
        """A step has taken so long."""
        ...


@dataclass(frozen=True, slots=True)
class LoopState:
    """The loop after its last step."""

    running: int = 0
    waiting: int = 0
    blocks_in_use: int = 0
    blocks_kept: int = 0
    preemptions: int = 0
    prompt_tokens_per_second: float = 0.0
    """Of the last steps that computed prompts; 0 before the first."""


class GenerationLoop:
    """Runs jobs on an engine until it is closed. `submit`, `cancel`, `interrupt` and `close` are for any thread."""

    def __init__(
        self,
        engine: StepEngine,
        decode: Callable[[Sequence[int]], str],
        publish: Callable[[list[tuple[GenerationJob, Delta]]], None],
        observer: LoopObserver,
        *,
        max_sequences: int = DEFAULT_SEQUENCES,
        target_gap_seconds: float = TARGET_GAP_SECONDS,
        reuse: bool = True,
        turns: Turns | None = None,
    ) -> None:
        self.engine = engine
        self._decode = decode
        self._publish = publish
        self._turns = turns
        self._observer = observer
        self._scheduler = Scheduler(engine.blocks, engine.block_size, max_sequences=max_sequences, reuse=reuse)
        self._budget = ChunkBudget(target_gap_seconds)
        self._jobs: dict[scheduler.Sequence, GenerationJob] = {}
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._events: list[tuple[GenerationJob, Delta]] = []
        self._numbers = iter(range(2**62))
        self._number_lock = threading.Lock()
        self._closing = False
        self.state = LoopState()
        self._preemptions = 0
        self._prompt_rate = 0.0
        self._thread = threading.Thread(target=self._run, name="penstock-generation", daemon=True)
        self._thread.start()

    @property
    def longest(self) -> int:
        """The largest number of tokens of prompt and continuation together."""
        return min(self.engine.context, self._scheduler.capacity)

    def submit(self, request: JobRequest) -> GenerationJob:
        """Start a continuation; its deltas are published."""
        with self._number_lock:
            number = next(self._numbers)
        limit = len(request.prompt) + request.max_tokens
        sequence = scheduler.Sequence(
            number,
            list(request.prompt),
            limit,
            request.tenant,
            request.client,
            is_bulk=request.is_bulk,
            scores_prompt=request.prompt_logprobs is not None,
        )
        stops = StopStrings(request.stop, include=request.include_stop)
        grammar = None if request.grammar is None else request.grammar.start()
        history = TokenHistory(request.prompt)
        job = GenerationJob(request, sequence, Detokeniser(self._decode), stops, history, perf_counter(), grammar)
        self._commands.put(lambda: self._add(job))
        return job

    def cancel(self, job: GenerationJob) -> None:
        """End a job; nothing more is published for it. Does nothing if it has ended."""
        self._commands.put(lambda: self._remove(job))

    def interrupt(self, error: RequestError) -> None:
        """End all jobs with this error."""
        self._commands.put(lambda: self._fail(list(self._jobs.values()), error))

    def close(self) -> None:
        """End the thread after the current step and close the engine. Jobs in progress end with NotReady."""

        def close() -> None:
            self._closing = True

        self.interrupt(NotReady("the server is shutting down"))
        self._commands.put(close)
        self._thread.join()

    # The loop's thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._read_commands()
                self._drop_late()
                if self._jobs:
                    self._step()
            except Exception as error:  # a defect: otherwise all requests would wait for ever
                logger.exception("generation failed", extra=log_event("GenerationFailed", reason=error))
                self._fail(list(self._jobs.values()), _failed())
            self._flush()
        self.engine.close()

    def _read_commands(self) -> None:
        if not self._jobs:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _add(self, job: GenerationJob) -> None:
        if self._closing:
            self._events.append((job, Delta(error=NotReady("the server is shutting down"))))
            return
        try:
            self._scheduler.add(job.sequence)
        except ValueError as error:  # a defect: the generator checks the length before
            logger.exception("a sequence cannot run", extra=log_event("SamplingFailed", reason=error))
            self._events.append((job, Delta(error=_failed())))
            return
        self._jobs[job.sequence] = job

    def _remove(self, job: GenerationJob) -> None:
        if self._jobs.pop(job.sequence, None) is not None:
            self._scheduler.remove(job.sequence)

    def _fail(self, jobs: Sequence[GenerationJob], error: RequestError) -> None:
        for job in jobs:
            self._remove(job)
            self._events.append((job, Delta(error=error)))

    def _drop_late(self) -> None:
        now = perf_counter()
        late = [one for one in self._scheduler.waiting if not one.started and self._jobs[one].request.deadline < now]
        if late:
            self._fail([self._jobs[one] for one in late], deadline_exceeded())

    def _step(self) -> None:
        generating = sum(one.missing == 1 for one in self._scheduler.running)
        step = self._scheduler.plan(self._budget.tokens(generating))
        self._preemptions += step.preempted
        if self._turns is not None:
            self._turns.begin()
        began = perf_counter()
        try:
            logits = self.engine.step(step.engine_rows())
        except Exception as error:  # engines raise what their libraries do
            logger.exception(
                "a step of %d tokens failed", step.tokens, extra=log_event("GenerationFailed", reason=error)
            )
            self._fail([self._jobs[row.sequence] for row in step.rows], _failed())
            return
        finally:
            if self._turns is not None:
                self._turns.end(perf_counter() - began)
        sampled, end = [], 0
        for row in step.rows:
            begin, end = end, end + row.logits
            job = self._jobs[row.sequence]
            if row.sequence.scores_prompt:
                self._score(job, row.sequence.computed, logits[begin:end])
            if row.samples:
                sampled.append(self._sample(job, logits[end - 1]))
        self._scheduler.commit(step, [one.token if isinstance(one, SampledToken) else NO_TOKEN for one in sampled])
        seconds = perf_counter() - began
        self._budget.observe(step.prompt_tokens, generating, seconds)
        if step.prompt_tokens:
            self._prompt_rate = step.prompt_tokens / seconds
        self._observer.step(step, seconds)
        for sequence, token in zip(step.sampled, sampled, strict=True):
            job = self._jobs[sequence]
            if isinstance(token, RequestError):
                self._fail([job], token)
            elif not self._add_or_log(job, token):
                self._fail([job], _failed())

    @staticmethod
    def _score(job: GenerationJob, position: int, logits: NDArray[np.float32]) -> None:
        """Add the probabilities of tokens of the prompt: `logits` of the tokens from `position` on."""
        count = job.request.prompt_logprobs or 0
        # The first ones are known if the sequence gave up its blocks and is computed again.
        for index in range(len(job.scored), min(position + len(logits), len(job.request.prompt) - 1)):
            job.scored.append(with_probabilities(logits[index - position], job.request.prompt[index + 1], count))

    def _sample(self, job: GenerationJob, logits: NDArray[np.float32]) -> SampledToken | RequestError:
        """The next token of a job; an error if it has none, which concerns no other job."""
        request = job.request
        if not np.isfinite(logits.max()):
            logger.error("the logits of a token are not finite numbers", extra=log_event("LogitsNotFinite"))
            return _failed()
        try:
            allowed = None if job.grammar is None else job.grammar.allowed()
            if job.generated < request.min_tokens:
                allowed = _without(request.end_tokens, len(logits), allowed)
            return sample(logits, request.sampling, job.history, job.generated, request.choice, allowed=allowed)
        except RequestError as error:  # of its grammar
            return error
        except Exception as error:  # defects
            logger.exception("a token could not be chosen", extra=log_event("SamplingFailed", reason=error))
            return _failed()

    def _add_or_log(self, job: GenerationJob, token: SampledToken) -> bool:
        """Add a token to its job; false if its text cannot be made, which concerns no other job."""
        try:
            self._add_token(job, token)
        except Exception as error:  # of the tokenizer's library, and defects
            logger.exception("a token has no text", extra=log_event("SamplingFailed", reason=error))
            return False
        return True

    def _add_token(self, job: GenerationJob, token: SampledToken) -> None:
        request, now = job.request, perf_counter()
        is_first = job.generated == 0
        if is_first:
            if not request.is_bulk:
                self._observer.first_token(now - job.arrived)
            self._observer.reused(job.sequence.reused)
        elif not request.is_bulk:
            self._observer.next_token(now - job.last_token)
        job.last_token = now
        job.generated += 1
        job.history.add(token.token)
        finish: FinishReason | None = None
        text = ""
        if request.is_prompt_only:
            self._remove(job)
            self._events.append((job, Delta(finish=FinishReason.LENGTH, prompt=tuple(job.scored))))
            return
        if token.token in request.end_tokens:
            finish = FinishReason.END_TOKEN
        else:
            text = job.detokeniser.push(token.token)
            # A stop string has its effect in later text only.
            text = job.stops.push(text) if job.generated > request.min_tokens else text
            if job.stops.found is not None:
                finish = FinishReason.STOP_STRING
            elif job.grammar is not None and job.grammar.accept(token.token):
                finish = FinishReason.GRAMMAR
        if finish is None and job.generated >= request.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            text += _rest(job)
            if job.stops.found is not None and finish is not FinishReason.END_TOKEN:
                finish = FinishReason.STOP_STRING
            self._remove(job)
        reused, scored = (job.sequence.reused, tuple(job.scored)) if is_first else (0, ())
        stop = job.stops.found or ""
        self._events.append((job, Delta(text, token, finish, stop, reused_tokens=reused, prompt=scored)))

    def _flush(self) -> None:
        pool = self._scheduler.pool
        self.state = LoopState(
            len(self._scheduler.running),
            len(self._scheduler.waiting),
            pool.in_use,
            pool.kept,
            self._preemptions,
            self._prompt_rate,
        )
        if self._events:
            events, self._events = self._events, []
            self._publish(events)


def _without(tokens: frozenset[int], size: int, allowed: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    """A mask without these tokens; `allowed` if it has no others."""
    mask = np.ones(size, np.bool_) if allowed is None else allowed.copy()
    mask[[token for token in tokens if token < size]] = False
    return mask if mask.any() else allowed


def _failed() -> InferenceFailed:
    return InferenceFailed("the engine failed on this request", remedy="The server's log has the details")


def _rest(job: GenerationJob) -> str:
    """What detokeniser and stop strings held back, at the end of a continuation."""
    if job.stops.found is not None:
        return ""
    return job.stops.push(job.detokeniser.finish()) + job.stops.finish()
