"""Requests of text-generation-inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_runtime.errors import UnsupportedOption
from penstock_runtime.generation.grammar import GrammarText, json_schema, regular_expression
from penstock_runtime.tasks.fields import Boolean, Integer, Object, Others, Text
from penstock_runtime.tasks.text_generation import MOST_LOGPROBS, PENALTIES, SAMPLING, STOPS, TOKENS

DEFAULT_TOKENS = 100
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


def grammar_of(given: Mapping[str, Any]) -> GrammarText:
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
