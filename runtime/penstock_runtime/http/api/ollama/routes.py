"""The API of Ollama, which desktop clients use: `/api/chat`, `/api/generate`, `/api/embed`, and what they read of the
models.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from penstock import __version__
from penstock.tasks import TaskName
from penstock_runtime.errors import PromptTooLong, UnsupportedOption
from penstock_runtime.generation.loop import JobRequest
from penstock_runtime.generation.templates import Conversation
from penstock_runtime.http.api.core.bodies import answer_response, checked, fields_named, json_response, read_json
from penstock_runtime.http.api.core.conversation import Tools, tools_of
from penstock_runtime.http.api.core.generation import GenerationApi, PromptInputs, TokenWriter, generator_of
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.ollama.answers import (
    ANSWER,
    LINES,
    NANOSECONDS,
    Lines,
    LineWriter,
    details,
    model_entry,
    now,
)
from penstock_runtime.http.api.ollama.requests import (
    CHAT,
    EMBEDDINGS,
    GENERATE,
    SHOW,
    UNSUPPORTED,
    embed_body,
    form_of,
    job_and_variables,
    messages_of,
)
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.serving.generator import Generator
from penstock_runtime.serving.predictor import Answer, Timings
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.embeddings.feature_extraction import AUTO
from penstock_runtime.tasks.fields import Object
from penstock_runtime.tasks.text_generation import Prompt, refuse_unsupported, require_template

TAG = "Ollama"
TEXT, VECTORS = frozenset({TaskName.TEXT_GENERATION}), frozenset({TaskName.FEATURE_EXTRACTION})


class Ollama(GenerationApi):
    """The handlers."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        super().__init__(service)
        self.embed_body = embed_body(limits)
        self._started = now()

    async def chat(self, request: Request) -> Response:
        """`/api/chat`."""
        raw, body = self._read(request, CHAT)
        model = generator_of(self._service).model
        messages = messages_of(body["messages"])
        if not messages:
            return self._loaded(request, {"message": {"role": "assistant", "content": ""}})
        require_template(model.template, "messages")
        offered = [{"type": "function", "function": one["function"]} for one in body["tools"] or ()]
        tools = tools_of(offered, "auto", model, several=True)
        job, variables = job_and_variables(raw, body, model)
        continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        offers = None if tools is None else tools.offered
        prompt = Conversation(messages, offers, variables, continues=continues)
        return await self._generate(request, body, [prompt], job, tools, is_chat=True)

    async def generate(self, request: Request) -> Response:
        """`/api/generate`."""
        raw, body = self._read(request, GENERATE)
        refuse_unsupported(raw, UNSUPPORTED)
        model = generator_of(self._service).model
        if not body["prompt"]:
            return self._loaded(request, {"response": ""})
        job, variables = job_and_variables(raw, body, model)
        prompt: Prompt | Conversation = Prompt(body["prompt"], special=True)
        if model.template is not None and not body["raw"]:
            system = [{"role": "system", "content": body["system"]}] if body["system"] else []
            prompt = Conversation([*system, {"role": "user", "content": body["prompt"]}], None, variables)
        return await self._generate(request, body, [prompt], job, None, is_chat=False)

    async def _generate(
        self, request: Request, body: Any, prompts: PromptInputs, job: JobRequest, tools: Tools | None, *, is_chat: bool
    ) -> Response:
        field = "messages" if is_chat else "prompt"
        started = await self._start(request, prompts, job, 1, field=field, form=form_of(body["format"]))
        tokens = TokenWriter(generator_of(self._service).model) if body["logprobs"] else None
        form = None if tools is None else tools.form
        writer = LineWriter(self._service.status.name, started, is_chat=is_chat, tokens=tokens, tools=form)
        if body["stream"]:
            return await self._stream(started, Lines(started, writer), LINES)
        return await self._answer(started, lambda ended: writer.whole(ended[0]))

    def _loaded(self, request: Request, answer: dict[str, Any]) -> Response:
        """The answer to a request without a prompt, with which clients load a model."""
        frame = {"model": self._service.status.name, "created_at": now(), **answer}
        return self._nothing(request, {**frame, "done": True, "done_reason": "load"})

    def _nothing(self, request: Request, value: dict[str, Any]) -> Response:
        """The answer to a request that gives the model nothing to compute."""
        _ = self._service.deadline_seconds(request)
        return answer_response(Answer(value, Timings(), 0, 0), value)

    async def embed(self, request: Request) -> Response:
        """`/api/embed`."""
        _, body = self._read(request, self.embed_body)
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        began = perf_counter()
        frame: dict[str, Any] = {"model": self._service.status.name, "load_duration": 0}
        if not any(texts):
            return self._nothing(request, {**frame, "embeddings": [], "total_duration": 0, "prompt_eval_count": 0})
        parameters: dict[str, Any] = {"pooling": AUTO, "normalize": True}
        parameters |= {name: body[name] for name in ("truncate", "dimensions") if body[name] is not None}
        with fields_named({"inputs": "input", "parameters.": ""}):
            answer = await self._service.predict(request, texts, parameters)
        duration = int((perf_counter() - began) * NANOSECONDS)
        value = {"embeddings": answer.value, "total_duration": duration, "prompt_eval_count": answer.tokens}
        return answer_response(answer, {**frame, **value})

    async def embeddings(self, request: Request) -> Response:
        """`/api/embeddings`, the older form of one text."""
        _, body = self._read(request, EMBEDDINGS)
        if not body["prompt"]:
            return self._nothing(request, {"embedding": []})
        with fields_named({"inputs": "prompt", "parameters.": ""}, absent=["truncate"]):
            answer = await self._service.predict(request, body["prompt"], {"pooling": AUTO})
        return answer_response(answer, {"embedding": np.asarray(answer.value)[0]})

    def _read(self, request: Request, kind: Object) -> tuple[Any, dict[str, Any]]:
        raw = read_json(request)
        body = checked(kind, raw)
        name = body["model"] or body.get("name")
        self._service.require_model(name and name.removesuffix(":latest"))
        return raw, body

    def tags(self, _: Request) -> Response:
        """`/api/tags`."""
        return json_response({"models": [model_entry(self._service, self._started)]})

    def running(self, _: Request) -> Response:
        """`/api/ps`."""
        entry = {**model_entry(self._service, self._started), "expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        return json_response({"models": [entry]})

    async def show(self, request: Request) -> Response:
        """`/api/show`."""
        self._read(request, SHOW)
        predictor, capabilities = self._service.predictor, ["embedding"]
        length = self._service.status.limits.get("max_input_tokens")
        template = ""
        if isinstance(predictor, Generator):
            capabilities, length, found = ["completion"], predictor.longest, predictor.model.template
            template = "" if found is None else found.source
            capabilities += ["tools"] if found is not None and found.tool_form is not None else []
        facts = {"general.architecture": "penstock", "penstock.context_length": length}
        about = {"modelfile": "", "parameters": "", "license": "", "template": template, "modified_at": self._started}
        return json_response(
            {**about, "details": details(self._service), "model_info": facts, "capabilities": capabilities}
        )

    def version(self, _: Request) -> Response:
        """`/api/version`."""
        return json_response({"version": __version__})


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    ollama = Ollama(service, limits)
    name = service.status.name
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    errors = (PromptTooLong, UnsupportedOption)
    models = {"type": "object", "properties": {"models": {"type": "array"}}, "required": ["models"]}
    return (
        Route(
            "POST", "/api/chat", ollama.chat, "Answer a conversation", TAG, tasks=TEXT, inference=True, streams=True,
            stream_type=LINES.decode(), errors=errors, response=ANSWER,
            request=CHAT.schema() | {"examples": [{"model": name, "messages": messages, "stream": False}]},
        ),
        Route(
            "POST", "/api/generate", ollama.generate, "Answer or continue a text", TAG, tasks=TEXT, inference=True,
            streams=True, stream_type=LINES.decode(), errors=errors, response=ANSWER,
            request=GENERATE.schema() | {"examples": [{"model": name, "prompt": "Who are you?", "stream": False}]},
        ),
        Route(
            "POST", "/api/embed", ollama.embed, "Texts to vectors", TAG, tasks=VECTORS, inference=True,
            request=ollama.embed_body.schema() | {"examples": [{"model": name, "input": ["a text", "another one"]}]},
            response={"type": "object", "properties": {"embeddings": {"type": "array"}}, "required": ["embeddings"]},
        ),
        Route(
            "POST", "/api/embeddings", ollama.embeddings, "A text to a vector, the older form", TAG, tasks=VECTORS,
            inference=True, request=EMBEDDINGS.schema() | {"examples": [{"model": name, "prompt": "a text"}]},
            response={"type": "object", "properties": {"embedding": {"type": "array"}}, "required": ["embedding"]},
        ),
        Route("GET", "/api/tags", ollama.tags, "The one model", TAG, response=models),
        Route("GET", "/api/ps", ollama.running, "The one model", TAG, response=models),
        Route(
            "POST", "/api/show", ollama.show, "What the model can do", TAG,
            request=SHOW.schema() | {"examples": [{"model": name}]}, response={"type": "object"},
        ),
        Route(
            "GET", "/api/version", ollama.version, "The version", TAG,
            response={"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]},
        ),
    )  # fmt: skip
