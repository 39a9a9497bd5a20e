"""Bodies of Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_runtime.errors import UnsupportedOption
from penstock_runtime.generation.grammar import GrammarText, json_schema
from penstock_runtime.generation.loop import JobRequest
from penstock_runtime.http.api.core.conversation import ANY, MOST_TOOLS, job_of, message_of
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.embeddings.feature_extraction import WIDEST
from penstock_runtime.tasks.fields import Boolean, Choice, Either, FieldKind, Integer, ListOf, Object, Others, Text
from penstock_runtime.tasks.text_generation import (
    MESSAGES_LIMIT,
    MOST_LOGPROBS,
    MOST_TOKENS,
    PENALTIES,
    SAMPLING,
    STOPS,
    AnyText,
    refuse_unsupported,
)

OPTIONS = Object(
    {},
    {
        **{name: kind for name, kind in SAMPLING.items() if name not in {"repetition_penalty", "seed"}},
        **PENALTIES,
        "repeat_penalty": SAMPLING["repetition_penalty"],
        "seed": (Integer(-(2**63), 2**63 - 1), None),
        "num_predict": (Integer(-2, MOST_TOKENS), None),
        "stop": (Either((AnyText(), STOPS)), None),
    },
    others=Others.IGNORED,
)
UNSUPPORTED_OPTIONS: Mapping[str, Sequence[Any]] = {"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)}
"""With the values that change nothing."""
_COMMON: dict[str, tuple[FieldKind, Any]] = {
    "model": (AnyText(), None),
    "stream": (Boolean(), True),
    "format": (Either((AnyText(), ANY)), ""),
    "options": (OPTIONS, {}),
    "think": (Either((Boolean(), Text())), None),
    "logprobs": (Boolean(), False),
    "top_logprobs": (Integer(0, MOST_LOGPROBS), None),
}
NOTES = {
    "model": "The endpoint's name, also with :latest; another one is answered with 404.",
    "stream": "A line of JSON for each piece.",
    "format": "json, or a JSON schema of the answer.",
    "options": "Defaults are the model's own, not Ollama's. Options for loading, such as num_ctx, are ignored.",
    "think": "Must not be true.",
}
TOOL = Object({"function": Object({"name": Text()}, others=Others.KEPT)}, {"type": (Text(), "function")})
MESSAGE = Object(
    {"role": Choice(("system", "user", "assistant", "tool"))},
    {
        "content": (AnyText(), ""),
        "images": (ListOf(AnyText(), 16, at_least=0), None),
        "tool_calls": (ListOf(ANY, MOST_TOOLS, at_least=0, words="a list of calls"), None),
        "tool_name": (AnyText(), None),
    },
    others=Others.IGNORED,
    words="a message",
)
CHAT = Object(
    {"messages": ListOf(MESSAGE, MESSAGES_LIMIT, at_least=0, words="a list of messages")},
    {**_COMMON, "tools": (ListOf(TOOL, MOST_TOOLS, at_least=0, words="a list of tools"), None)},
    notes=NOTES,
    others=Others.IGNORED,
)
GENERATE = Object(
    {},
    {**_COMMON, "prompt": (AnyText(), ""), "system": (AnyText(), ""), "raw": (Boolean(), False)},
    notes={**NOTES, "prompt": "Put into the model's chat template, with `system`, unless `raw` is true."},
    others=Others.IGNORED,
)
UNSUPPORTED: Mapping[str, Sequence[Any]] = {"context": ([],), "images": ([],), "suffix": ("",), "template": ("",)}


def embed_body(limits: RequestLimits) -> Object:
    """The body of `/api/embed`."""
    texts = ListOf(Text(), limits.items, at_least=0)
    optional: dict[str, tuple[FieldKind, Any]] = {
        "model": (AnyText(), None),
        "truncate": (Boolean(), None),
        "dimensions": (Integer(1, WIDEST), None),
    }
    return Object({"input": Either((AnyText(), texts))}, optional, notes=NOTES, others=Others.IGNORED)


EMBEDDINGS = Object({"prompt": AnyText()}, {"model": (AnyText(), None)}, notes=NOTES, others=Others.IGNORED)
SHOW = Object({}, {"model": (AnyText(), None), "name": (AnyText(), None)}, others=Others.IGNORED)


def job_and_variables(
    raw: Mapping[str, Any], body: Mapping[str, Any], model: GenerationModel
) -> tuple[JobRequest, Mapping[str, Any]]:
    """The job for a body, and the variables of the chat template."""
    refuse_unsupported(raw.get("options") or {}, UNSUPPORTED_OPTIONS)
    if body["think"] not in {None, False}:
        raise UnsupportedOption("think is not supported by this server", field="think", remedy="Leave it out")
    options = body["options"] or OPTIONS.parse({}, "options")
    values = {**options, "repetition_penalty": options["repeat_penalty"]}
    top = (body["top_logprobs"] or 0) if body["logprobs"] else None
    job = job_of(values, model, max(options["num_predict"] or 0, 0), top, default_tokens=0)
    return job, {} if body["think"] is None else {"enable_thinking": False}


def form_of(given: Any) -> GrammarText | None:
    """The form that the answer must have; None: any text."""
    if given in {"", None} if isinstance(given, str) else not given:
        return None
    return json_schema({"type": "object"} if given == "json" else given, "format")


def messages_of(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as chat templates take it."""
    found = []
    for index, one in enumerate(given):
        where = f"messages[{index}]"
        if one["images"]:
            raise UnsupportedOption(f"{where} has images; this model takes texts", field=f"{where}.images")
        message = {"role": one["role"], "content": one["content"]}
        if one["tool_calls"]:
            message["tool_calls"] = one["tool_calls"]
        if one["tool_name"]:
            message["name"] = one["tool_name"]
        found.append(message_of(message, where))
    return found
