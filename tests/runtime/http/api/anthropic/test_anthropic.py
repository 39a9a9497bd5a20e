"""`/v1/messages`, as coding agents use it. The real client's calls are replayed by `tests/clients`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.generation.small_model import TOOL_TEMPLATE, serving_generation, small_generation_model
from tests.runtime.http.serving import Endpoint

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "description": "d", "input_schema": SCHEMA}, {"name": "time", "input_schema": {}}]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with serving_generation(small_generation_model(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture(scope="module")
def tools_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    path = tmp_path_factory.mktemp("model")
    with serving_generation(small_generation_model(path, template=TOOL_TEMPLATE)) as running:
        yield running


def ask(endpoint: Endpoint, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    body = {"model": "claude-any", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **body}
    return httpx.post(f"{endpoint.url}{path}", json=body, timeout=60)


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, whose names are their types."""
    found = []
    for piece in answer.text.strip().split("\n\n"):
        name, data = piece.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def content_of(stream: list[Any]) -> list[Any]:
    """The blocks of the events."""
    blocks: list[Any] = []
    for one in stream:
        if one["type"] == "content_block_start":
            blocks.append({**one["content_block"], "json": ""})
        elif one["type"] == "content_block_delta" and one["delta"]["type"] == "text_delta":
            blocks[one["index"]]["text"] += one["delta"]["text"]
        elif one["type"] == "content_block_delta":
            blocks[one["index"]]["json"] += one["delta"]["partial_json"]
    for block in blocks:
        arguments = block.pop("json")
        if arguments:
            block["input"] = json.loads(arguments)
    return blocks


def test_an_answer_is_that_of_openais_route_also_as_events(endpoint: Endpoint) -> None:
    body = {"messages": [{"role": "system", "content": "Be kind"}, *MESSAGES], "max_tokens": 12, "temperature": 0}
    expected = httpx.post(f"{endpoint.url}/v1/chat/completions", json=body, timeout=60).json()
    message = ask(endpoint, system=[{"type": "text", "text": "Be kind"}]).json()
    assert message["content"] == [{"type": "text", "text": expected["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "max_tokens")
    usage = message["usage"]
    assert usage["output_tokens"] == 12
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected["usage"]["prompt_tokens"]
    stream = events(ask(endpoint, system="Be kind", stream=True))
    assert [stream[0]["type"], stream[-1]["type"]] == ["message_start", "message_stop"]
    assert stream[0]["message"]["content"] == []
    assert content_of(stream) == message["content"]
    assert stream[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert stream[-2]["usage"]["output_tokens"] == 12


def test_the_tokens_of_a_conversation_are_counted(endpoint: Endpoint) -> None:
    usage = ask(endpoint, system="Be kind").json()["usage"]
    counted = ask(endpoint, "/v1/messages/count_tokens", system="Be kind").json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_an_answer_ends_at_a_stop_sequence_and_names_it(endpoint: Endpoint) -> None:
    (block,) = ask(endpoint).json()["content"]
    stop = block["text"][3]
    message = ask(endpoint, stop_sequences=["never", stop]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"] == ([{"type": "text", "text": text}] if (text := block["text"].split(stop)[0]) else [])


def test_the_assistants_last_message_is_continued(endpoint: Endpoint) -> None:
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nOnce"
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    expected = httpx.post(f"{endpoint.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    message = ask(endpoint, messages=[*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}])
    assert message.json()["content"] == [{"type": "text", "text": expected}]


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "weather"}, {"type": "any"}])
def test_a_tool_is_called_also_as_events(tools_endpoint: Endpoint, choice: Any) -> None:
    tools = TOOLS if choice["type"] == "tool" else TOOLS[:1]
    options: Any = {"tools": tools, "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 200}
    message = ask(tools_endpoint, **options).json()
    (block,) = message["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    assert re.fullmatch(r"toolu_[\w-]+", block["id"])
    assert message["stop_reason"] == "tool_use"
    stream = events(ask(tools_endpoint, stream=True, **options))
    (other,) = content_of(stream)
    assert {**other, "id": block["id"]} == block
    assert stream[-2]["delta"]["stop_reason"] == "tool_use"
    cut = ask(tools_endpoint, **{**options, "max_tokens": 60}).json()
    assert (cut["content"], cut["stop_reason"]) == ([], "max_tokens")


def test_a_call_and_its_result_are_part_of_the_conversation(tools_endpoint: Endpoint) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun", "is_error": False}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Well."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    counted = ask(tools_endpoint, "/v1/messages/count_tokens", messages=messages).json()["input_tokens"]
    call = '{"city": "Oslo"}'
    assert counted == len(f"user: Helloassistant: Well.{call}tool: sunuser: And now?")


def test_an_answer_has_the_form_of_a_schema(endpoint: Endpoint) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = ask(endpoint, output_config=form, max_tokens=100).json()
    assert message["content"] == [{"type": "text", "text": '{"city": "Oslo"}'}]
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens must be a whole number"),
        ({"messages": []}, "messages is empty"),
        ({"temperature": 2}, "temperature must be a number from 0 to 1"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs at"),
        ({"tools": TOOLS}, "does not know tools"),
        ({"max_tokens": 600}, "may have 512 together"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "no earlier tool_use",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_form(endpoint: Endpoint, body: dict[str, Any], words: str, stream: bool) -> None:
    answer = ask(endpoint, stream=stream, **body)
    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


def test_harmless_fields_are_taken(endpoint: Endpoint) -> None:
    harmless: dict[str, Any] = {
        "metadata": {"user_id": "x"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "tools": [],
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "output_config": {"effort": "low"},
    }  # fmt: skip
    assert ask(endpoint, **harmless).status_code == 200
    assert ask(endpoint, "/v1/messages?beta=true").status_code == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/messages", {}, 401),
        ("/v1/messages", {"x-api-key": "wrong"}, 401),
        ("/v1/messages", {"x-api-key": "any", "authorization": "Bearer wrong"}, 401),
        ("/v1/messages", {"x-api-key": "any", "authorization": ""}, 401),
        ("/v1/messages", {"x-api-key": "wrong", "authorization": "Bearer any"}, 200),
        ("/v1/messages", {"x-api-key": "any"}, 200),
        ("/v1/chat/completions", {"x-api-key": "any"}, 401),
    ],
)
def test_a_key_may_be_in_the_header_of_anthropics_clients(
    tmp_path: Path, path: str, headers: dict[str, str], status: int
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "alice").write_text("any\n")
    body = {"model": "x", "messages": MESSAGES, "max_tokens": 2}
    with serving_generation(small_generation_model(tmp_path / "m"), auth_token_folder=tmp_path / "keys") as running:
        answer = httpx.post(f"{running.url}{path}", json=body, headers=headers, timeout=60)

    assert answer.status_code == status
    if status == 401 and path == "/v1/messages" and not headers:
        assert answer.json()["error"] == {
            "type": "authentication_error",
            "message": "this endpoint wants a token. Send the header authorization: Bearer <token> or x-api-key: "
            "<token>",
        }
