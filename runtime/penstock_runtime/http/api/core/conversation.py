"""Conversations and tools as chat templates take them, and the jobs that requests for text describe.

The messages and functions are in the form of OpenAI's chat completions, which chat templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_runtime.errors import InvalidInput, UnsupportedOption
from penstock_runtime.generation.grammar import GrammarText, json_schema, lark
from penstock_runtime.generation.loop import JobRequest
from penstock_runtime.generation.tool_calls import LIST_TOKEN, ToolForm, arguments_name, calls_grammar
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.tasks.fields import (
    Choice,
    Either,
    ListOf,
    Number,
    Object,
    Others,
    Text,
)
from penstock_runtime.tasks.text_generation import (
    LARGEST_SEED,
    MESSAGES_LIMIT,
    PENALTIES,
    SAMPLING,
    AnyText,
    sampling,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ListOf(Object({"type": Text()}, others=Others.KEPT), MESSAGES_LIMIT, at_least=0, words="a list of parts")
CHAT_MESSAGE = Object(
    {"role": Choice(ROLES)}, {"content": (Either((AnyText(), PARTS)), None)}, others=Others.KEPT, words="a message"
)
MOST_TOOLS = 128
MOST_BIASES = 1024
"""Each is added in each step."""
RANDOM_SEED = -1
"""As no seed, in vLLM's API."""
LONGEST_ID = 10
"""Digits of a token id."""
ANY = Object({}, others=Others.KEPT)
BIASES = Object({}, others=Others.KEPT, words="an object of token ids and biases")
TOOL_CHOICE = Either((Choice(("none", "auto", "required")), Object({"type": Text()}, others=Others.KEPT)))
TOOL_NOTES = {
    "tool_choice": "auto: the model decides; required: the answer is one call or more; a function with its name: the "
    "answer is a call of it.",
    "parallel_tool_calls": "false: with tool_choice required, the answer is one call.",
}


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
    """A call of an earlier message, with its arguments as an object: templates write them as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


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


@dataclass(frozen=True)
class Tools:
    """The tools that a request offers."""

    offered: Sequence[Any]
    """In the form of chat templates."""
    form: ToolForm
    """How the model writes a call."""
    grammar: GrammarText | None = None
    """The answer has to be a call; makes the form of the text."""


def tools_of(tools: Sequence[Any] | None, choice: Any, model: GenerationModel, *, several: bool) -> Tools | None:
    """The tools to offer; None: none. `choice`: the field tool_choice. `several`: the answer may have several calls.

    UnsupportedOption if the model's template does not know tools; InvalidInput for a choice of a tool that is not
    offered.
    """
    if choice == "none" or (not tools and choice == "auto"):
        return None
    template = model.template
    if template is None or template.tool_form is None:
        raise UnsupportedOption(
            "this model's chat template does not know tools",
            field="tools" if tools else "tool_choice",
            remedy="Leave them out, or send none",
        )
    functions = [one["function"] for one in tools or ()]
    form = template.tool_form
    if choice == "auto":
        return Tools(list(tools or ()), form)
    names = [one["name"] for one in functions]
    if choice != "required":
        name = _chosen(choice)
        if name not in names:
            raise InvalidInput(
                f"tool_choice names the function {str(name)[:100]!r}, which is not among the tools",
                field="tool_choice",
                remedy=f"Name one of: {', '.join(names) or 'none was sent'}",
            )
        functions, several = [functions[names.index(name)]], False
    elif not functions:
        raise InvalidInput("tool_choice is required, and there are no tools", field="tool_choice", remedy="Send tools")
    token = model.tokenizer.id_of(LIST_TOKEN) if form is ToolForm.LIST else None
    field = arguments_name(template.source, form)
    _check_functions(functions)
    grammar = calls_grammar(form, functions, field=field, several=several, token=token)
    return Tools(list(tools or ()), form, lark(grammar, "tools"))


def _chosen(choice: Mapping[str, Any]) -> Any:
    """The name of a chosen function. Chat completions have it one level deeper than responses."""
    if choice["type"] != "function":
        raise UnsupportedOption(
            f"tool_choice.type is {choice['type'][:100]!r}",
            field="tool_choice.type",
            remedy="Send none, auto, required, or a function",
        )
    function = choice.get("function")
    return function.get("name") if isinstance(function, dict) else choice.get("name")


def _check_functions(functions: Sequence[Mapping[str, Any]]) -> None:
    for one in functions:
        if not isinstance(one.get("parameters") or {}, dict):
            raise InvalidInput(
                f"the parameters of the function {one['name'][:100]!r} must be a JSON schema",
                field="tools",
                remedy="Send an object",
            )


def job_of(
    body: Mapping[str, Any],
    model: GenerationModel,
    max_tokens: int,
    top_logprobs: int | None,
    *,
    default_tokens: int,
) -> JobRequest:
    """The job for a body, without its prompt. `max_tokens` 0: `default_tokens`, and if these are 0 as many as
    fit."""
    names = [name for name in (*SAMPLING, *PENALTIES) if name != "seed"]
    defaults = {name: value for name, value in model.defaults.items() if name in names}
    values = {**defaults, **{name: body[name] for name in names if body.get(name) is not None}}
    values["logit_bias"] = _biases(body.get("logit_bias") or {}, model.engine.vocabulary)
    seed = body["seed"]
    # The model's own ones count as well: its answers go on without an end otherwise.
    stops = [text for one in (body.get("stop"), model.defaults.get("stop_strings")) for text in _texts(one)]
    ends = frozenset() if body.get("ignore_eos") else model.end_tokens
    return JobRequest(
        prompt=(),
        max_tokens=max_tokens or default_tokens,
        is_default_limit=max_tokens == 0,
        sampling=sampling(
            values, seed=None if seed in {None, RANDOM_SEED} else seed & LARGEST_SEED, top_logprobs=top_logprobs
        ),
        stop=tuple(stops),
        include_stop=bool(body.get("include_stop_str_in_output")),
        end_tokens=ends | set(body.get("stop_token_ids") or ()),
        min_tokens=body.get("min_tokens") or model.defaults.get("min_new_tokens") or 0,
    )


def _texts(stop: str | Sequence[str] | None) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop or ()


def text_format(kind: str, schema: Any, field: str, schema_field: str) -> GrammarText | None:
    """The form of an answer of this kind; None: any text. UnsupportedOption for an unknown kind."""
    if kind == "text":
        return None
    if kind == "json_object":
        return json_schema({"type": "object"}, field)
    if kind == "json_schema":
        return json_schema(schema, schema_field)
    raise UnsupportedOption(
        f"{field}.type is {kind[:100]!r}", field=f"{field}.type", remedy="Send text, json_object or json_schema"
    )


def _biases(given: Mapping[str, Any], vocabulary: int) -> dict[int, float]:
    if len(given) > MOST_BIASES:
        raise InvalidInput(
            f"logit_bias has {len(given)} tokens; at most {MOST_BIASES} are accepted",
            field="logit_bias",
            remedy="Send fewer, or describe the answer with response_format",
        )
    biases = {}
    for token, bias in given.items():
        field = f"logit_bias.{token[:20]}"
        if not token.isdecimal() or len(token) > LONGEST_ID or int(token) >= vocabulary:
            raise InvalidInput(
                f"{field} is no token of this model", field=field, remedy=f"Send token ids from 0 to {vocabulary - 1}"
            )
        biases[int(token)] = Number(-100, 100).parse(bias, field)
    return biases
