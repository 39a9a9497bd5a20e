"""Bodies of OpenAI's API: embeddings, chat completions, completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_runtime.errors import InvalidInput
from penstock_runtime.generation.grammar import GrammarText, json_schema, regular_expression
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
from penstock_runtime.http.api.core.token_ids import ABOUT_IDS, TextsOrIds
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
    MESSAGES_LIMIT,
    MOST_CHOICES,
    MOST_LOGPROBS,
    MOST_TOKENS,
    PENALTIES,
    SAMPLING,
    STOPS,
    AnyText,
    Prompt,
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
COMMON: dict[str, tuple[FieldKind, Any]] = {
    "model": (AnyText(), None),
    "max_tokens": (Integer(1, MOST_TOKENS), None),
    **SAMPLING,
    **PENALTIES,
    "logit_bias": (BIASES, None),
    "stop": (Either((Text(), STOPS)), None),
    "n": (Integer(1, MOST_CHOICES), 1),
    "stream": (Boolean(), False),
    "stream_options": (Object({}, {"include_usage": (Boolean(), False)}, others=Others.IGNORED), None),
    "response_format": (Object({"type": Text()}, others=Others.KEPT), None),
    "guided_json": (ANY, None),
    "guided_regex": (Text("a regular expression"), None),
    "user": (AnyText(), None),
}
NOTES = {
    "model": "The endpoint, the repository that its model is from, or a placeholder; another one is answered with 404.",
    "max_tokens": "Tokens to generate.",
    "top_k": "Not part of OpenAI's API: choose among this number of most probable tokens; 0: all.",
    "min_p": "Not part of OpenAI's API: choose among tokens with this share of the highest probability.",
    "repetition_penalty": "Not part of OpenAI's API: divides the scores of tokens of prompt and answer.",
    "logit_bias": f"Added to the scores of at most {MOST_BIASES} tokens, by token id; -100 to 100.",
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


def completion_body(limits: RequestLimits) -> Object:
    """The body of `/v1/completions`."""
    return Object(
        {"prompt": TextsOrIds(limits, LONGEST_PROMPT)},
        {**COMMON, "logprobs": (Integer(0, MOST_LOGPROBS), None)},
        notes={**NOTES, "prompt": PROMPT_NOTE, "max_tokens": f"Default {DEFAULT_COMPLETION_TOKENS}."},
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
    "guided_choice": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "echo": (False,),
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
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "prompt_embeds": (),
    "regex": (),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
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


def prompts_of(given: str | list[str] | TokenIds, model: GenerationModel) -> PromptInputs:
    """The prompts of a completion. InvalidInput names one with a token that the model does not have."""
    if isinstance(given, str):
        return [Prompt(given, special=True)]
    if not isinstance(given, TokenIds):
        return [Prompt(text, special=True) for text in given]
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


def form_of(body: Mapping[str, Any]) -> GrammarText | None:
    """The form that the answer of a chat or completion must have; None: any text. InvalidInput for two forms."""
    forms = [name for name in ("guided_regex", "guided_json", "response_format") if _has_form(body[name])]
    if len(forms) > 1:
        raise InvalidInput(
            f"{' and '.join(forms)} are two forms of one answer", field=forms[1], remedy="Send only one of them"
        )
    if body["guided_regex"] is not None:
        return regular_expression(body["guided_regex"], "guided_regex")
    if body["guided_json"] is not None:
        return json_schema(body["guided_json"], "guided_json")
    given = body["response_format"]
    if given is None:
        return None
    nested = given.get("json_schema")
    schema = nested.get("schema") if isinstance(nested, dict) else None
    return text_format(given["type"], schema, "response_format", "response_format.json_schema.schema")


def _has_form(given: Any) -> bool:
    return given is not None and not (isinstance(given, dict) and given.get("type") == "text")
