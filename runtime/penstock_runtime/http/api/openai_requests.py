"""Requests of OpenAI's API for text generation: fields, messages, and the jobs that they ask for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock_runtime.errors import InvalidInput, UnsupportedOption
from penstock_runtime.generation.grammar import GrammarState, in_grammar_thread
from penstock_runtime.generation.loop import JobRequest
from penstock_runtime.generation.tool_calls import LIST_TOKEN, ToolForm, arguments_name, calls_grammar
from penstock_runtime.http.api.generation import PromptInputs
from penstock_runtime.http.api.token_ids import TextsOrIds
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.embeddings.feature_extraction import TokenIds
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
    MOST_LOGPROBS,
    MOST_TOKENS,
    PENALTIES,
    SAMPLING,
    STOPS,
    AnyText,
    Prompt,
    sampling,
)

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
MOST_BIASES = 1024
"""Each is added in each step."""
LONGEST_ID = 10
"""Digits of a token id."""
ANY = Object({}, others=Others.KEPT)
BIASES = Object({}, others=Others.KEPT, words="an object of token ids and biases")

COMMON: dict[str, tuple[FieldKind, Any]] = {
    "model": (Text("the name of a model"), None),
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
    "user": (Text("the name of a user"), None),
}
NOTES = {
    "model": "Not used: an endpoint has one model.",
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
TOOL_CHOICE = Either((Choice(("none", "auto", "required")), Object({"type": Text()}, others=Others.KEPT)))
TOOL_NOTES = {
    "tool_choice": "auto: the model decides; required: the answer is one call or more; a function with its name: the "
    "answer is a call of it.",
    "parallel_tool_calls": "false: with tool_choice required, the answer is one call.",
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
        "tool_choice": (TOOL_CHOICE, "auto"),
        "parallel_tool_calls": (Boolean(), True),
    },
    notes={
        **NOTES,
        **TOOL_NOTES,
        "max_completion_tokens": "The same as max_tokens; default: as many as fit.",
        "chat_template_kwargs": "Variables of the model's chat template, such as enable_thinking.",
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
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
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


@dataclass(frozen=True)
class Tools:
    """The tools that a request offers."""

    offered: Sequence[Any]
    """In the form of chat templates."""
    form: ToolForm
    """How the model writes a call."""
    grammar: Callable[[], GrammarState] | None = None
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
    return Tools(list(tools or ()), form, partial(_lark, model, grammar))


def _lark(model: GenerationModel, grammar: str) -> GrammarState:
    return model.grammars.of_lark(grammar, "tools")


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
    body: Mapping[str, Any],
    model: GenerationModel,
    max_tokens: int,
    top_logprobs: int | None,
    *,
    default_tokens: int,
    grammar: Callable[[], GrammarState] | None,
) -> JobRequest:
    """The job that a body asks for, without its prompt. `max_tokens` 0: `default_tokens`, and if these are 0 as many as
    fit. `grammar` makes the form of the answer."""
    names = [name for name in (*SAMPLING, *PENALTIES) if name != "seed"]
    defaults = {name: value for name, value in model.defaults.items() if name in names}
    values = {**defaults, **{name: body[name] for name in names if body.get(name) is not None}}
    values["logit_bias"] = _biases(body.get("logit_bias") or {}, model.engine.vocabulary)
    stop = body.get("stop") or ()
    return JobRequest(
        prompt=(),
        max_tokens=max_tokens or default_tokens,
        is_default_limit=max_tokens == 0,
        sampling=sampling(values, seed=body["seed"], top_logprobs=top_logprobs),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        end_tokens=model.end_tokens,
        grammar=None if grammar is None else await in_grammar_thread(grammar),
    )


def form_of(body: Mapping[str, Any], model: GenerationModel) -> Callable[[], GrammarState] | None:
    """Makes the form of the answer that a chat or completion asks for; None: any text. InvalidInput for two forms."""
    forms = [name for name in ("guided_regex", "guided_json", "response_format") if _has_form(body[name])]
    if len(forms) > 1:
        raise InvalidInput(
            f"{' and '.join(forms)} are two forms of one answer", field=forms[1], remedy="Send only one of them"
        )
    if body["guided_regex"] is not None:
        return lambda: model.grammars.of_regex(body["guided_regex"], "guided_regex")
    if body["guided_json"] is not None:
        return lambda: model.grammars.of_json_schema(body["guided_json"], "guided_json")
    given = body["response_format"]
    if given is None:
        return None
    nested = given.get("json_schema")
    schema = nested.get("schema") if isinstance(nested, dict) else None
    return text_format(given["type"], schema, model, "response_format", "response_format.json_schema.schema")


def _has_form(given: Any) -> bool:
    return given is not None and not (isinstance(given, dict) and given.get("type") == "text")


def text_format(
    kind: str, schema: Any, model: GenerationModel, field: str, schema_field: str
) -> Callable[[], GrammarState] | None:
    """Makes the form of an answer of this kind; None: any text. UnsupportedOption for an unknown kind."""
    if kind == "text":
        return None
    if kind == "json_object":
        return lambda: model.grammars.of_json_schema({"type": "object"}, field)
    if kind == "json_schema":
        return lambda: model.grammars.of_json_schema(schema, schema_field)
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
