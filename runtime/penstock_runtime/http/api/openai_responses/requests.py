"""Requests of `/v1/responses`: the body, and its conversation as chat templates take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_runtime.errors import InvalidInput, UnsupportedOption
from penstock_runtime.http.api.core.conversation import ANY, MOST_TOOLS, TOOL_CHOICE, TOOL_NOTES, message_of
from penstock_runtime.tasks.fields import Boolean, Choice, Either, Integer, ListOf, Object, Others, Text
from penstock_runtime.tasks.text_generation import (
    MESSAGES_LIMIT,
    MOST_LOGPROBS,
    MOST_TOKENS,
    SAMPLING,
    AnyText,
)

LOGPROBS = "message.output_text.logprobs"
ITEM = Object({}, {"type": (Text(), "message")}, others=Others.KEPT, words="a message, or a call with its output")
TOOL = Object(
    {"type": Choice(("function",)), "name": Text()},
    {"description": (AnyText(), None), "parameters": (ANY, None), "strict": (Boolean(), None)},
    words="a function",
)
FORMAT = Object({"type": Text()}, others=Others.KEPT)
TEXT = Object({}, {"format": (FORMAT, None), "verbosity": (Choice(("medium",)), None)})
STREAM_OPTIONS = Object({}, {"include_obfuscation": (Boolean(), False)})
BODY = Object(
    {"input": Either((Text(), ListOf(ITEM, MESSAGES_LIMIT, words="a list of messages")))},
    {
        "model": (AnyText(), None),
        "instructions": (AnyText(), None),
        "max_output_tokens": (Integer(1, MOST_TOKENS), None),
        **SAMPLING,
        "stream": (Boolean(), False),
        "stream_options": (STREAM_OPTIONS, None),
        "text": (TEXT, None),
        "tools": (ListOf(TOOL, MOST_TOOLS, at_least=0, words="a list of functions"), None),
        "tool_choice": (TOOL_CHOICE, "auto"),
        "parallel_tool_calls": (Boolean(), True),
        "include": (ListOf(Choice((LOGPROBS,)), 1, at_least=0), None),
        "top_logprobs": (Integer(0, MOST_LOGPROBS), None),
        "metadata": (ANY, None),
        "user": (AnyText(), None),
        "safety_identifier": (AnyText(), None),
        "prompt_cache_key": (AnyText(), None),
    },
    notes={
        "model": "The endpoint, the repository that its model is from, or a placeholder; another one is answered with "
        "404.",
        "input": "A text, or messages and calls of tools with their outputs.",
        "instructions": "A system message before the input.",
        "max_output_tokens": "Tokens to generate; default: as many as fit.",
        "top_k": "Not part of OpenAI's API: choose among this number of most probable tokens; 0: all.",
        "min_p": "Not part of OpenAI's API: choose among tokens with this share of the highest probability.",
        "repetition_penalty": "Not part of OpenAI's API: divides the scores of tokens of prompt and answer.",
        "seed": "Not part of OpenAI's API: the same seed gives the same answer.",
        "stream_options": "Not used: no obfuscation is added.",
        "text": "format: text, json_object, or json_schema with a schema: the answer is JSON in this form.",
        **TOOL_NOTES,
        "include": "The logarithms of probabilities of the answer's tokens.",
        "metadata": "Returned as it is.",
        "user": "Not used.",
        "safety_identifier": "Not used.",
        "prompt_cache_key": "Not used: prompts that begin alike share the cache without it.",
    },
)
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}),
    "service_tier": ("auto", "default", "flex"),
    "store": (False,),
    "truncation": ("disabled",),
}
"""Fields of the API that this server does not support; with the values that change nothing."""
ROLE = Choice(("system", "developer", "user", "assistant"))
CONTENT = Either((AnyText(), ListOf(Object({"type": Text()}, others=Others.KEPT), MESSAGES_LIMIT, at_least=0)))
TEXT_PARTS = ("input_text", "output_text")


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as chat templates take it.

    InvalidInput or UnsupportedOption names the item that cannot be part of it.
    """
    given = body["input"]
    messages = [{"role": "system", "content": body["instructions"]}] if body["instructions"] else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    read: list[tuple[dict[str, Any], str]] = []
    names: dict[str, str] = {}
    for index, item in enumerate(given):
        where = f"input[{index}]"
        match item["type"]:
            case "message":
                read.append((_message(item, where), where))
            case "function_call":
                # Calls belong to the message of the assistant in which they were written.
                if not read or read[-1][0]["role"] != "assistant":
                    read.append(({"role": "assistant", "content": None}, where))
                read[-1][0].setdefault("tool_calls", []).append(_call(item, where, names))
            case "function_call_output":
                read.append((_output(item, where, names), where))
            case other:
                raise UnsupportedOption(
                    f"{where} is of type {other[:100]!r}",
                    field=f"{where}.type",
                    remedy="Send messages, and function_call with its function_call_output",
                )
    return messages + [message_of(message, where) for message, where in read]


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    message = Object({"role": ROLE, "content": CONTENT}, others=Others.KEPT).parse(item, where)
    return {"role": message["role"], "content": _texts(message["content"])}


def _texts(content: Any) -> Any:
    """Parts with the type that chat completions give to texts."""
    if isinstance(content, str):
        return content
    return [{**part, "type": "text"} if part["type"] in TEXT_PARTS else part for part in content]


def _call(item: Mapping[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    kind = Object({"call_id": Text(), "name": Text(), "arguments": AnyText()}, others=Others.KEPT)
    call = kind.parse(item, where)
    names[call["call_id"]] = call["name"]
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["call_id"], "type": "function", "function": function}


def _output(item: Mapping[str, Any], where: str, names: Mapping[str, str]) -> dict[str, Any]:
    output = Object({"call_id": Text(), "output": CONTENT}, others=Others.KEPT).parse(item, where)
    name = names.get(output["call_id"])
    if name is None:
        raise InvalidInput(
            f"{where}.call_id is that of no earlier function_call",
            field=f"{where}.call_id",
            remedy="Send the function_call before its output",
        )
    return {"role": "tool", "content": _texts(output["output"]), "tool_call_id": output["call_id"], "name": name}


def function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chat completions have it, and with them chat templates."""
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool[name] is not None}}
