"""The API of text-generation-inference, which huggingface_hub's client uses: `/generate`, `/generate_stream`, `/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import PromptTooLong, UnsupportedOption
from penstock_runtime.generation.loop import JobRequest
from penstock_runtime.http.api.core.bodies import answer_response, checked, read_json
from penstock_runtime.http.api.core.generation import GenerationApi, TokenWriter, generator_of
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.tgi.answers import Asked, TokenEvents
from penstock_runtime.http.api.tgi.requests import BODY, DEFAULT_TOKENS, PARAMETERS, SAMPLES, UNSUPPORTED
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.tasks.fields import JsonSchema
from penstock_runtime.tasks.text_generation import PENALTIES, SAMPLING, Prompt, refuse_unsupported, sampling

TAG = "text-generation-inference"
TASKS = frozenset({TaskName.TEXT_GENERATION})


class Tgi(GenerationApi):
    """The handlers."""

    async def generate(self, request: Request) -> Response:
        """`/generate`: one object."""
        return await self._whole(request, checked(BODY, read_json(request)), in_list=False)

    async def generate_stream(self, request: Request) -> Response:
        """`/generate_stream`: an event for each token."""
        return await self._events(request, checked(BODY, read_json(request)))

    async def root(self, request: Request) -> Response:
        """`/`: as `/generate` in a list, or as `/generate_stream`."""
        body = checked(BODY, read_json(request))
        return await self._events(request, body) if body["stream"] else await self._whole(request, body, in_list=True)

    async def _whole(self, request: Request, body: Mapping[str, Any], *, in_list: bool) -> Response:
        asked, prompt, job = await self._read(body, with_logprobs=bool((body["parameters"] or {}).get("details")))
        started = await self._start(request, [prompt], job, 1, field="inputs", form=asked.form)
        (one,) = await started.generation.read_all()
        value: dict[str, Any] = {"generated_text": asked.text(one)}
        if asked.parameters["details"]:
            tokens = [asked.token(sampled, asked.tokens.text(sampled.token)) for sampled in one.tokens]
            value["details"] = {**asked.details(one), "prefill": [], "tokens": tokens}
            if asked.parameters["top_n_tokens"]:
                value["details"]["top_tokens"] = [asked.top(sampled) for sampled in one.tokens]
        return answer_response(self._count(started), [value] if in_list else value)

    async def _events(self, request: Request, body: Mapping[str, Any]) -> Response:
        asked, prompt, job = await self._read(body, with_logprobs=True)
        started = await self._start(request, [prompt], job, 1, field="inputs", form=asked.form)
        return await self._stream(started, TokenEvents(started.generation, asked))

    async def _read(
        self, body: Mapping[str, Any], *, with_logprobs: bool
    ) -> tuple[Asked, Prompt | Sequence[int], JobRequest]:
        given = body["parameters"]
        refuse_unsupported(given or {}, UNSUPPORTED)
        values = PARAMETERS.parse({}, "parameters") if given is None else given
        generator = generator_of(self._service)
        model = generator.model
        do_sample = values["do_sample"] or any(values[name] is not None for name in SAMPLES)
        chosen = {name: values[name] for name in (*SAMPLING, *PENALTIES) if values[name] is not None}
        parameters = sampling(
            {**chosen, "do_sample": do_sample},
            seed=values["seed"],
            top_logprobs=(values["top_n_tokens"] or 0) if with_logprobs else None,
        )
        job = JobRequest(
            prompt=(),
            max_tokens=values["max_new_tokens"] or DEFAULT_TOKENS,
            is_default_limit=values["max_new_tokens"] is None,
            sampling=parameters,
            stop=(*values["stop"], *values["stop_sequences"]),
            include_stop=True,
            end_tokens=model.end_tokens,
        )
        seed = parameters.seed if do_sample else None
        asked = Asked(body["inputs"], values, seed, TokenWriter(model), model)
        prompt: Prompt | Sequence[int] = Prompt(body["inputs"], special=True)
        if values["truncate"] is not None:
            (tokens,) = await generator.tokens([Prompt(body["inputs"], special=True)])
            prompt = tokens[-values["truncate"] :]
        return asked, prompt, job


def routes(service: ModelService) -> tuple[Route, ...]:
    """Their table."""
    handlers = Tgi(service)
    schema = BODY.schema() | {
        "examples": [{"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}]
    }
    generated: JsonSchema = {
        "type": "object",
        "properties": {"generated_text": {"type": "string"}, "details": {"type": "object"}},
        "required": ["generated_text"],
    }
    errors = (PromptTooLong, UnsupportedOption)
    return (
        Route(
            "POST", "/", handlers.root, "Continue a text, as a list or a stream", TAG, tasks=TASKS, inference=True,
            streams=True, errors=errors, request=schema, response={"type": "array", "items": generated},
        ),
        Route(
            "POST", "/generate", handlers.generate, "Continue a text", TAG, tasks=TASKS, inference=True, errors=errors,
            request=schema, response=generated,
        ),
        Route(
            "POST", "/generate_stream", handlers.generate_stream, "Continue a text as a stream", TAG, tasks=TASKS,
            inference=True, streams=True, errors=errors, request=schema, response={},
            content_type="text/event-stream",
        ),
    )  # fmt: skip
