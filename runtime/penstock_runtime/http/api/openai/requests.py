"""Bodies of OpenAI's API: embeddings, chat completions, completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from penstock_runtime.errors import InvalidInput
from penstock_runtime.generation.grammar import GrammarText, json_schema, lark, regular_expression
from penstock_runtime.http.api.core.conversation import (
    ANY,
    BIASES,
    CHAT_MESSAGE,
    MOST_BIASES,
    MOST_TOOLS,
    TOOL_CHOICE,
    TOOL_NOTES,
    text_format,
)
from penstock_runtime.http.api.core.generation import PromptInputs
from penstock_runtime.http.api.core.token_ids import ABOUT_IDS, ID, TextsOrIds
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.embeddings.feature_extraction import WIDEST, TokenIds
from penstock_runtime.tasks.fields import (
    Boolean,
    Choice,
    Either,
    FieldKind,
    Integer,
    ListOf,
    Object,
    Others,
    Text,
)
from penstock_runtime.tasks.text_generation import (
    LARGEST_SEED,
    MESSAGES_LIMIT,
    MOST_CHOICES,
    MOST_LOGPROBS,
    MOST_STOPS,
    MOST_TOKENS,
    PENALTIES,
    SAMPLING,
    STOPS,
    AnyText,
    Prompt,
    refuse_unsupported,
)
from penstock_runtime.tasks.texts import PROMPT, PROMPT_NOTES


def embeddings_body(limits: RequestLimits) -> Object:
    """The body of `/v1/embeddings`."""
    return Object(
        required={"input": TextsOrIds(limits)},
        optional={
            "model": (AnyText(), None),
            "encoding_format": (Choice(("float", "base64")), "float"),
            "dimensions": (Integer(1, WIDEST), None),
            "user": (AnyText(), None),
            **PROMPT,
        },
        notes={
            "model": "Not used, as text-embeddings-inference does: an endpoint has one model.",
            "encoding_format": "base64: little-endian float32 numbers, a third of the size and faster to read.",
            "dimensions": "Keep this many first values (for models trained so).",
            "user": "Not used.",
            "input": ABOUT_IDS,
            **PROMPT_NOTES,
        },
        others=Others.IGNORED,
    )


DEFAULT_COMPLETION_TOKENS = 16
"""Of `/v1/completions`, as OpenAI's."""
TOOL = Object(
    {"type": Choice(("function",)), "function": Object({"name": Text()}, others=Others.KEPT)}, others=Others.KEPT
)
SCHEMA = Either((ANY, Text("a JSON schema")))
CHOICES = ListOf(Text(), 1000, words="a list of texts")
COMMON: dict[str, tuple[FieldKind, Any]] = {
    "model": (AnyText(), None),
    "max_tokens": (Integer(1, MOST_TOKENS), None),
    **SAMPLING,
    **PENALTIES,
    "top_k": (Integer(-1, MOST_TOKENS), None),
    "seed": (Integer(-(2**63), LARGEST_SEED), None),
    "min_tokens": (Integer(0, MOST_TOKENS), 0),
    "ignore_eos": (Boolean(), False),
    "stop_token_ids": (ListOf(ID, MOST_STOPS, at_least=0, words="a list of token ids"), None),
    "include_stop_str_in_output": (Boolean(), False),
    "logit_bias": (BIASES, None),
    "stop": (Either((Text(), STOPS)), None),
    "n": (Integer(1, MOST_CHOICES), 1),
    "stream": (Boolean(), False),
    "stream_options": (Object({}, {"include_usage": (Boolean(), False)}, others=Others.IGNORED), None),
    "response_format": (Object({"type": Text()}, others=Others.KEPT), None),
    "guided_json": (SCHEMA, None),
    "guided_regex": (Text("a regular expression"), None),
    "guided_choice": (CHOICES, None),
    "structured_outputs": (
        Object(
            {},
            {
                "json": (SCHEMA, None),
                "regex": (Text("a regular expression"), None),
                "choice": (CHOICES, None),
                "json_object": (Boolean(), None),
            },
            others=Others.KEPT,
        ),
        None,
    ),
    "user": (AnyText(), None),
}
NOTES = {
    "model": "The endpoint, the repository that its model is from, or a placeholder; another one is answered with 404.",
    "max_tokens": "Tokens to generate.",
    "top_k": "Not part of OpenAI's API: choose among this number of most probable tokens; 0 and -1: all.",
    "min_p": "Not part of OpenAI's API: choose among tokens with this share of the highest probability.",
    "repetition_penalty": "Not part of OpenAI's API: divides the scores of tokens of prompt and answer.",
    "logit_bias": f"Added to the scores of at most {MOST_BIASES} tokens, by token id; -100 to 100.",
    "seed": "The same seed gives the same answer; -1: no seed.",
    "min_tokens": "Of vLLM: the answer does not end before this number of tokens.",
    "ignore_eos": "Of vLLM: end tokens of the model do not end the answer.",
    "stop_token_ids": "Of vLLM: further tokens that end the answer.",
    "include_stop_str_in_output": "Of vLLM: the text ends with the stop string.",
    "n": "The number of answers.",
    "response_format": "text, json_object, or json_schema with a schema: the answer is JSON in this form.",
    "guided_json": "Not part of OpenAI's API: a JSON schema of the answer.",
    "guided_regex": "Not part of OpenAI's API: a regular expression that the answer matches.",
    "guided_choice": "Of vLLM: the answer is one of these texts.",
    "structured_outputs": "Of vLLM: one of json, regex, choice and json_object, as the fields guided_….",
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
        "add_generation_prompt": (Boolean(), None),
        "continue_final_message": (Boolean(), False),
        "tools": (ListOf(TOOL, MOST_TOOLS, at_least=0, words="a list of tools"), None),
        "tool_choice": (TOOL_CHOICE, "auto"),
        "parallel_tool_calls": (Boolean(), True),
    },
    notes={
        **NOTES,
        **TOOL_NOTES,
        "max_completion_tokens": "The same as max_tokens; default: as many as fit.",
        "chat_template_kwargs": "Variables of the model's chat template, such as enable_thinking.",
        "add_generation_prompt": "Not part of OpenAI's API: false: the prompt ends after the last message.",
        "continue_final_message": "Not part of OpenAI's API: the answer goes on with the text of the last message.",
    },
    others=Others.IGNORED,
)
LONGEST_PROMPT = 1_000_000
"""Maximum token ids of a prompt: more than any context."""
PROMPT_NOTE = (
    "A text, token ids, or a list of either: several prompts. Choices are numbered prompt by prompt: those of the "
    "second begin at n."
)


ECHO_NOTES = {
    "echo": "The text begins with the prompt, and the probabilities with those of its tokens (the first has none).",
    "add_special_tokens": "Of vLLM: false: without the tokenizer's special tokens before a text.",
}


def completion_body(limits: RequestLimits) -> Object:
    """The body of `/v1/completions`."""
    return Object(
        {"prompt": TextsOrIds(limits, LONGEST_PROMPT)},
        {
            **COMMON,
            "max_tokens": (Integer(0, MOST_TOKENS), None),
            "logprobs": (Integer(0, MOST_LOGPROBS), None),
            "echo": (Boolean(), False),
            "add_special_tokens": (Boolean(), True),
        },
        notes={
            **NOTES,
            "prompt": PROMPT_NOTE,
            "max_tokens": f"Default {DEFAULT_COMPLETION_TOKENS}; 0 with echo.",
            **ECHO_NOTES,
        },
        others=Others.IGNORED,
    )


UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "lora": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # Of vLLM and SGLang.
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "ebnf": (),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "regex": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    # Of llama.cpp and text-generation-inference.
    "grammar": ("",),
    "json_schema": (),
    "max_new_tokens": (),
    "mirostat": (0,),
    "n_predict": (),
    "repeat_penalty": (1,),
    "typical_p": (1,),
}
"""Fields of the API, and of similar servers, that would change the answer; with the values that change nothing."""


def prompts_of(given: str | list[str] | TokenIds, model: GenerationModel, *, special: bool) -> PromptInputs:
    """The prompts of a completion. `special`: texts get the tokenizer's special tokens. InvalidInput names one with a
    token that the model does not have."""
    if not isinstance(given, TokenIds):
        return [Prompt(text, special=special) for text in ([given] if isinstance(given, str) else given)]
    for index, ids in enumerate(given.texts):
        path = "prompt" if given.single else f"prompt[{index}]"
        model.tokenizer.require_embedded(ids, path)
        if max(ids) >= model.engine.vocabulary:
            raise InvalidInput(
                f"{path} has the token {max(ids)}; this model's tokens are 0 to {model.engine.vocabulary - 1}",
                field=path,
                remedy="Use the tokenizer of this model",
            )
    return given.texts


FORMS = ("guided_regex", "guided_json", "guided_choice", "response_format")


def form_of(body: Mapping[str, Any]) -> GrammarText | None:
    """The form that the answer of a chat or completion must have; None: any text. InvalidInput for two forms."""
    outputs = body["structured_outputs"] or {}
    refuse_unsupported(outputs, {name: () for name in outputs if name not in STRUCTURES})
    given = {name: body[name] for name in FORMS if _has_form(body[name])}
    given |= {f"structured_outputs.{name}": outputs[name] for name in STRUCTURES if outputs.get(name)}
    if len(given) > 1:
        raise InvalidInput(
            f"{' and '.join(given)} are two forms of one answer", field=list(given)[1], remedy="Send only one of them"
        )
    for field, value in given.items():
        match field.removeprefix("guided_").removeprefix("structured_outputs."):
            case "regex":
                return regular_expression(value, field)
            case "json":
                return json_schema(_schema(value), field)
            case "choice":
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
                return lark(f"start: {texts}\n", field)
            case "json_object":
                return json_schema({"type": "object"}, field)
            case _:
                nested = value.get("json_schema")
                schema = nested.get("schema") if isinstance(nested, dict) else None
                return text_format(value["type"], schema, field, f"{field}.json_schema.schema")
    return None


STRUCTURES = ("json", "regex", "choice", "json_object")
"""Fields of `structured_outputs`."""


def _schema(given: Any) -> Any:
    """A JSON schema, which clients of vLLM may send as a text."""
    try:
        return orjson.loads(given) if isinstance(given, str) else given
    except orjson.JSONDecodeError:
        return given


def _has_form(given: Any) -> bool:
    return given is not None and not (isinstance(given, dict) and given.get("type") == "text")
