"""`/v1/responses` of OpenAI, without state: what would need a stored response or a tool of OpenAI's is refused."""

from __future__ import annotations

from penstock.tasks import TaskName
from penstock_runtime.errors import PromptTooLong, UnsupportedOption
from penstock_runtime.generation.templates import Conversation
from penstock_runtime.http.api.core.bodies import checked, read_json
from penstock_runtime.http.api.core.conversation import job_of, text_format, tools_of
from penstock_runtime.http.api.core.generation import GenerationApi, frame_of, generator_of
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.openai_responses.answers import RESPONSE, ResponseEvents, ResponseWriter, settings_of
from penstock_runtime.http.api.openai_responses.requests import BODY, UNSUPPORTED, function_of, messages_of
from penstock_runtime.http.transport.message import ErrorFormat, Request, Response, Route
from penstock_runtime.tasks.text_generation import (
    refuse_unsupported,
    require_template,
)

TAG = "OpenAI"


class Responses(GenerationApi):
    """The handler."""

    async def create(self, request: Request) -> Response:
        """`/v1/responses`."""
        raw = read_json(request)
        if isinstance(raw, dict):
            refuse_unsupported(raw, UNSUPPORTED)
            raw = {name: value for name, value in raw.items() if name not in UNSUPPORTED}
        body = checked(BODY, raw)
        self._service.require_model(body["model"])
        model = generator_of(self._service).model
        require_template(model.template, "input")
        functions = [function_of(one) for one in body["tools"] or ()]
        tools = tools_of(functions, body["tool_choice"], model, several=body["parallel_tool_calls"])
        conversation = Conversation(messages_of(body), None if tools is None else tools.offered)
        has_logprobs = bool(body["include"]) or body["top_logprobs"] is not None
        form = (body["text"] or {}).get("format") or {"type": "text"}
        grammar = text_format(form["type"], form.get("schema"), "text.format", "text.format.schema")
        if tools is not None and tools.grammar is not None:
            grammar = tools.grammar
        job = job_of(
            body,
            model,
            body["max_output_tokens"] or 0,
            (body["top_logprobs"] or 0) if has_logprobs else None,
            default_tokens=0,
        )
        started = await self._start(request, [conversation], job, 1, field="input", form=grammar)
        frame = frame_of(self._service, "resp_", request, model)
        head = {
            "id": frame.identifier,
            "object": "response",
            "created_at": frame.created,
            "model": frame.model,
            "system_fingerprint": frame.fingerprint,
            **settings_of(body, job, form),
            **frame.tier,
        }
        writer = ResponseWriter(head, model, has_logprobs=has_logprobs, tools=None if tools is None else tools.form)
        if body["stream"]:
            return await self._stream(started, ResponseEvents(started.generation, writer))
        return await self._answer(started, lambda ended: writer.whole(ended[0], started.generation))


def routes(service: ModelService) -> tuple[Route, ...]:
    """Their table."""
    handlers = Responses(service)
    return (
        Route(
            "POST", "/v1/responses", handlers.create, "Answer a conversation, without stored state", TAG,
            tasks=frozenset({TaskName.TEXT_GENERATION}), inference=True, streams=True, error_format=ErrorFormat.OPENAI,
            errors=(PromptTooLong, UnsupportedOption),
            request=BODY.schema() | {"examples": [
                {"input": "What is the capital of France?", "max_output_tokens": 50},
            ]},
            response=RESPONSE,
        ),
    )  # fmt: skip
