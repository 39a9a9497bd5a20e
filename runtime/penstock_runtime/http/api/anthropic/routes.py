"""The API of Anthropic: `/v1/messages`, which coding agents use, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from penstock.tasks import TaskName
from penstock_runtime.admission import client_of
from penstock_runtime.errors import PromptTooLong, UnsupportedOption
from penstock_runtime.http.api.anthropic.answers import ANSWER, MessageEvents, MessageWriter
from penstock_runtime.http.api.anthropic.requests import BODY, COUNTED, UNSUPPORTED, form_of, tools_and_conversation
from penstock_runtime.http.api.core.bodies import checked, json_response, read_json
from penstock_runtime.http.api.core.conversation import job_of
from penstock_runtime.http.api.core.generation import GenerationApi, generator_of
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.core.unknown_fields import UnknownFields
from penstock_runtime.http.transport.message import ErrorFormat, Request, Response, Route
from penstock_runtime.tasks.text_generation import refuse_unsupported, require_template

TAG = "Anthropic"
TASKS = frozenset({TaskName.TEXT_GENERATION})


class Messages(GenerationApi):
    """The handlers."""

    def __init__(self, service: ModelService) -> None:
        super().__init__(service)
        self._unknown = UnknownFields("/v1/messages", [*BODY.required, *BODY.optional, *UNSUPPORTED])

    async def create(self, request: Request) -> Response:
        """`/v1/messages`."""
        raw = read_json(request)
        body = checked(BODY, raw)
        self._unknown.look(raw)
        refuse_unsupported(raw, UNSUPPORTED)
        model = generator_of(self._service).model
        require_template(model.template, "messages")
        tools, conversation = tools_and_conversation(body, model)
        form = form_of(body) if tools is None or tools.grammar is None else tools.grammar
        values = {name: body[name] for name in ("temperature", "top_p", "top_k")}
        options = {**values, "seed": None, "stop": body["stop_sequences"]}
        job = job_of(options, model, body["max_tokens"], None, default_tokens=0)
        started = await self._start(request, [conversation], job, 1, field="messages", form=form)
        identifier = f"msg_{request.identifier.decode('ascii')}"
        writer = MessageWriter(identifier, self._service.status.name, None if tools is None else tools.form)
        if body["stream"]:
            return await self._stream(started, MessageEvents(started.generation, writer))
        return await self._answer(started, lambda ended: writer.whole(ended[0], started.generation))

    async def count(self, request: Request) -> Response:
        """`/v1/messages/count_tokens`."""
        body = checked(COUNTED, read_json(request))
        generator = generator_of(self._service)
        require_template(generator.model.template, "messages")
        _, conversation = tools_and_conversation(body, generator.model)
        (tokens,) = await generator.tokens([conversation], client_of(request.token, request.client))
        return json_response({"input_tokens": len(tokens)})


def routes(service: ModelService) -> tuple[Route, ...]:
    """Their table."""
    handlers = Messages(service)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return (
        Route(
            "POST", "/v1/messages", handlers.create, "Answer a conversation", TAG, tasks=TASKS, inference=True,
            streams=True, error_format=ErrorFormat.ANTHROPIC, errors=(PromptTooLong, UnsupportedOption),
            request=BODY.schema() | {"examples": [{"messages": messages, "max_tokens": 50}]}, response=ANSWER,
        ),
        Route(
            "POST", "/v1/messages/count_tokens", handlers.count, "Tokens of a conversation", TAG, tasks=TASKS,
            error_format=ErrorFormat.ANTHROPIC, errors=(UnsupportedOption,),
            request=COUNTED.schema() | {"examples": [{"messages": messages}]},
            response={
                "type": "object", "properties": {"input_tokens": {"type": "integer"}}, "required": ["input_tokens"],
            },
        ),
    )  # fmt: skip
