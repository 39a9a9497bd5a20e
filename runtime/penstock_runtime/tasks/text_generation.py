"""text-generation: prompts or conversations to continuations, in the format of transformers' pipeline.

Unlike the other tasks it has no `Task` object: its requests run on an engine of steps, not on batches of rows.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_runtime.errors import InvalidInput, UnsupportedOption
from penstock_runtime.generation.loop import JobRequest
from penstock_runtime.generation.sampling import SamplingParameters
from penstock_runtime.generation.templates import ChatTemplate, Conversation
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.fields import (
    Boolean,
    Either,
    FieldKind,
    Integer,
    JsonSchema,
    ListOf,
    Number,
    Object,
    Others,
    Text,
    body_schema,
    json_words,
)

LARGEST_SEED = 2**64 - 1
MOST_TOKENS = 2**31 - 1
MOST_STOPS = 16
MOST_CHOICES = 16
MOST_LOGPROBS = 20
PIPELINE_DEFAULTS: Mapping[str, Any] = {"max_new_tokens": 256, "do_sample": True, "temperature": 0.7}
"""As in transformers' pipeline, where the model's generation_config.json has none."""
MESSAGES_LIMIT = 2000


@dataclass(frozen=True)
class AnyText:
    """A text that can be written as UTF-8, and may be empty."""

    words: str = "a text"
    python: type = str

    def parse(self, value: Any, where: str) -> str:
        """The text."""
        return "" if value == "" else Text().parse(value, where)

    def schema(self) -> JsonSchema:
        """A string."""
        return {"type": "string"}


STOPS = ListOf(Text(), MOST_STOPS, at_least=0)
"""Stop strings."""
TOKENS = Integer(1, MOST_TOKENS)

SAMPLING: Mapping[str, tuple[FieldKind, Any]] = {
    "temperature": (Number(0, 100), None),
    "top_k": (Integer(0, MOST_TOKENS), None),
    "top_p": (Number(0, 1), None),
    "min_p": (Number(0, 1), None),
    "repetition_penalty": (Number(0.01, 100), None),
    "seed": (Integer(0, LARGEST_SEED), None),
}
"""How tokens are chosen, in all APIs."""
PENALTIES: Mapping[str, tuple[FieldKind, Any]] = {
    "presence_penalty": (Number(-2, 2), None),
    "frequency_penalty": (Number(-2, 2), None),
}
"""In the APIs of OpenAI and text-generation-inference."""

_PARAMETERS: dict[str, tuple[FieldKind, Any]] = {
    "max_new_tokens": (TOKENS, None),
    "do_sample": (Boolean(), None),
    **SAMPLING,
    "stop_strings": (Either((Text(), STOPS)), None),
    "num_return_sequences": (Integer(1, MOST_CHOICES), 1),
    "return_full_text": (Boolean(), True),
    "continue_final_message": (Boolean(), None),
}
PARAMETERS = Object(
    {},
    _PARAMETERS,
    notes={
        "max_new_tokens": "Tokens to generate; default 256.",
        "do_sample": "false: always the most probable token. Default true, or as in the model's "
        "generation_config.json, which also has defaults of the other parameters.",
        "temperature": "Default 0.7. 0 is do_sample false.",
        "top_k": "Choose among this number of most probable tokens; 0: all.",
        "top_p": "Choose among the most probable tokens that have this probability together.",
        "min_p": "Choose among tokens with at least this share of the highest probability.",
        "repetition_penalty": "Divides the scores of tokens that have occurred.",
        "stop_strings": "Texts that end the continuation; the text ends with it.",
        "seed": "The same seed gives the same continuation.",
        "num_return_sequences": "The number of continuations.",
        "return_full_text": "The prompt is part of generated_text.",
        "continue_final_message": "Go on with the text of the last message. Default: true if that is the assistant's.",
    },
)
MESSAGE = Object({"role": Text(), "content": Text()}, others=Others.KEPT, words="a message")
MESSAGES = ListOf(MESSAGE, MESSAGES_LIMIT, words="a list of messages")


@dataclass(frozen=True)
class Inputs:
    """A prompt, a list of prompts, or a conversation."""

    limits: RequestLimits
    words: str = "a text, a list of texts, or a list of messages"
    python: type = object

    def parse(self, value: Any, where: str) -> Any:
        """The inputs, checked."""
        if isinstance(value, str):
            return Text().parse(value, where)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return MESSAGES.parse(value, where)
        if not isinstance(value, list):
            raise InvalidInput(
                f"{where} must be {self.words}, not {json_words(value)}", field=where, remedy=f"Send {self.words}"
            )
        return self._texts.parse(value, where)

    def schema(self) -> JsonSchema:
        """Any of the three."""
        return {"anyOf": [Text().schema(), self._texts.schema(), MESSAGES.schema()]}

    @property
    def _texts(self) -> ListOf:
        return ListOf(Text(), self.limits.items)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a text."""

    text: str
    special: bool
    """The tokenizer adds its special tokens: not to a rendered conversation, which has them."""


@dataclass(frozen=True, slots=True)
class PipelineRequest:
    """A parsed request."""

    inputs: Any
    prompts: tuple[Prompt | Conversation, ...]
    jobs: tuple[JobRequest, ...]
    """The continuations of each prompt, without the prompt."""
    full_text: bool


def parse_request(
    inputs: Any,
    parameters: Mapping[str, Any],
    *,
    template: ChatTemplate | None,
    defaults: Mapping[str, Any],
    end_tokens: frozenset[int],
    limits: RequestLimits,
) -> PipelineRequest:
    """Check `inputs` and `parameters`. `defaults`: of the model's generation_config.json.

    InvalidInput names the field; UnsupportedOption if the model cannot chat.
    """
    parsed = Inputs(limits).parse(inputs, "inputs")
    given = PARAMETERS.parse(parameters, "parameters")
    values = {**PIPELINE_DEFAULTS, **defaults, **{name: value for name, value in given.items() if value is not None}}
    if isinstance(parsed, str):
        prompts: tuple[Prompt | Conversation, ...] = (Prompt(parsed, special=True),)
    elif isinstance(parsed[0], str):
        prompts = tuple(Prompt(text, special=True) for text in parsed)
    else:
        require_template(template, "inputs")
        continues = given["continue_final_message"]
        prompts = (
            Conversation(parsed, continues=parsed[-1]["role"] == "assistant" if continues is None else continues),
        )
    stops = values.get("stop_strings") or ()
    job = JobRequest(
        prompt=(),
        max_tokens=values["max_new_tokens"],
        is_default_limit=given["max_new_tokens"] is None,
        sampling=sampling(values, seed=given["seed"]),
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
        include_stop=True,
        end_tokens=end_tokens,
        min_tokens=values.get("min_new_tokens") or 0,
    )
    return PipelineRequest(inputs, prompts, (job,) * values["num_return_sequences"], values["return_full_text"])


def require_template(template: ChatTemplate | None, field: str) -> ChatTemplate:
    """The template; UnsupportedOption if the model has none."""
    if template is None:
        raise UnsupportedOption(
            "this model has no chat template, so it cannot answer messages",
            field=field,
            remedy="Send a text to /v1/completions or /predict",
        )
    return template


def sampling(values: Mapping[str, Any], *, seed: int | None, top_logprobs: int | None = None) -> SamplingParameters:
    """Sampling by the names of transformers, which generation_config.json uses; missing ones have no effect.

    Without a seed the continuation is another one each time.
    """
    temperature = values.get("temperature", 1.0) if values.get("do_sample", True) else 0.0
    return SamplingParameters(
        temperature=temperature,
        top_p=values.get("top_p", 1.0),
        top_k=max(values.get("top_k", 0), 0),
        min_p=values.get("min_p", 0.0),
        repetition_penalty=values.get("repetition_penalty", 1.0),
        presence_penalty=values.get("presence_penalty") or 0.0,
        frequency_penalty=values.get("frequency_penalty") or 0.0,
        logit_bias=values.get("logit_bias") or {},
        seed=secrets.randbits(64) if seed is None else seed,
        is_default_seed=seed is None,
        top_logprobs=top_logprobs,
    )


def refuse_unsupported(body: Mapping[str, Any], fields: Mapping[str, Sequence[Any]]) -> None:
    """UnsupportedOption for the first of `fields` with another value than null and those given for it."""
    for name, harmless in fields.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise UnsupportedOption(
                f"{name} is not supported by this server",
                field=name,
                remedy=f"Leave it out{f', or send {json.dumps(harmless[0])}' if harmless else ''}",
            )


def pipeline_answer(request: PipelineRequest, texts: Sequence[Sequence[str]]) -> Any:
    """The answer in the pipeline's format. `texts`: of each prompt, its continuations."""
    chat = isinstance(request.prompts[0], Conversation)

    def one(prompt: Prompt | Conversation, text: str) -> dict[str, Any]:
        if isinstance(prompt, Conversation):
            if not request.full_text:
                return {"generated_text": text}
            if not prompt.continues:
                return {"generated_text": [*request.inputs, {"role": "assistant", "content": text}]}
            *before, last = request.inputs
            return {"generated_text": [*before, {"role": last["role"], "content": last["content"] + text}]}
        return {"generated_text": prompt.text + text if request.full_text else text}

    answers = [[one(prompt, text) for text in of] for prompt, of in zip(request.prompts, texts, strict=True)]
    return answers if isinstance(request.inputs, list) and not chat else answers[0]


def request_schema(limits: RequestLimits) -> JsonSchema:
    """JSON Schema of the request body."""
    return body_schema(
        Inputs(limits),
        PARAMETERS,
        examples=[
            {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}},
            {"inputs": [{"role": "user", "content": "What is the capital of France?"}]},
        ],
        about="A prompt, several, or a conversation, to be continued.",
    )


def response_schema() -> JsonSchema:
    """JSON Schema of the answer."""
    generated = {
        "type": "object",
        "properties": {"generated_text": {"anyOf": [{"type": "string"}, MESSAGES.schema()]}},
        "required": ["generated_text"],
    }
    one = {"type": "array", "items": generated}
    return {
        "anyOf": [one, {"type": "array", "items": one}],
        "examples": [[{"generated_text": "The capital of France is Paris."}]],
    }
