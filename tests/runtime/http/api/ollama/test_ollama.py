"""Ollama's API, as desktop clients use it. The real client's calls are replayed by `tests/clients`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock import __version__
from penstock.tasks import TaskName
from tests.runtime.generation.small_model import TOOL_TEMPLATE, serving_generation, small_generation_model
from tests.runtime.http.serving import Endpoint

EndpointOf = Callable[[TaskName], Endpoint]
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
OPTIONS: Any = {"temperature": 0, "num_predict": 12, "num_ctx": 4096}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with serving_generation(small_generation_model(tmp_path_factory.mktemp("model"))) as running:
        yield running


def ask(endpoint: Endpoint, path: str, **body: Any) -> httpx.Response:
    body = {"model": "smol", **({"options": OPTIONS} if path in {"/api/chat", "/api/generate"} else {}), **body}
    return httpx.post(f"{endpoint.url}{path}", json=body, timeout=60)


def chat_text(endpoint: Endpoint, **body: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, **body}
    answer = httpx.post(f"{endpoint.url}/v1/chat/completions", json=body, timeout=60)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_chat_has_the_text_of_openais_route_also_in_lines(endpoint: Endpoint) -> None:
    expected = chat_text(endpoint)
    whole = ask(endpoint, "/api/chat", messages=MESSAGES, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": expected}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("smol", True, "length")
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (len("|user\nHello|\n|assistant\n"), 12)
    assert whole["total_duration"] >= whole["eval_duration"] > 0
    answer = ask(endpoint, "/api/chat", messages=MESSAGES, model="smol:latest")
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == expected
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["eval_count"] == 12


def test_a_prompt_is_a_message_unless_it_is_raw(endpoint: Endpoint) -> None:
    system = [{"role": "system", "content": "Be kind"}]
    answer = ask(endpoint, "/api/generate", prompt="Hello", system="Be kind", stream=False).json()
    assert answer["response"] == chat_text(endpoint, messages=[*system, *MESSAGES])
    lines = ask(endpoint, "/api/generate", prompt="Hello", system="Be kind").text.splitlines()
    assert "".join(json.loads(line)["response"] for line in lines) == answer["response"]
    raw = ask(endpoint, "/api/generate", prompt="Once", raw=True, stream=False).json()
    assert raw["prompt_eval_count"] == 4


def test_options_have_their_effect(endpoint: Endpoint) -> None:
    def text(**options: Any) -> Any:
        return ask(endpoint, "/api/chat", messages=MESSAGES, stream=False, options={**OPTIONS, **options}).json()

    seeded = {"temperature": 1.5, "seed": 3, "top_k": 40, "top_p": 0.9}
    assert text(**seeded)["message"] == text(**seeded)["message"] != text(**{**seeded, "seed": 4})["message"]
    expected = chat_text(endpoint, temperature=1.5, seed=3, top_k=40, top_p=0.9)
    assert text(**seeded)["message"]["content"] == expected
    penalty = chat_text(endpoint, repetition_penalty=1.9)
    assert text(repeat_penalty=1.9)["message"]["content"] == penalty != chat_text(endpoint)
    assert text(num_predict=3)["eval_count"] == 3
    assert text(num_predict=-1)["eval_count"] > 12
    assert text(stop=[expected[:1]], **seeded)["message"]["content"] == ""


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}])
def test_an_answer_is_json_where_that_is_wanted(endpoint: Endpoint, form: Any) -> None:
    if isinstance(form, dict):
        form = {**form, "additionalProperties": False}
    answer = ask(endpoint, "/api/chat", messages=MESSAGES, format=form, stream=False).json()
    content = answer["message"]["content"]
    assert content == '{"a": 1}' if isinstance(form, dict) else content.startswith("{")


def test_probabilities_are_those_of_the_tokens(endpoint: Endpoint) -> None:
    answer = ask(endpoint, "/api/generate", prompt="Hello", stream=False, logprobs=True, top_logprobs=2).json()
    assert [len(one["top_logprobs"]) for one in answer["logprobs"]] == [2] * 12
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in answer["logprobs"])


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_come_whole(tmp_path: Path, stream: bool) -> None:
    template = "{{ tools | tojson }}{{ messages }}"  # in the form of Llama 3: the answer is the call
    values = {"name": {"enum": ["weather"]}, "arguments": {"enum": [CALL["arguments"]]}}
    form = {"type": "object", "properties": values, "required": ["name", "arguments"], "additionalProperties": False}
    with serving_generation(small_generation_model(tmp_path, template=template)) as running:
        body: Any = {"messages": MESSAGES, "tools": [TOOL], "format": form, "options": {"temperature": 0}}
        lines = ask(running, "/api/chat", stream=stream, **body).text.splitlines()
        messages = [json.loads(line)["message"] for line in lines]
        assert "".join(one["content"] for one in messages) == ""
        assert [one["tool_calls"] for one in messages if "tool_calls" in one] == [[{"function": CALL}]]
        body["options"] = {"temperature": 0, "num_predict": 30}
        cut = [json.loads(line) for line in ask(running, "/api/chat", stream=stream, **body).text.splitlines()]
        assert all(one["message"] == {"role": "assistant", "content": ""} for one in cut)
        assert cut[-1]["done_reason"] == "length"


def test_a_call_and_its_result_are_part_of_the_conversation(tmp_path: Path) -> None:
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
        {"role": "tool", "content": "sun", "tool_name": "weather"},
    ]
    with serving_generation(small_generation_model(tmp_path, template=TOOL_TEMPLATE)) as running:
        answer = ask(running, "/api/chat", messages=messages, options={"num_predict": 2}, stream=False).json()
    assert answer["prompt_eval_count"] == len('user: Helloassistant: {"city": "Oslo"}tool: sun')


def test_a_request_without_a_prompt_finds_the_model_loaded(endpoint: Endpoint) -> None:
    bodies: dict[str, dict[str, Any]] = {"/api/generate": {}, "/api/chat": {"messages": []}}
    for path, body in bodies.items():
        answer = ask(endpoint, path, **body).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")


def test_vectors_are_those_of_openais_route(endpoint_of: EndpointOf) -> None:
    vectors = endpoint_of(TaskName.FEATURE_EXTRACTION)
    texts = ["i like you", "a text"]
    expected = httpx.post(f"{vectors.url}/v1/embeddings", json={"input": texts}).json()["data"]
    answer = ask(vectors, "/api/embed", model="emotion", input=texts).json()
    np.testing.assert_allclose(answer["embeddings"], [one["embedding"] for one in expected], atol=1e-6)
    assert answer["prompt_eval_count"] > 0
    one = ask(vectors, "/api/embeddings", model="emotion", prompt=texts[1]).json()["embedding"]
    np.testing.assert_allclose(one, answer["embeddings"][1], atol=1e-6)
    assert ask(vectors, "/api/embed", model="emotion", input="").json()["embeddings"] == []
    assert len(ask(vectors, "/api/embed", model="emotion", input="a", dimensions=4).json()["embeddings"][0]) == 4


def test_models_are_shown(endpoint: Endpoint, endpoint_of: EndpointOf) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = httpx.get(f"{endpoint.url}{path}").json()["models"]
        assert (model["name"], model["model"]) == ("smol", "smol")
    shown = ask(endpoint, "/api/show").json()
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"]["penstock.context_length"] == 512
    assert shown["template"]
    vectors = endpoint_of(TaskName.FEATURE_EXTRACTION)
    assert ask(vectors, "/api/show", model="emotion").json()["capabilities"] == ["embedding"]
    assert httpx.get(f"{endpoint.url}/api/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "llama3", "messages": MESSAGES}, 404, "there is no model 'llama3'"),
        ("/api/show", {"model": "llama3"}, 404, "there is no model 'llama3'"),
        ("/api/chat", {"messages": MESSAGES, "think": True}, 400, "think is not supported"),
        ("/api/chat", {"messages": MESSAGES, "tools": [TOOL]}, 400, "does not know tools"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, 400, "has images"),
        ("/api/chat", {"messages": MESSAGES, "options": {"mirostat": 2}}, 400, "mirostat is not supported"),
        ("/api/chat", {"messages": MESSAGES, "options": {"temperature": -1}}, 422, "options.temperature"),
        ("/api/chat", {"messages": MESSAGES, "format": {"type": "nonsense"}}, 422, "format cannot be followed"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "context is not supported"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template is not supported"),
    ],
)
def test_what_cannot_be_done_is_named(
    endpoint: Endpoint, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = ask(endpoint, path, **body)
    assert answer.status_code == status
    assert words in answer.json()["error"]
