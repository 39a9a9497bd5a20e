"""Requests of OpenAI's API for text generation: fields, messages, and the jobs that they ask for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock_runtime.errors import InvalidInput, UnsupportedOption
from penstock_runtime.generation.grammar import GrammarState
from penstock_runtime.generation.loop import JobRequest
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.tasks.fields import (
    Boolean,
    Choice,
    Either,
    FieldKind,
    Integer,
    ListOf,
    Number,
    Object,
    Others,
    Text,
)
from penstock_runtime.tasks.text_generation import (
    MESSAGES_LIMIT,
    MOST_CHOICES,
    MOST_TOKENS,
    PENALTY,
    REPETITION,
    SEED,
    SHARE,
    STOPS,
    TEMPERATURE,
    TOP_K,
    AnyText,
    sampling,
)

MOST_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
"""Of `/v1/completions`, as OpenAI's."""
ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ListOf(Object({"type": Text()}, others=Others.KEPT), MESSAGES_LIMIT, words="a list of parts")
CHAT_MESSAGE = Object(
    {"role": Choice(ROLES)}, {"content": (Either((AnyText(), PARTS)), None)}, others=Others.KEPT, words="a message"
)
TOOL = Object(
    {"type": Choice(("function",)), "function": Object({"name": Text()}, others=Others.KEPT)}, others=Others.KEPT
)
MOST_TOOLS = 128
ANY = Object({}, others=Others.KEPT)
BIASES = Object({}, others=Others.KEPT, words="an object of token ids and biases")

COMMON: dict[str, tuple[FieldKind, Any]] = {
    "model": (Text("the name of a model"), None),
    "max_tokens": (Integer(1, MOST_TOKENS), None),
    "temperature": (TEMPERATURE, None),
    "top_p": (SHARE, None),
    "top_k": (TOP_K, None),
    "min_p": (SHARE, None),
    "repetition_penalty": (REPETITION, None),
    "presence_penalty": (PENALTY, None),
    "frequency_penalty": (PENALTY, None),
    "logit_bias": (BIASES, None),
    "seed": (SEED, None),
    "stop": (Either((Text(), STOPS)), None),
    "n": (Integer(1, MOST_CHOICES), 1),
    "stream": (Boolean(), False),
    "stream_options": (Object({}, {"include_usage": (Boolean(), False)}, others=Others.IGNORED), None),
    "response_format": (Object({"type": Text()}, others=Others.KEPT), None),
    "guided_json": (ANY, None),
    "guided_regex": (Text("a regular expression"), None),
    "user": (Text("the name of a user"), None),
}
NOTES = {
    "model": "Not used: an endpoint has one model.",
    "max_tokens": "Tokens to generate.",
    "top_k": "Not part of OpenAI's API: choose among this number of most probable tokens; 0: all.",
    "min_p": "Not part of OpenAI's API: choose among tokens with this share of the highest probability.",
    "repetition_penalty": "Not part of OpenAI's API: divides the scores of tokens of prompt and answer.",
    "logit_bias": "Added to the scores of tokens, by token id; -100 to 100.",
    "seed": "The same seed gives the same answer.",
    "n": "The number of answers.",
    "response_format": "text, json_object, or json_schema with a schema: the answer is JSON in this form.",
    "guided_json": "Not part of OpenAI's API: a JSON schema of the answer.",
    "guided_regex": "Not part of OpenAI's API: a regular expression that the answer matches.",
    "user": "Not used.",
}
CHAT_BODY = Object(
    {"messages": ListOf(CHAT_MESSAGE, MESSAGES_LIMIT, words="a list of messages")},
    {
        **COMMON,
        "max_completion_tokens": (Integer(1, MOST_TOKENS), None),
        "logprobs": (Boolean(), False),
        "top_logprobs": (Integer(0, MOST_LOGPROBS), None),
        "chat_template_kwargs": (ANY, None),
        "tools": (ListOf(TOOL, MOST_TOOLS, at_least=0, words="a list of tools"), None),
    },
    notes={
        **NOTES,
        "max_completion_tokens": "The same as max_tokens; default: as many as fit.",
        "chat_template_kwargs": "Variables of the model's chat template, such as enable_thinking.",
    },
    others=Others.IGNORED,
)
COMPLETION_BODY = Object(
    {"prompt": Either((Text(), ListOf(Integer(0, MOST_TOKENS), 1_000_000, words="a list of token ids")))},
    {**COMMON, "logprobs": (Integer(0, MOST_LOGPROBS), None)},
    notes={**NOTES, "prompt": "A text, or token ids.", "max_tokens": f"Default {DEFAULT_COMPLETION_TOKENS}."},
    others=Others.IGNORED,
)
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "guided_grammar": (),
    "guided_choice": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "lora": (),
}
"""Fields of the API, and of similar servers, that would change the answer; with the values that change nothing."""


def message_of(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as chat templates take it: the content as one text."""
    role, content = value["role"], value["content"]
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    elif content is None:
        raise InvalidInput(f"{where}.content must be a text", field=f"{where}.content", remedy="Send a text")
    # Models were trained with the older name.
    message = {**value, "role": "system" if role == "developer" else role, "content": content}
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    return message


def _with_arguments(call: Any) -> Any:
    """A call of a former turn with its arguments as an object: templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def tools_of(body: Mapping[str, Any], raw: Mapping[str, Any], model: GenerationModel) -> list[Any] | None:
    """The tools to offer; None: none. UnsupportedOption if the model's template does not know tools."""
    tools = body["tools"]
    if not tools or raw.get("tool_choice") == "none":
        return None
    if model.template is None or model.template.tool_form is None:
        raise UnsupportedOption(
            "this model's chat template does not know tools", field="tools", remedy="Leave them out, or send none"
        )
    return list(tools)


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is not None and kind != "text":
        raise UnsupportedOption(
            f"{where} is of type {str(kind)[:100]!r}; this model takes texts",
            field=f"{where}.type",
            remedy="Leave it out",
        )
    if kind is None or not isinstance(part.get("text"), str):
        raise InvalidInput(
            f"{where} must be a part with a text", field=where, remedy='Send {"type": "text", "text": …}'
        )
    return AnyText().parse(part["text"], f"{where}.text")


async def job_of(
    body: Mapping[str, Any], model: GenerationModel, max_tokens: int, top_logprobs: int | None, *, default_tokens: int
) -> JobRequest:
    """The job that a body asks for, without its prompt. `max_tokens` 0: `default_tokens`, and if these are 0 as many as
    fit."""
    names = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    )  # fmt: skip
    defaults = {name: value for name, value in model.defaults.items() if name in names}
    values = {**defaults, **{name: body[name] for name in names if body[name] is not None}}
    values["logit_bias"] = _biases(body["logit_bias"] or {}, model.engine.vocabulary)
    stop = body["stop"] or ()
    return JobRequest(
        prompt=(),
        max_tokens=max_tokens or default_tokens,
        is_default_limit=max_tokens == 0,
        sampling=sampling(values, seed=body["seed"], top_logprobs=top_logprobs),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        end_tokens=model.end_tokens,
        # In a thread: large schemas take a while.
        grammar=await asyncio.to_thread(_grammar, body, model) if _has_form(body) else None,
    )


def _has_form(body: Mapping[str, Any]) -> bool:
    given = body["response_format"]
    is_other = given is not None and given["type"] != "text"
    return is_other or body["guided_json"] is not None or body["guided_regex"] is not None


def _grammar(body: Mapping[str, Any], model: GenerationModel) -> GrammarState:
    """The form of the answer."""
    given = body["response_format"]
    if body["guided_regex"] is not None:
        return model.grammars.of_regex(body["guided_regex"], "guided_regex")
    if body["guided_json"] is not None:
        return model.grammars.of_json_schema(body["guided_json"], "guided_json")
    if given["type"] == "json_object":
        return model.grammars.of_json_schema({"type": "object"}, "response_format")
    if given["type"] == "json_schema":
        schema = given.get("json_schema")
        field = "response_format.json_schema.schema"
        return model.grammars.of_json_schema(schema.get("schema") if isinstance(schema, dict) else None, field)
    raise UnsupportedOption(
        f"response_format.type is {given['type'][:100]!r}",
        field="response_format.type",
        remedy="Send text, json_object or json_schema",
    )


def _biases(given: Mapping[str, Any], vocabulary: int) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        field = f"logit_bias.{token[:20]}"
        if not token.isdecimal() or int(token) >= vocabulary:
            raise InvalidInput(
                f"{field} is no token of this model", field=field, remedy=f"Send token ids from 0 to {vocabulary - 1}"
            )
        biases[int(token)] = Number(-100, 100).parse(bias, field)
    return biases
