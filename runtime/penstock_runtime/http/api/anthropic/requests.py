"""Bodies of Anthropic's API, and the conversations and options that they describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_runtime.errors import InvalidInput, UnsupportedOption
from penstock_runtime.generation.grammar import GrammarText
from penstock_runtime.generation.templates import Conversation
from penstock_runtime.http.api.core.conversation import ANY, MOST_TOOLS, Tools, message_of, text_format, tools_of
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
from penstock_runtime.tasks.text_generation import MESSAGES_LIMIT, MOST_TOKENS, STOPS, AnyText

BLOCKS = ListOf(Object({"type": Text()}, others=Others.KEPT), MESSAGES_LIMIT, at_least=0, words="a list of blocks")
CONTENT = Either((AnyText(), BLOCKS))
MESSAGE = Object({"role": Choice(("user", "assistant", "system")), "content": CONTENT}, words="a message")
TOOL = Object(
    {"name": Text()},
    {"type": (Text(), "custom"), "description": (AnyText(), None), "input_schema": (ANY, None)},
    others=Others.IGNORED,
)
TOOL_CHOICE = Object(
    {"type": Choice(("auto", "any", "tool", "none"))},
    {"name": (Text(), None), "disable_parallel_tool_use": (Boolean(), False)},
    others=Others.IGNORED,
)
_PROMPT: dict[str, tuple[FieldKind, Any]] = {
    "model": (AnyText(), None),
    "system": (CONTENT, ""),
    "tools": (ListOf(TOOL, MOST_TOOLS, at_least=0, words="a list of tools"), None),
    "tool_choice": (TOOL_CHOICE, {"type": "auto", "name": None, "disable_parallel_tool_use": False}),
    "thinking": (Object({"type": Choice(("enabled", "disabled", "adaptive"))}, others=Others.IGNORED), None),
    "output_config": (Object({}, {"format": (ANY, None)}, others=Others.IGNORED), None),
}
MESSAGES = {"messages": ListOf(MESSAGE, MESSAGES_LIMIT, words="a list of messages")}
NOTES = {
    "model": "Not used: an endpoint has one model.",
    "messages": "The last one may be the assistant's: the answer goes on with it.",
    "tool_choice": "any: the answer is one call or more; tool: a call of the function `name`.",
    "thinking": "Must not be enabled.",
    "output_config": "format: a JSON schema of the answer.",
}
BODY = Object(
    {**MESSAGES, "max_tokens": Integer(1, MOST_TOKENS)},
    {
        **_PROMPT,
        "temperature": (Number(0, 1), None),
        "top_p": (Number(0, 1), None),
        "top_k": (Integer(0, MOST_TOKENS), None),
        "stop_sequences": (STOPS, ()),
        "stream": (Boolean(), False),
        "metadata": (ANY, None),
        "service_tier": (Text(), None),
    },
    notes=NOTES,
    others=Others.IGNORED,
)
COUNTED = Object(MESSAGES, _PROMPT, notes=NOTES, others=Others.IGNORED)
UNSUPPORTED: Mapping[str, Sequence[Any]] = {"container": (), "mcp_servers": ([],)}
"""Fields that this server does not support; with the values that change nothing."""
THOUGHTS = frozenset({"thinking", "redacted_thinking"})
"""Blocks of earlier answers, which the model does not read again."""


def tools_and_conversation(body: Mapping[str, Any], model: GenerationModel) -> tuple[Tools | None, Conversation]:
    """What the chat template makes a prompt of. InvalidInput or UnsupportedOption names the field."""
    if (body["thinking"] or {}).get("type") == "enabled":
        raise UnsupportedOption("thinking is not supported by this server", field="thinking", remedy="Leave it out")
    functions = [_function(one, f"tools[{index}]") for index, one in enumerate(body["tools"] or ())]
    choice = body["tool_choice"]
    chosen: Any = {"any": "required", "tool": {"type": "function", "name": choice["name"]}}.get(choice["type"])
    tools = tools_of(functions, chosen or choice["type"], model, several=not choice["disable_parallel_tool_use"])
    messages = _messages(body)
    continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return tools, Conversation(messages, None if tools is None else tools.offered, continues=continues)


def form_of(body: Mapping[str, Any]) -> GrammarText | None:
    """The form that the answer must have; None: any text."""
    given = (body["output_config"] or {}).get("format")
    field = "output_config.format"
    return None if given is None else text_format(str(given.get("type")), given.get("schema"), field, f"{field}.schema")


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool["type"] != "custom":
        raise UnsupportedOption(
            f"{where} is of type {tool['type'][:100]!r}, which runs at Anthropic",
            field=f"{where}.type",
            remedy="Send tools of your own, with name and input_schema",
        )
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": {name: one for name, one in function.items() if one is not None}}


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body["system"]:
        found.append({"role": "system", "content": _text(body["system"], "system")})
    names: dict[str, str] = {}
    for index, message in enumerate(body["messages"]):
        where, content = f"messages[{index}].content", message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        calls: list[dict[str, Any]] = []
        texts: list[dict[str, Any]] = []
        for number, block in enumerate(content):
            place = f"{where}[{number}]"
            if block["type"] == "tool_use":
                calls.append(_call(block, place, names))
            elif block["type"] == "tool_result":
                found.append(_result(block, place, names))
            elif block["type"] not in THOUGHTS:
                texts.append(block)
        if texts or calls or not content:
            taken = {"role": message["role"], "content": _text(texts, where)}
            found.append(message_of({**taken, "tool_calls": calls} if calls else taken, f"messages[{index}]"))
    if not found:
        raise InvalidInput("messages have no content", field="messages", remedy="Send a message with a text")
    return found


def _text(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    message = {"role": "user", "content": content if isinstance(content, str) else list(content)}
    return str(message_of(message, where.removesuffix(".content"))["content"])


def _call(block: Mapping[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    kind = Object({"id": Text(), "name": Text()}, {"input": (ANY, {})}, others=Others.IGNORED)
    call = kind.parse(block, where)
    names[call["id"]] = call["name"]
    return {
        "id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["input"]},
    }  # fmt: skip


def _result(block: Mapping[str, Any], where: str, names: Mapping[str, str]) -> dict[str, Any]:
    result = Object({"tool_use_id": Text()}, {"content": (CONTENT, "")}, others=Others.IGNORED).parse(block, where)
    name = names.get(result["tool_use_id"])
    if name is None:
        raise InvalidInput(
            f"{where}.tool_use_id is of no earlier tool_use",
            field=f"{where}.tool_use_id",
            remedy="Send the message with the tool_use before its result",
        )
    content = _text(result["content"], f"{where}.content")
    return {"role": "tool", "content": content, "tool_call_id": result["tool_use_id"], "name": name}
