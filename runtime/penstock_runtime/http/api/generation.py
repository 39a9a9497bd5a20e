"""What the APIs of text generation share: starting a request, sending its tokens as events, counting it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from penstock_runtime.errors import NotReady, RequestError
from penstock_runtime.generation.loop import JobRequest
from penstock_runtime.http.api.bodies import answer_response, dumps
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.transport.message import Request, Response, StreamingResponse
from penstock_runtime.serving.admission import client_of
from penstock_runtime.serving.generation_request import Continuation, Generation
from penstock_runtime.serving.generator import Generator, timings
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.tasks.text_generation import Prompt

PromptInputs = Sequence[Prompt | Sequence[int]]
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
    """A request whose tokens are being generated."""

    generation: Generation
    arrived: float
    tokenised: float


class GenerationApi:
    """Base of the handlers: starts requests and answers them."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def _start(
        self, request: Request, prompts: PromptInputs, job: JobRequest, count: int, *, field: str
    ) -> StartedGeneration:
        """Tokenise and start `count` continuations of each prompt like `job`. Errors as `Generator.generate`."""
        arrived = perf_counter()
        generator = generator_of(self._service)
        texts = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        encoded = iter(await generator.tokens(texts))
        tokens = [next(encoded) if isinstance(prompt, Prompt) else prompt for prompt in prompts]
        tokenised = perf_counter()
        jobs = [replace(job, tenant=request.token, client=client_of(request.token, request.client))] * count
        deadline = self._service.deadline_seconds(request)
        generation = generator.generate(tokens, jobs, field=field, deadline_seconds=deadline, arrived=arrived)
        return StartedGeneration(generation, arrived, tokenised)

    async def _answer(self, started: StartedGeneration, value: Callable[[Sequence[Continuation]], Any]) -> Response:
        """The response when all continuations have ended."""
        continuations = await started.generation.read_all()
        answer = self._count(started)
        return answer_response(answer, value(continuations))

    async def _stream(self, started: StartedGeneration, stream: EventStream) -> Response:
        """The response as events. Waits for the first tokens, so that a refusal still has its status."""
        try:
            await stream.begin()
        except BaseException:
            stream.close()
            raise
        stream.on_end = lambda: self._count(started)
        return StreamingResponse(stream)

    def _count(self, started: StartedGeneration) -> Answer:
        generation = started.generation
        tokens = generation.prompt_tokens + generation.generated_tokens
        answer = Answer(None, timings(started.arrived, started.tokenised), tokens, 0)
        self._service.metrics.answered(answer)
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
        """Cancel what has not ended."""
        self._generation.close()

    @abstractmethod
    def events(self, changed: Sequence[Continuation]) -> list[bytes]:
        """The events for what is new; may be none."""

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
