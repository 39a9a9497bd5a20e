"""Chat and completions over HTTP, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock_runtime.generation.grammar import Grammar, Grammars, GrammarText
from penstock_runtime.generation.sampling import SampledToken
from penstock_runtime.http.api.core.unknown_fields import MOST_LOGGED, UnknownFields
from penstock_runtime.http.api.openai.answers import AnswerStream, CompletionAnswer
from penstock_runtime.serving.generation_request import Continuation
from tests.runtime.generation.paged_engine import PagedEngine
from tests.runtime.generation.small_model import (
    TEMPLATE,
    TOOL_TEMPLATE,
    serving_generation,
    small_engine,
    small_generation_model,
)
from tests.runtime.http.serving import Endpoint, until

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with serving_generation(small_generation_model(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tools_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    path = tmp_path_factory.mktemp("model")
    with serving_generation(small_generation_model(path, template=TOOL_TEMPLATE)) as running:
        yield running


def post(endpoint: Endpoint, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"{endpoint.url}{path}", json=body, headers=headers, timeout=60, verify=False)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="smol", messages=MESSAGES, **{"max_tokens": 12, **options})


class TestChat:
    def test_an_answer_has_text_reason_and_usage(self, client: openai.OpenAI) -> None:
        answer = chat(client, temperature=0)
        (choice,) = answer.choices
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason == "length"
        assert answer.usage.prompt_tokens == len("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n") - 34 + 3
        assert answer.usage.completion_tokens == 12
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
        assert answer.object == "chat.completion"
        assert answer.system_fingerprint == "fp_local_varies_with_batch"

    def test_a_stream_has_the_text_of_the_answer(self, client: openai.OpenAI) -> None:
        whole = chat(client, temperature=0)
        chunks = list(chat(client, temperature=0, stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 12
        assert len({chunk.id for chunk in chunks}) == 1

    def test_the_async_client_streams(self, endpoint: Endpoint, client: openai.OpenAI) -> None:
        async def run() -> str:
            async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="x") as other:
                stream = await other.chat.completions.create(
                    model="smol", messages=MESSAGES, max_tokens=12, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert asyncio.run(run()) == chat(client, temperature=0).choices[0].message.content

    def test_a_seed_repeats_the_answer_in_any_company(self, endpoint: Endpoint, client: openai.OpenAI) -> None:
        alone = chat(client, seed=5, temperature=1.5).choices[0].message.content
        assert chat(client, seed=6, temperature=1.5).choices[0].message.content != alone
        texts: list[str] = []

        def ask(seed: int) -> None:
            body = {"messages": MESSAGES, "max_tokens": 12, "seed": seed, "temperature": 1.5}
            text = post(endpoint, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
            if seed == 5:
                texts.append(text)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in (5, 1, 5, 2, 5, 3, 5, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert texts == [alone] * 4

    def test_n_answers_differ_and_are_those_of_their_seed(self, client: openai.OpenAI) -> None:
        first, second = (chat(client, n=3, seed=1, temperature=1.5) for _ in range(2))
        texts = [choice.message.content for choice in first.choices]
        assert [choice.index for choice in first.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert texts == [choice.message.content for choice in second.choices]
        assert first.usage.completion_tokens == 36
        streamed: dict[int, str] = {}
        for chunk in chat(client, n=3, seed=1, temperature=1.5, stream=True):
            (choice,) = chunk.choices
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
        assert [streamed[index] for index in range(3)] == texts

    def test_probabilities_come_with_each_token_also_in_a_stream(self, client: openai.OpenAI) -> None:
        whole = chat(client, temperature=0, logprobs=True, top_logprobs=3).choices[0].logprobs.content
        assert len(whole) == 12
        for one in whole:
            assert one.top_logprobs[0].logprob == one.logprob <= 0
            assert len(one.top_logprobs) == 3
        parts = []
        for chunk in chat(client, temperature=0, logprobs=True, top_logprobs=3, stream=True):
            if chunk.choices[0].logprobs is not None:
                parts += chunk.choices[0].logprobs.content
        assert [one.bytes for one in parts] == [one.bytes for one in whole]
        assert [one.logprob for one in parts] == [one.logprob for one in whole]

    def test_a_stop_string_ends_the_text_before_it(self, client: openai.OpenAI) -> None:
        text = chat(client, seed=3, temperature=1.5, max_tokens=40).choices[0].message.content
        stop = text[8:10]
        choice = chat(client, seed=3, temperature=1.5, max_tokens=40, stop=[stop]).choices[0]
        assert choice.message.content == text[: text.index(stop)]
        assert choice.finish_reason == "stop"
        chunks = chat(client, seed=3, temperature=1.5, max_tokens=40, stop=stop, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content

    def test_the_end_token_of_the_model_ends_the_text(self, client: openai.OpenAI) -> None:
        choice = chat(client, logit_bias={"257": 100}).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.content == ""

    def test_an_endless_answer_ends_with_the_context(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="smol", messages=MESSAGES, temperature=0, logit_bias={"257": -100}
        )
        assert answer.usage is not None
        assert answer.usage.total_tokens == 512
        assert answer.choices[0].finish_reason == "length"

    def test_an_answer_follows_a_json_schema_also_in_a_stream(self, client: openai.OpenAI) -> None:
        schema = {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "maximum": 99}},
            "required": ["colour", "count"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
        answer = chat(client, response_format=form, n=3, temperature=2, seed=1, max_tokens=250)
        values = [json.loads(choice.message.content) for choice in answer.choices]
        assert all(value["colour"] in {"red", "green"} and value["count"] <= 99 for value in values)
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        chunks = chat(client, response_format=form, temperature=2, seed=1, max_tokens=250, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answer.choices[0].message.content
        anything = chat(client, response_format={"type": "json_object"}, temperature=0, max_tokens=200)
        assert anything.choices[0].message.content.startswith("{")

    def test_an_answer_matches_a_regular_expression(self, client: openai.OpenAI) -> None:
        body = {"guided_regex": "[0-9]{3}-(ab|cd)+x"}
        choice = chat(client, extra_body=body, temperature=1, seed=2, max_tokens=100).choices[0]
        assert re.fullmatch(body["guided_regex"], choice.message.content)
        assert choice.finish_reason == "stop"

    def test_content_may_come_in_parts(self, client: openai.OpenAI) -> None:
        parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        answer = client.chat.completions.create(model="smol", messages=parts, max_tokens=12, temperature=0)
        assert answer.choices[0].message.content == chat(client, temperature=0).choices[0].message.content

    def test_a_prompt_that_begins_like_an_earlier_one_is_not_computed_again(self, client: openai.OpenAI) -> None:
        messages: Any = [{"role": "user", "content": "A text of more than a few blocks of the cache " * 3}]
        cached = []
        for _ in range(2):
            answer = client.chat.completions.create(model="smol", messages=messages, max_tokens=1)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert cached[0] == 0
        assert cached[1]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools[0].function"),
        ({"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": MESSAGES, "response_format": {"type": "grammar"}}, 400, "response_format.type"),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema"),
        ({"messages": MESSAGES, "guided_json": {"type": "nonsense"}}, 400, "guided_json"),
        ({"messages": MESSAGES, "guided_regex": "("}, 400, "guided_regex"),
        ({"messages": MESSAGES, "functions": [{}]}, 400, "functions"),
        ({"messages": MESSAGES, "guided_choice": []}, 400, "guided_choice"),
        ({"messages": MESSAGES, "guided_choice": ["a"], "guided_json": {}}, 400, "guided_choice"),
        ({"messages": MESSAGES, "structured_outputs": {"grammar": "x"}}, 400, "grammar"),
        ({"messages": MESSAGES, "structured_outputs": {"json": "{"}}, 400, "structured_outputs.json"),
        ({"messages": MESSAGES, "model": "gpt-4o"}, 404, "model"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages"),
        ({"messages": MESSAGES, "max_tokens": 600}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
        ({"messages": MESSAGES, "temperature": -1}, 400, "temperature"),
        ({"messages": MESSAGES, "top_p": 2}, 400, "top_p"),
        ({"messages": MESSAGES, "n": 0}, 400, "n"),
        ({"messages": MESSAGES, "seed": 2**64}, 400, "seed"),
        ({"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs"),
        ({"messages": MESSAGES, "logit_bias": {"258": 1}}, 400, "logit_bias.258"),
        ({"messages": MESSAGES, "logit_bias": {"a": 1}}, 400, "logit_bias.a"),
        ({"messages": MESSAGES, "logit_bias": {"1": 101}}, 400, "logit_bias.1"),
        ({"messages": MESSAGES, "logit_bias": {"9" * 5000: 1}}, 400, f"logit_bias.{'9' * 20}"),
        ({"messages": MESSAGES, "logit_bias": {str(number): 1 for number in range(1025)}}, 400, "logit_bias"),
        ({"messages": MESSAGES, "max_tokens": 2**31 - 1}, 400, "messages"),
        ({"messages": MESSAGES, "max_tokens": 2**70}, 400, "max_tokens"),
        ({"messages": MESSAGES, "reasoning_effort": "low"}, 400, "reasoning_effort"),
        ({"messages": MESSAGES, "verbosity": "high"}, 400, "verbosity"),
        ({"messages": MESSAGES, "min_tokens": -1}, 400, "min_tokens"),
        ({"messages": MESSAGES, "stop_token_ids": [-2]}, 400, "stop_token_ids[0]"),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            400,
            "add_generation_prompt",
        ),
        ({"messages": MESSAGES, "chat_template": "{{ messages }}"}, 400, "chat_template"),
        ({"messages": MESSAGES, "guided_regex": "a", "guided_json": {}}, 400, "guided_json"),
        (
            {"messages": MESSAGES, "guided_regex": "a", "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        ({"messages": MESSAGES, "n": 17}, 400, "n"),
        ({"messages": MESSAGES, "stop": ["x"] * 1000}, 400, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(
    endpoint: Endpoint, body: dict[str, Any], status: int, field: str | None, stream: bool
) -> None:
    answer = httpx.post(
        f"{endpoint.url}/v1/chat/completions", content=json.dumps({**body, "stream": stream}), timeout=60, verify=False
    )
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "", "model": ""},
        {"logprobs": False, "top_logprobs": 0},
        {"messages": [{"role": "user", "content": []}]},
        {"top_k": -1, "seed": -1, "min_p": 0, "min_tokens": 0, "repetition_penalty": 1, "ignore_eos": False},
        {"length_penalty": 1.0, "spaces_between_special_tokens": True, "stop_token_ids": [], "use_beam_search": False},
        {"add_generation_prompt": True, "continue_final_message": False, "documents": [], "chat_template_kwargs": {}},
        {"structured_outputs": {}, "guided_json": None, "guided_choice": None, "stop": []},
        {"model": "tgi"},
        {"model": "smol"},
    ],
    ids=str,
)
def test_fields_with_the_values_that_clients_send_by_default_are_taken(
    endpoint: Endpoint, harmless: dict[str, Any]
) -> None:
    answer = post(endpoint, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **harmless})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_another_model_is_not_found(endpoint: Endpoint, path: str) -> None:
    field = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")
    refused = post(endpoint, path, {"model": "gpt-4o", field: MESSAGES if field == "messages" else "x"})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
    assert "This endpoint's model is 'smol'" in error["message"]


def test_the_last_message_is_continued_if_that_is_wanted(endpoint: Endpoint) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nOnce upon"
    options = {"max_tokens": 6, "temperature": 0}
    whole = post(endpoint, "/v1/completions", {"prompt": prompt, **options}).json()
    body = {"messages": messages, **options, "continue_final_message": True}
    continued = post(endpoint, "/v1/chat/completions", body).json()
    assert continued["choices"][0]["message"]["content"] == whole["choices"][0]["text"]
    assert continued["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    parameters = {"do_sample": False, "max_new_tokens": 6}
    (answer,) = post(endpoint, "/predict", {"inputs": messages, "parameters": parameters}).json()
    text = whole["choices"][0]["text"]
    assert answer["generated_text"] == [*MESSAGES, {"role": "assistant", "content": f"Once upon{text}"}]
    parameters["continue_final_message"] = False
    (answer,) = post(endpoint, "/predict", {"inputs": messages, "parameters": parameters}).json()
    assert answer["generated_text"][:2] == messages
    assert len(answer["generated_text"]) == 3
    bare = {"messages": MESSAGES, "max_tokens": 1, "add_generation_prompt": False}
    usage = post(endpoint, "/v1/chat/completions", bare).json()["usage"]
    assert usage["prompt_tokens"] == len("|user\nHello|\n")


def test_requests_with_tools_have_the_template_for_them(tmp_path: Path) -> None:
    named: Any = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    with serving_generation(small_generation_model(tmp_path, template=named)) as endpoint:
        body = {"messages": MESSAGES, "max_tokens": 1}
        plain = post(endpoint, "/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
        tools = post(endpoint, "/v1/chat/completions", {**body, "tools": OFFERED}).json()["usage"]["prompt_tokens"]
    assert plain == len("|user\nHello|\n|assistant\n")
    assert tools > plain + 100


SHAPE: Any = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
        "b": {"enum": ["x, y: z", " "]},
        "c": {
            "type": "object",
            "properties": {"d": {"type": "boolean"}},
            "required": ["d"],
            "additionalProperties": False,
        },
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


def test_json_has_no_more_white_space_than_templates_show(client: openai.OpenAI) -> None:
    wide = {**SHAPE, "properties": {**SHAPE["properties"], "c": {"enum": [{"d": [1, 2]}]}}}
    for seed, schema in enumerate([SHAPE, wide] * 4):
        for form in (
            {"guided_json": schema},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        ):
            options: Any = {"extra_body": form, "max_tokens": 400, "temperature": 1.5, "seed": seed}
            (choice,) = chat(client, **options, logit_bias={"32": 5, "198": 5}).choices
            assert choice.finish_reason == "stop", choice.message.content
            assert choice.message.content == json.dumps(json.loads(choice.message.content))


@pytest.mark.parametrize(
    "form",
    [
        {"guided_choice": ["yes", 'n"o', "\u00e9\n"]},
        {"structured_outputs": {"choice": ["yes", 'n"o', "\u00e9\n"]}},
        {"structured_outputs": {"regex": r'yes|n"o|\u00e9\n'}},
    ],
)
def test_an_answer_is_one_of_the_choices(client: openai.OpenAI, form: dict[str, Any]) -> None:
    texts = {chat(client, extra_body=form, temperature=2, seed=seed).choices[0].message.content for seed in range(8)}
    assert texts <= {"yes", 'n"o', "\u00e9\n"}
    assert len(texts) > 1


def test_structured_outputs_have_the_forms_of_the_older_fields(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    for given in (schema, json.dumps(schema)):
        for form in ({"structured_outputs": {"json": given}}, {"guided_json": given}):
            assert chat(client, extra_body=form).choices[0].message.content == '{"a": 1}'


ENDS: Any = {"logit_bias": {"257": 100}, "temperature": 0}
"""The most probable token is the end token."""


class TestEnds:
    def test_an_end_token_can_be_ignored(self, client: openai.OpenAI) -> None:
        assert chat(client, **ENDS).usage.completion_tokens == 1
        answer = chat(client, **ENDS, extra_body={"ignore_eos": True})
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (12, "length")

    def test_an_answer_has_its_least_tokens(self, client: openai.OpenAI) -> None:
        answer = chat(client, **ENDS, extra_body={"min_tokens": 5})
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (6, "stop")
        free = chat(client, temperature=0, logit_bias={"257": -100}, max_tokens=6).choices[0].message.content
        assert answer.choices[0].message.content == free[: len(answer.choices[0].message.content)]

    def test_a_stop_string_counts_after_the_least_tokens(self, client: openai.OpenAI) -> None:
        options: Any = {"temperature": 0, "extra_body": {"guided_regex": "a{12}"}}
        stop = chat(client, stop="aa", **options)
        assert (stop.usage.completion_tokens, stop.choices[0].message.content) == (2, "")
        options["extra_body"] |= {"min_tokens": 5, "include_stop_str_in_output": True}
        later = chat(client, stop="aa", **options)
        assert (later.usage.completion_tokens, later.choices[0].message.content) == (7, "a" * 7)

    def test_further_tokens_end_an_answer(self, client: openai.OpenAI) -> None:
        options: Any = {"temperature": 0, "logit_bias": {"97": 100}, "extra_body": {"stop_token_ids": [97]}}
        answer = chat(client, **options)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "stop")


class TestEcho:
    """What lm-evaluation-harness asks for."""

    def test_the_probabilities_of_a_prompt_are_those_of_its_tokens_as_an_answer(self, client: openai.OpenAI) -> None:
        form: Any = {"guided_regex": "[a-z]{10}"}  # bytes of one text may be parts of a character
        options: Any = {"model": "smol", "max_tokens": 10, "temperature": 0, "logprobs": 2, "extra_body": form}
        (choice,) = client.completions.create(prompt="Once", **options).choices
        text = f"Once{choice.text}"
        assert choice.logprobs is not None
        (echoed,) = client.completions.create(
            prompt=text, **{**options, "max_tokens": 0, "extra_body": {"echo": True}}
        ).choices
        assert (echoed.text, echoed.finish_reason) == (text, "length")
        assert echoed.logprobs is not None
        values = echoed.logprobs.token_logprobs or []
        assert values[0] is None
        assert values[4:] == choice.logprobs.token_logprobs
        assert (echoed.logprobs.top_logprobs or [])[4:] == choice.logprobs.top_logprobs
        assert (echoed.logprobs.top_logprobs or [0])[0] is None
        assert (echoed.logprobs.text_offset or [])[:4] == [0, 1, 2, 3]

    def test_an_answer_follows_the_prompt_also_in_a_stream(self, client: openai.OpenAI) -> None:
        options: Any = {"model": "smol", "prompt": ["Once", "A long prompt " * 10], "max_tokens": 3, "temperature": 0,
                        "logprobs": 1, "n": 2, "extra_body": {"echo": True}}  # fmt: skip
        whole = client.completions.create(**options)
        assert [one.text[:6] for one in whole.choices] == ["Once" + one.text[4:6] for one in whole.choices[:2]] + [
            "A long"
        ] * 2
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        assert [len(one.logprobs.tokens or ()) for one in whole.choices if one.logprobs] == [7, 7, 143, 143]
        texts = dict.fromkeys(range(4), "")
        values: dict[int, list[float | None]] = {index: [] for index in range(4)}
        for chunk in client.completions.create(**options, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                values[choice.index] += choice.logprobs.token_logprobs or ()
        assert list(texts.values()) == [one.text for one in whole.choices]
        assert list(values.values()) == [one.logprobs.token_logprobs for one in whole.choices if one.logprobs]

    def test_a_prompt_of_ids_is_echoed_as_text_and_counts_no_generated_tokens(self, client: openai.OpenAI) -> None:
        ids = [79, 110, 99, 101]
        answer = client.completions.create(model="smol", prompt=ids, max_tokens=0, extra_body={"echo": True})
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)
        assert answer.choices[0].logprobs is None


class TestCompletions:
    def test_a_text_is_continued(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="smol", prompt="Once", temperature=0, max_tokens=10, logprobs=2)
        (choice,) = answer.choices
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or ()) == 10
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 4
        chunks = client.completions.create(model="smol", prompt="Once", temperature=0, max_tokens=10, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text

    def test_token_ids_are_a_prompt(self, endpoint: Endpoint, client: openai.OpenAI) -> None:
        ids = [token["id"] for token in post(endpoint, "/tokenize", {"inputs": "Once"}).json()[0]]
        by_text, by_ids = (
            client.completions.create(model="smol", prompt=prompt, temperature=0) for prompt in ("Once", ids)
        )
        assert by_text.usage is not None
        assert by_text.usage.completion_tokens == 16
        assert by_ids.choices[0].text == by_text.choices[0].text
        assert by_ids.usage == by_text.usage

    @pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "seed": 3, "logprobs": 1}])
    def test_each_of_several_prompts_has_the_answers_that_it_has_alone(
        self, endpoint: Endpoint, client: openai.OpenAI, options: Any
    ) -> None:
        def ask(prompt: Any, **more: Any) -> Any:
            return client.completions.create(model="smol", prompt=prompt, n=2, max_tokens=8, **options, **more)

        texts = ["Once", "A longer beginning", "Once upon"]
        ids = [[token["id"] for token in post(endpoint, "/tokenize", {"inputs": text}).json()[0]] for text in texts]
        alone = [ask(text) for text in texts]
        whole = ask(texts)
        assert [choice.index for choice in whole.choices] == list(range(6))
        expected = [(choice.text, choice.logprobs) for answer in alone for choice in answer.choices]
        assert [(choice.text, choice.logprobs) for choice in whole.choices] == expected
        assert whole.usage.prompt_tokens == sum(map(len, texts)) == sum(one.usage.prompt_tokens for one in alone)
        assert whole.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone) == 48
        assert [choice.text for choice in ask(ids).choices] == [text for text, _ in expected]

        streamed = dict.fromkeys(range(6), "")
        ends = dict.fromkeys(range(6), 0)
        *chunks, last = ask(ids, stream=True, stream_options={"include_usage": True})
        for chunk in chunks:
            (choice,) = chunk.choices
            streamed[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason == "length"
        assert list(streamed.values()) == [text for text, _ in expected]
        assert set(ends.values()) == {1}
        assert last.choices == []
        assert last.usage.total_tokens == whole.usage.total_tokens

    def test_without_a_seed_equal_prompts_have_different_answers(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="smol", prompt=["x"] * 3, n=2, temperature=2, max_tokens=20)
        assert len({choice.text for choice in answer.choices}) == 6

    def test_an_error_names_the_prompt_and_its_limit(self, endpoint: Endpoint) -> None:
        def message(prompt: Any, **more: Any) -> str:
            answer = post(endpoint, "/v1/completions", {"prompt": prompt, **more}).json()
            found: str = answer["error"]["message"]
            return found

        assert message(["x", "x" * 600]).startswith("prompt[1] has 600 tokens and 1 tokens to generate; prompt and")
        assert message("x" * 600).startswith("the prompt has 600 tokens")
        assert "65 prompts with 16 answers each are 1040; at most 1024" in message(["x"] * 65, n=16)
        assert "has 1025 entries; at most 1024 fit into one request" in message(["x"] * 1025)

    @pytest.mark.parametrize(
        "asked",
        [
            {"skip_special_tokens": False},
            {"grammar": "root ::= x"},
            {"repeat_penalty": 1.2},
            {"modalities": ["text", "audio"]},
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_options_of_similar_servers_that_would_change_the_answer_are_refused(
        self, endpoint: Endpoint, path: str, asked: dict[str, Any]
    ) -> None:
        body = {"prompt": "x", "messages": MESSAGES, "max_tokens": 1}
        refused = post(endpoint, path, {**body, **asked})

        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "unsupported_option"
        assert refused.json()["error"]["param"] in asked
        harmless = {"ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "skip_special_tokens": True,
                    "grammar": "", "repeat_penalty": 1.0, "modalities": ["text"]}  # fmt: skip
        assert post(endpoint, path, {**body, **harmless}).status_code == 200

    def test_a_remedy_has_its_value_as_json(self, endpoint: Endpoint) -> None:
        answer = post(endpoint, "/v1/chat/completions", {"messages": MESSAGES, "modalities": ["audio"]})

        assert answer.json()["error"]["message"].endswith('Leave it out, or send ["text"]')

    def test_two_forms_of_the_answer_are_refused(self, endpoint: Endpoint) -> None:
        forms = {"guided_regex": "a+", "response_format": {"type": "json_object"}}
        answer = post(endpoint, "/v1/chat/completions", {"messages": MESSAGES, **forms})

        assert answer.status_code == 400
        assert "guided_regex and response_format are two forms" in answer.json()["error"]["message"]
        text = {"guided_regex": "a+", "response_format": {"type": "text"}, "max_tokens": 2}
        assert post(endpoint, "/v1/chat/completions", {"messages": MESSAGES, **text}).status_code == 200

    def test_unknown_tokens_and_options_are_refused(self, endpoint: Endpoint) -> None:
        for body, field in [
            ({"prompt": [1, 999]}, "prompt"),
            ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "x", "suffix": "y"}, "suffix"),
            ({"prompt": "x", "best_of": 2}, "best_of"),
            ({"prompt": [1, "x"]}, "prompt[1]"),
            ({"prompt": ["x", 1]}, "prompt[1]"),
            ({"prompt": ["x", ""]}, "prompt[1]"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[1], []]}, "prompt[1]"),
            ({"prompt": [[1], [2, 999]]}, "prompt[1]"),
            ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
            ({"prompt": "x" * 600}, "prompt"),
            ({"prompt": ["x", "x" * 600]}, "prompt[1]"),
            ({"prompt": ["x"] * 1025}, "prompt"),
            ({"prompt": ["x"] * 65, "n": 16}, "prompt"),
        ]:
            answer = post(endpoint, "/v1/completions", body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == field


def test_an_unknown_field_is_logged_once_with_the_known_one_that_is_spelt_like_it(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"metadata": {"a": "b"}, "store": False, "user": "x", "ignore_eos": False, "max_tokens": 2}
    with caplog.at_level("INFO", logger="penstock.http"):
        for _ in range(2):
            body = {"messages": MESSAGES, **known, "temprature": 1, "num_ctx": 5}
            assert post(endpoint, "/v1/chat/completions", body).status_code == 200
            body = {"prompt": "x", **known, "max_token": 5}
            assert post(endpoint, "/v1/completions", body).status_code == 200
    logged = [one.getMessage() for one in caplog.records if "which is not used" in one.getMessage()]

    assert logged == [
        "requests to /v1/chat/completions have a field 'temprature', which is not used; did you mean 'temperature'?",
        "requests to /v1/chat/completions have a field 'num_ctx', which is not used",
        "requests to /v1/completions have a field 'max_token', which is not used; did you mean 'max_tokens'?",
    ]


def test_names_of_unknown_fields_fill_neither_log_nor_memory(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields("/x", ["known"])
    with caplog.at_level("INFO", logger="penstock.http"):
        for number in range(300):
            fields.look({f"{number}" + "y" * 5000: 1, "known": 2})
    logged = [one.getMessage() for one in caplog.records if "which is not used" in one.getMessage()]

    assert len(logged) == MOST_LOGGED
    assert max(map(len, logged)) < 200


def test_a_model_without_a_template_completes_and_does_not_chat(tmp_path: Path) -> None:
    with serving_generation(small_generation_model(tmp_path, template=None)) as endpoint:
        refused = post(endpoint, "/v1/chat/completions", {"messages": MESSAGES})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "unsupported_option"
        assert post(endpoint, "/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


CALL = {"name": "weather", "arguments": {"city": "Rome"}}


def test_a_call_of_a_tool_is_separated_from_the_text_also_in_a_stream(tmp_path: Path) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    # The model is random: an expression makes it write a call.
    form = {"guided_regex": re.escape(f"Well.<tool_call>{json.dumps(CALL)}</tool_call>")}
    with (
        serving_generation(small_generation_model(tmp_path, template=TOOL_TEMPLATE)) as endpoint,
        openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0) as client,
    ):
        choice = chat(client, tools=tools, extra_body=form, max_tokens=200).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Well."
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == CALL["arguments"]
        deltas = [chunk.choices[0] for chunk in chat(client, tools=tools, extra_body=form, max_tokens=200, stream=True)]
        assert "".join(one.delta.content or "" for one in deltas) == "Well."
        first, *others = [each for one in deltas for each in one.delta.tool_calls or ()]
        assert (first.index, first.function.name) == (0, "weather")
        assert all(one.index == 0 and one.function.name is None for one in others)
        assert "".join(one.function.arguments for one in (first, *others)) == call.function.arguments
        assert deltas[-1].finish_reason == "tool_calls"
        messages: Any = [
            *MESSAGES,
            choice.message.model_dump(),
            {"role": "tool", "content": "sun", "tool_call_id": "1"},
        ]
        again = client.chat.completions.create(model="x", messages=messages, tools=tools, max_tokens=2)
        assert again.choices[0].finish_reason == "length"
        ignored = chat(client, tools=tools, tool_choice="none", extra_body=form, max_tokens=200).choices[0]
        assert ignored.message.tool_calls is None


OSLO = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
OFFERED: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {**OSLO, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "time"}},
]


DEEP_ARGUMENTS = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 950 + "]" * 950}}]}
HALF_A_PAIR = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '"\\ud800"'}}]}


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"messages": [*MESSAGES, HALF_A_PAIR]}, 400),
        ({"messages": [*MESSAGES, DEEP_ARGUMENTS]}, 400),
    ],
    ids=["half a character in arguments", "deep arguments"],
)
def test_what_is_found_after_the_body_was_parsed_is_an_error_of_the_client(
    tools_endpoint: Endpoint, changed: dict[str, Any], status: int
) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 2, **changed})
    answer = httpx.post(f"{tools_endpoint.url}/v1/chat/completions", content=body, timeout=60, verify=False)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    "template", [TOOL_TEMPLATE, "{{ tools | tojson }}{{ messages }}", "{{ tools | tojson }}{{ messages }}[TOOL_CALLS]"]
)
def test_a_required_call_is_a_call_of_an_offered_tool_also_in_a_stream(tmp_path: Path, template: str) -> None:
    with (
        serving_generation(small_generation_model(tmp_path, template=template)) as endpoint,
        openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0) as client,
    ):
        named: Any = {"type": "function", "function": {"name": "weather"}}
        options: Any = {"tools": OFFERED, "tool_choice": named, "max_tokens": 200, "temperature": 2, "seed": 1}
        choice = chat(client, **options).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
        assert (choice.finish_reason, choice.message.content) == ("stop", None)
        deltas = [chunk.choices[0] for chunk in chat(client, **options, stream=True)]
        parts = [each for one in deltas for each in one.delta.tool_calls or ()]
        assert [one.id is not None for one in parts] == [True] + [False] * (len(parts) - 1)
        assert "".join(one.function.arguments for one in parts) == call.function.arguments
        assert deltas[-1].finish_reason == "stop"
        options |= {"tools": OFFERED[:1], "tool_choice": "required", "parallel_tool_calls": False}
        choice = chat(client, **options).choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        half = chat(client, **{**options, "max_tokens": 14}).choices[0]
        assert (half.finish_reason, half.message.content, half.message.tool_calls) == ("length", "", None)
        cut = chat(client, **{**options, "max_tokens": 60 if template is TOOL_TEMPLATE else 45}).choices[0]
        assert (cut.finish_reason, cut.message.tool_calls[0].function.arguments[:2]) == ("length", '{"')


@pytest.mark.parametrize(
    ("choice", "status", "field"),
    [
        ({"type": "function", "function": {"name": "other"}}, 400, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {}}, 400, "tool_choice.type"),
        ("any", 400, "tool_choice"),
    ],
)
def test_a_choice_of_a_tool_that_is_not_offered_is_refused(
    tools_endpoint: Endpoint, choice: Any, status: int, field: str
) -> None:
    body = {"messages": MESSAGES, "tools": OFFERED, "tool_choice": choice}
    answer = post(tools_endpoint, "/v1/chat/completions", body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == field


def test_parameters_of_a_required_tool_have_to_be_a_schema(tools_endpoint: Endpoint) -> None:
    for parameters in ([1], {"properties": {"a": {"type": "nonsense"}}}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
        answer = post(tools_endpoint, "/v1/chat/completions", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"


def gated(path: Path, **sizes: int) -> tuple[Any, PagedEngine]:
    engine = small_engine(**sizes)
    engine.gate = threading.Semaphore(0)
    return small_generation_model(path, engine, template=TEMPLATE), engine


def release(engine: PagedEngine, steps: int) -> None:
    assert engine.gate is not None
    for _ in range(steps):
        engine.gate.release()


def test_a_client_that_goes_away_takes_part_in_no_further_step(tmp_path: Path) -> None:
    model, engine = gated(tmp_path)
    with serving_generation(model) as endpoint:
        body = {"messages": MESSAGES, "stream": True, "logit_bias": {"257": -100}}
        release(engine, 3)
        with (
            httpx.Client(verify=False, timeout=60) as client,
            client.stream("POST", f"{endpoint.url}/v1/chat/completions", json=body) as stream,
        ):
            assert next(stream.iter_lines()).startswith("data: ")
        until(lambda: endpoint.server.metrics.in_flight == 0)
        before = len(engine.steps)
        release(engine, 50)
        until(lambda: endpoint.model.facts()["sequences"]["running"] == 0)
        assert len(engine.steps) - before <= 2
        assert endpoint.server.metrics.requests["/v1/chat/completions", 499] == 1


def test_of_tokens_with_the_same_text_the_most_probable_one_is_reported(tmp_path: Path) -> None:
    model = small_generation_model(tmp_path)
    parts = [model.tokenizer.backend.token_to_id(name) for name in ("\u0122", "\u0123")]  # bytes inside of a character
    token = SampledToken(parts[0], -0.5, ((parts[0], -0.5), (parts[1], -3.0)))

    choice = CompletionAnswer(model, with_logprobs=True)._choice(Continuation(0), "", [token], None)

    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]


def test_a_stream_that_a_defect_cuts_off_counts_as_500(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: AnswerStream) -> list[bytes]:
        raise RuntimeError("a defect")

    monkeypatch.setattr(AnswerStream, "last", fail)
    with serving_generation(small_generation_model(tmp_path, template=TEMPLATE)) as endpoint:
        body = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            post(endpoint, "/v1/chat/completions", body)
        until(lambda: endpoint.server.metrics.in_flight == 0)
        assert endpoint.server.metrics.requests == {("/v1/chat/completions", 500): 1}


def test_too_many_waiting_requests_are_refused_with_a_time_to_retry(tmp_path: Path) -> None:
    model, engine = gated(tmp_path)
    with serving_generation(model, max_queue_rows=1, max_rows=1) as endpoint:
        answers: list[httpx.Response] = []
        body = {"messages": MESSAGES, "max_tokens": 2}
        first = threading.Thread(target=lambda: answers.append(post(endpoint, "/v1/chat/completions", body)))
        first.start()
        until(lambda: endpoint.model.queue_depth()[0] == 1)
        refused = post(endpoint, "/v1/chat/completions", body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        release(engine, 10)
        first.join(60)
        assert answers[0].status_code == 200


def test_prompts_of_one_request_count_as_rows_of_the_queue_and_have_its_deadline(tmp_path: Path) -> None:
    model, engine = gated(tmp_path)
    with serving_generation(model, max_queue_rows=4, max_rows=4, max_sequences=1) as endpoint:
        answers: list[httpx.Response] = []
        body = {"prompt": ["a", "b", "c"], "max_tokens": 4, "logit_bias": {"257": -100}}

        def ask() -> None:
            answers.append(post(endpoint, "/v1/completions", body, **{"x-deadline-ms": "1000"}))

        first = threading.Thread(target=ask)
        first.start()
        until(lambda: endpoint.model.queue_depth() == (3, 3))
        assert post(endpoint, "/v1/completions", {**body, "prompt": ["d", "e"]}).status_code == 429
        release(engine, 1)
        until(lambda: endpoint.model.queue_depth() == (2, 2))
        # One sequence runs at a time: the last prompt starts long after the deadline of the request.
        threading.Event().wait(1.1)
        release(engine, 20)
        first.join(60)
        assert [len(choice["text"]) > 0 for choice in answers[0].json()["choices"]] == [True] * 3
        assert endpoint.model.queue_depth() == (0, 0)


def test_a_request_that_does_not_start_by_its_deadline_is_dropped(tmp_path: Path) -> None:
    model, engine = gated(tmp_path)
    with serving_generation(model, max_sequences=1) as endpoint:
        answers: dict[str, httpx.Response] = {}

        def ask(name: str, **headers: str) -> None:
            body = {"messages": MESSAGES, "max_tokens": 4}
            answers[name] = post(endpoint, "/v1/chat/completions", body, **headers)

        threads = [threading.Thread(target=ask, args=("first",))]
        threads[0].start()
        until(lambda: endpoint.model.queue_depth()[0] == 1)
        threads.append(threading.Thread(target=ask, args=("late",), kwargs={"x-deadline-ms": "1"}))
        threads[1].start()
        until(lambda: endpoint.model.queue_depth()[0] == 2)
        release(engine, 20)
        for thread in threads:
            thread.join(60)
        assert answers["first"].status_code == 200
        assert answers["late"].status_code == 504


def test_an_engine_that_fails_answers_500_and_the_next_request_runs(tmp_path: Path) -> None:
    model = small_generation_model(tmp_path)
    engine = model.engine
    assert isinstance(engine, PagedEngine)
    with serving_generation(model) as endpoint:
        engine.fail = RuntimeError("no memory")
        failed = post(endpoint, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
        assert failed.status_code == 500
        engine.fail = None
        assert post(endpoint, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}).status_code == 200


def test_a_drain_finishes_streams(tmp_path: Path) -> None:
    model, engine = gated(tmp_path)
    with serving_generation(model) as endpoint:
        body = {"messages": MESSAGES, "stream": True, "max_tokens": 20, "logit_bias": {"257": -100}}
        release(engine, 2)
        with (
            httpx.Client(verify=False, timeout=60) as client,
            client.stream("POST", f"{endpoint.url}/v1/chat/completions", json=body) as stream,
        ):
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            endpoint.stop()
            release(engine, 100)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        endpoint.thread.join(60)
        assert endpoint.cut == [0]
        assert engine.closed


def test_the_limit_of_a_drain_ends_streams_with_a_reason(tmp_path: Path) -> None:
    model, engine = gated(tmp_path)
    is_over = threading.Event()

    def release_slowly() -> None:
        # The context is full after 480 steps, long after the limit.
        while not is_over.wait(0.02):
            release(engine, 1)

    thread = threading.Thread(target=release_slowly)
    thread.start()
    try:
        with serving_generation(model, drain_limit_seconds=2.0) as endpoint:
            body = {"messages": MESSAGES, "stream": True, "logit_bias": {"257": -100}}
            with (
                httpx.Client(verify=False, timeout=60) as client,
                client.stream("POST", f"{endpoint.url}/v1/chat/completions", json=body) as stream,
            ):
                lines = stream.iter_lines()
                assert next(lines).startswith("data: ")
                endpoint.stop()
                rest = [line for line in lines if line]
            endpoint.thread.join(60)
    finally:
        is_over.set()
        thread.join(60)
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "not_ready"
    assert rest[-1] == "data: [DONE]"
    assert endpoint.cut == [0]


def test_a_request_is_admitted_before_its_grammar_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    prepare = Grammars.prepare

    async def recorded(grammars: Grammars, text: GrammarText, client: str) -> Grammar:
        prepared.append(client)
        return await prepare(grammars, text, client)

    monkeypatch.setattr(Grammars, "prepare", recorded)
    engine = small_engine()
    engine.gate = threading.Semaphore(0)
    body = {"prompt": "Hello", "max_tokens": 4, "guided_regex": "[a-z]+"}
    with serving_generation(small_generation_model(tmp_path, engine), max_rows=1, max_queue_rows=1) as endpoint:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(post, endpoint, "/v1/completions", body)
            until(lambda: len(prepared) == 1)
            refused = post(endpoint, "/v1/completions", body)
            engine.gate.release(1000)
        assert first.result().status_code == 200
        assert post(endpoint, "/v1/completions", body).status_code == 200

    assert refused.status_code == 429
    assert len(prepared) == 2
