"""The API of text-generation-inference, which huggingface_hub's client uses: `/generate`, `/generate_stream`, `/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import PromptTooLong, RequestError, UnsupportedOption
from penstock_runtime.generation.grammar import GrammarText, json_schema, regular_expression
from penstock_runtime.generation.loop import Delta, FinishReason, JobRequest
from penstock_runtime.generation.sampling import SampledToken
from penstock_runtime.http.api.bodies import answer_response, checked, dumps, error_response, read_json
from penstock_runtime.http.api.generation import EventStream, GenerationApi, generator_of
from penstock_runtime.http.api.openai_answers import TokenWriter
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.transport.message import ErrorFormat, Request, Response, Route
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.generation_request import Continuation, Generation
from penstock_runtime.tasks.fields import Boolean, Integer, JsonSchema, Object, Others, Text
from penstock_runtime.tasks.text_generation import (
    MOST_LOGPROBS,
    PENALTIES,
    SAMPLING,
    STOPS,
    TOKENS,
    Prompt,
    refuse_unsupported,
    sampling,
)

TAG = "text-generation-inference"
TASKS = frozenset({TaskName.TEXT_GENERATION})
DEFAULT_TOKENS = 100
FINISH = {
    FinishReason.END_TOKEN: "eos_token",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.GRAMMAR: "eos_token",
    FinishReason.LENGTH: "length",
}
SAMPLES = ("temperature", "top_k", "top_p", "min_p")
"""Parameters that imply do_sample."""
PARAMETERS = Object(
    {},
    {
        "max_new_tokens": (TOKENS, None),
        "do_sample": (Boolean(), False),
        **SAMPLING,
        **PENALTIES,
        "stop": (STOPS, ()),
        "stop_sequences": (STOPS, ()),
        "return_full_text": (Boolean(), False),
        "details": (Boolean(), False),
        "top_n_tokens": (Integer(0, MOST_LOGPROBS), None),
        "truncate": (Integer(1, 2**31 - 1), None),
        "grammar": (Object({"type": Text()}, others=Others.KEPT), None),
    },
    notes={
        "max_new_tokens": f"Tokens to generate; default {DEFAULT_TOKENS}, or fewer if they do not fit.",
        "do_sample": "false: always the most probable token, unless temperature, top_k, top_p or min_p is given.",
        "stop": "Texts that end the continuation; the text ends with it.",
        "stop_sequences": "The older name of stop.",
        "details": "Add the tokens with their probabilities, and the reason of the end.",
        "grammar": "The form of the text: type json with a schema as value, or type regex with an expression.",
        "truncate": "Keep this number of the prompt's last tokens.",
    },
    others=Others.KEPT,
)
BODY = Object(
    {"inputs": Text()},
    {"parameters": (PARAMETERS, None), "stream": (Boolean(), False)},
    notes={"stream": "On the root only: answer as /generate_stream does."},
    others=Others.IGNORED,
)
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "adapter_id": (),
    "best_of": (1,),
    "decoder_input_details": (False,),
    "typical_p": (1, 1.0),
    "watermark": (False,),
}


@dataclass(frozen=True)
class Asked:
    """A request in progress, with what its answer needs."""

    prompt: str
    parameters: Mapping[str, Any]
    seed: int | None
    tokens: TokenWriter
    model: GenerationModel

    def text(self, one: Continuation) -> str:
        """The field `generated_text`."""
        return self.prompt + one.text if self.parameters["return_full_text"] else one.text

    def details(self, one: Continuation) -> dict[str, Any]:
        """How the text ended."""
        reason = FINISH[one.finish] if one.finish is not None else None
        return {"finish_reason": reason, "generated_tokens": len(one.tokens), "seed": self.seed}

    @property
    def form(self) -> GrammarText | None:
        """The form that the text must have; None: any text."""
        given = self.parameters["grammar"]
        return None if given is None else _grammar(given)

    def token(self, sampled: SampledToken, text: str) -> dict[str, Any]:
        """A token."""
        special = sampled.token in self.model.special_tokens
        return {"id": sampled.token, "text": text, "logprob": sampled.logprob, "special": special}

    def top(self, sampled: SampledToken) -> list[dict[str, Any]]:
        """The most probable tokens in its place."""
        return [self.token(SampledToken(token, value), self.tokens.text(token)) for token, value in sampled.top]


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
        return await self._stream(started, _Stream(started.generation, asked))

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


def _grammar(given: Mapping[str, Any]) -> GrammarText:
    """The form of the text."""
    kind, value = given["type"], given.get("value")
    if kind == "regex":
        return regular_expression(value, "parameters.grammar.value")
    if kind == "json":
        return json_schema(value, "parameters.grammar.value")
    if kind == "json_schema":
        schema = value.get("schema") if isinstance(value, dict) else None
        return json_schema(schema, "parameters.grammar.value.schema")
    raise UnsupportedOption(
        f"parameters.grammar.type is {kind[:100]!r}",
        field="parameters.grammar.type",
        remedy="Send json, json_schema or regex",
    )


class _Stream(EventStream):
    """An event for each token."""

    def __init__(self, generation: Generation, asked: Asked) -> None:
        super().__init__(generation)
        self._asked = asked
        self._index = 0

    def events(self, changed: Sequence[Continuation]) -> list[bytes]:
        return [self._token(one, delta) for one in changed for delta in one.new if delta.token is not None]

    def last(self) -> list[bytes]:
        return []

    def failed(self, error: RequestError) -> bytes:
        return b"data:%b\n\n" % error_response(error, ErrorFormat.PENSTOCK).body

    def _token(self, one: Continuation, delta: Delta) -> bytes:
        assert delta.token is not None  # noqa: S101 - the caller has checked
        self._index += 1
        asked, is_last = self._asked, delta.finish is not None
        value: dict[str, Any] = {
            "index": self._index,
            "token": asked.token(delta.token, delta.text),
            "generated_text": asked.text(one) if is_last else None,
            "details": {**asked.details(one), "input_length": self._generation.prompt_tokens} if is_last else None,
        }
        if asked.parameters["top_n_tokens"]:
            value["top_tokens"] = asked.top(delta.token)
        return b"data:%b\n\n" % dumps(value)


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
