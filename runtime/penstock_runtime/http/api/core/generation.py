"""Text generation for the APIs: starting a request, sending its tokens as events, counting it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from penstock_runtime.admission import client_of
from penstock_runtime.errors import NotReady, RequestError
from penstock_runtime.generation.detokeniser import token_bytes
from penstock_runtime.generation.grammar import GrammarText
from penstock_runtime.generation.loop import Delta, FinishReason, JobRequest
from penstock_runtime.generation.sampling import SampledToken
from penstock_runtime.generation.templates import Conversation
from penstock_runtime.generation.tool_calls import CallPart, ToolCallFinder
from penstock_runtime.http.api.core.bodies import answer_response, dumps, tier_of
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.transport.message import EVENT_STREAM, Request, Response, StreamingResponse
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.generation_request import Continuation, Generation
from penstock_runtime.serving.generator import Generator, timings
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.tasks.text_generation import Prompt

PromptInputs = Sequence[Prompt | Conversation | Sequence[int]]
"""Texts, or token ids."""


def event(value: Any) -> bytes:
    """A server-sent event with JSON."""
    return b"data: %b\n\n" % dumps(value)


def generator_of(service: ModelService) -> Generator:
    """The generator. NotReady while the model loads."""
    if not isinstance(service.predictor, Generator):
        raise NotReady(service.status.message, retry_after_seconds=5)
    return service.predictor


@dataclass
class StartedGeneration:
    """A request in progress."""

    generation: Generation
    tokens: Sequence[Sequence[int]]
    """Of each prompt."""
    arrived: float
    tokenised: float
    is_bulk: bool = False


class GenerationApi:
    """Base of the handlers: starts requests and answers them."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def _start(
        self,
        request: Request,
        prompts: PromptInputs,
        job: JobRequest,
        count: int,
        *,
        field: str,
        form: GrammarText | None = None,
    ) -> StartedGeneration:
        """Tokenise and start `count` continuations of each prompt like `job`, in this form. Errors as
        `Generator.generate` and `Grammars.prepare`."""
        arrived = perf_counter()
        generator = generator_of(self._service)
        client = client_of(request.token, request.client)
        texts = [prompt for prompt in prompts if isinstance(prompt, Prompt | Conversation)]
        encoded = iter(await generator.tokens(texts, client))
        tokens = [next(encoded) if isinstance(prompt, Prompt | Conversation) else prompt for prompt in prompts]
        tokenised = perf_counter()
        is_bulk = self._service.is_bulk(request)
        jobs = [replace(job, tenant=request.token, client=client, is_bulk=is_bulk)] * count
        deadline = self._service.deadline_seconds(request)
        grammars = generator.model.grammars
        generation = generator.admit(tokens, jobs, field=field, deadline_seconds=deadline, arrived=arrived)
        try:
            generation.start(None if form is None else await grammars.prepare(form, client))
        except BaseException:
            generation.close()
            raise
        return StartedGeneration(generation, tokens, arrived, tokenised, is_bulk)

    async def _answer(self, started: StartedGeneration, value: Callable[[Sequence[Continuation]], Any]) -> Response:
        """The response when all continuations have ended."""
        continuations = await started.generation.read_all()
        answer = self._count(started)
        return answer_response(answer, value(continuations))

    async def _stream(
        self, started: StartedGeneration, stream: EventStream, content_type: bytes = EVENT_STREAM
    ) -> Response:
        """The response as events. Waits for the first tokens, so that a refusal still has its status."""
        try:
            await stream.begin()
        except BaseException:
            stream.close()
            raise
        stream.on_end = lambda: self._count(started)
        return StreamingResponse(stream, content_type)

    def _count(self, started: StartedGeneration) -> Answer:
        generation = started.generation
        tokens = generation.prompt_tokens + generation.generated_tokens
        answer = Answer(None, timings(started.arrived, started.tokenised), tokens, 0)
        self._service.metrics.answered(answer, is_bulk=started.is_bulk)
        return answer


class EventStream(ABC):
    """The events of one request: a `ByteStream`."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._first: list[Continuation] | None = None
        self._is_over = False
        self.on_end: Callable[[], object] = lambda: None
        """Is called when all events were read."""

    async def begin(self) -> None:
        """Wait for the first tokens. Errors as `Generation.read`."""
        self._first = await self._generation.read()

    async def read(self) -> bytes:
        """The events of all tokens since the last call; empty at the end."""
        pieces: list[bytes] = []
        while not pieces and not self._is_over:
            changed, self._first = self._first, None
            try:
                changed = await self._generation.read() if changed is None else changed
            except RequestError as error:
                self._is_over = True
                return self.failed(error)
            if changed:
                pieces = self.events(changed)
            else:
                self._is_over = True
                pieces = self.last()
                self.on_end()
        return b"".join(pieces)

    def close(self) -> None:
        """Cancel the continuations that have not ended."""
        self._generation.close()

    @abstractmethod
    def events(self, changed: Sequence[Continuation]) -> list[bytes]:
        """The events for new tokens; may be none."""

    @abstractmethod
    def last(self) -> list[bytes]:
        """The events after the last token."""

    @abstractmethod
    def failed(self, error: RequestError) -> bytes:
        """The event for an error after the first token."""


def usage(generation: Generation) -> Mapping[str, Any]:
    """The numbers of tokens, as OpenAI names them."""
    prompt, generated = generation.prompt_tokens, generation.generated_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": generation.reused_tokens},
    }


class TokenWriter:
    """The text of single tokens of a model, in the form of the API."""

    def __init__(self, model: GenerationModel) -> None:
        self._backend = model.tokenizer.backend
        self._byte_level = model.byte_level

    def text(self, token: int) -> str:
        """The text of a token; U+FFFD where it is a part of a character."""
        return token_bytes(self._backend, token, byte_level=self._byte_level).decode(errors="replace")

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """A token with its bytes and logarithm."""
        content = token_bytes(self._backend, token, byte_level=self._byte_level)
        return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": list(content)}

    def with_top(self, sampled: SampledToken) -> dict[str, Any]:
        """A token, and the most probable alternatives."""
        top = [self.entry(token, logprob) for token, logprob in sampled.top]
        return {**self.entry(sampled.token, sampled.logprob), "top_logprobs": top}


def separate(finder: ToolCallFinder | None, text: str, finish: FinishReason | None) -> tuple[str, list[CallPart]]:
    """The text and the pieces of calls in new text of an answer; `finish`: why it ended with it, if it did."""
    if finder is None:
        return text, []
    text, parts = finder.push(text)
    if finish is not None:
        rest, last = finder.finish(is_cut=finish is FinishReason.LENGTH)
        text, parts = text + rest, parts + last
    return text, parts


def new_tokens(deltas: Sequence[Delta]) -> list[SampledToken]:
    """The tokens of these deltas."""
    return [delta.token for delta in deltas if delta.token is not None]


@dataclass(frozen=True)
class Frame:
    """What all objects of one answer have in common."""

    identifier: str
    created: int
    model: str
    fingerprint: str
    tier: Mapping[str, str] = field(default_factory=dict)
    """`bodies.tier_of`."""

    def of(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An object of the API."""
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **self.tier,
            **more,
        }


def frame_of(service: ModelService, prefix: str, request: Request, model: GenerationModel) -> Frame:
    """The frame of the answer to a request. `prefix`: of its identifier."""
    key = model.manifest.key[:12] if model.manifest is not None else "local"
    invariant = model.facts.get("batch_invariant")
    fingerprint = f"fp_{key}" if invariant else f"fp_{key}_varies_with_batch"
    identifier = prefix + request.identifier.decode("ascii")
    return Frame(identifier, int(time.time()), service.status.name, fingerprint, tier_of(request))
