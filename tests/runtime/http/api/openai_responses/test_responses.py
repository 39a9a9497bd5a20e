"""`/v1/responses`, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from penstock_runtime.generation.grammar import regular_expression
from penstock_runtime.generation.templates import ChatTemplate
from penstock_runtime.http.api.openai_responses.requests import BODY, messages_of
from tests.runtime.generation.small_model import TOOL_TEMPLATE, serving_generation, small_generation_model
from tests.runtime.http.api.openai.test_openai_text import CALL, post
from tests.runtime.http.serving import Endpoint

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Colour(pydantic.BaseModel):
    """A form of an answer."""

    name: Literal["red", "green"]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    model = small_generation_model(tmp_path_factory.mktemp("model"), template=TOOL_TEMPLATE)
    with serving_generation(model) as running:
        yield running


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.responses.create(**{"model": "smol", "input": "Hello", "max_output_tokens": 12, **options})


def test_an_answer_has_text_status_and_usage(client: openai.OpenAI) -> None:
    answer = create(client, temperature=0, instructions="Be kind.", metadata={"a": "b"})
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert answer.output_text == item.content[0].text != ""
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == len("system: Be kind.user: Hello")
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be kind.", {"a": "b"}, 0)
    assert (answer.store, answer.previous_response_id, answer.error) == (False, None, None)


def test_an_answer_that_the_model_ends_is_complete(client: openai.OpenAI) -> None:
    done = create(client, text={"format": {"type": "json_schema", "name": "x", "schema": {"const": 7}}})
    assert (done.status, done.output_text, done.output[0].status) == ("completed", "7", "completed")
    assert done.text.format.type == "json_schema"


def test_a_stream_has_the_typed_events_in_order_and_the_text_of_the_answer(client: openai.OpenAI) -> None:
    whole = create(client, temperature=0)
    events = list(create(client, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1].response
    assert last.output_text == text
    assert last.usage.output_tokens == 12
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}


def test_the_async_client_and_the_clients_own_accumulation_agree(endpoint: Endpoint, client: openai.OpenAI) -> None:
    async def run() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0) as other:
            answer = await other.responses.create(model="x", input="Hello", max_output_tokens=12, temperature=0)
            stream = await other.responses.create(
                model="x", input="Hello", max_output_tokens=12, temperature=0, stream=True
            )
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return answer.output_text, "".join(texts)

    expected = create(client, temperature=0).output_text
    assert asyncio.run(run()) == (expected, expected)
    with client.responses.stream(
        model="x", input="Pick", text_format=Colour, extra_body={"seed": 3}, max_output_tokens=100
    ) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_parsed is not None
    assert final.output_parsed.name in {"red", "green"}
    assert final.output_text == snapshots[-1]
    parsed = client.responses.parse(
        model="x", input="Pick", text_format=Colour, extra_body={"seed": 3}, max_output_tokens=100
    )
    assert parsed.output_parsed == final.output_parsed


def test_probabilities_come_with_each_token_also_in_a_stream(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    whole = create(client, temperature=0, include=include, top_logprobs=2).output[0].content[0].logprobs
    assert len(whole) == 12
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in whole)
    events = list(create(client, temperature=0, include=include, top_logprobs=2, stream=True))
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.logprob for one in streamed] == [one.logprob for one in whole]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_required_call_is_an_item_also_in_a_stream(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {
        "tools": [{"type": "function", "name": "weather", "parameters": WEATHER["parameters"]}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
        "extra_body": {"seed": 4},
    }
    answer = create(client, **options)
    (item,) = answer.output
    assert (item.type, item.name, item.status) == ("function_call", "weather", "completed")
    assert json.loads(item.arguments)["city"] in {"Rome", "Oslo"}
    assert answer.status == "completed"
    with client.responses.stream(model="x", input="Hello", **options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas
    call: Any = final.output[0]
    assert "".join(deltas) == call.arguments == item.arguments
    again: Any = [
        {"role": "user", "content": "Hello"},
        *[one.model_dump(exclude_none=True) for one in answer.output],
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"},
    ]
    assert create(client, input=again, tools=options["tools"]).usage.output_tokens == 12


def test_text_before_a_call_is_an_item_of_its_own(tmp_path: Path) -> None:
    # The model is random: an expression in place of the schema makes it write a call.
    text = f"Well.<tool_call>{json.dumps(CALL)}</tool_call>"
    with (
        serving_generation(small_generation_model(tmp_path, template=TOOL_TEMPLATE)) as endpoint,
        openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="x", max_retries=0) as client,
    ):
        grammars = endpoint.model.model.grammars
        prepare, expression = grammars.prepare, regular_expression(re.escape(text), "x")
        grammars.prepare = lambda _text, client: prepare(expression, client)
        form: Any = {"format": {"type": "json_object"}}
        events = list(create(client, tools=[WEATHER], text=form, max_output_tokens=200, stream=True))
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in items] == ["message", "function_call"]
    assert items[0].content[0].text == "Well."
    assert (items[1].name, json.loads(items[1].arguments)) == ("weather", CALL["arguments"])
    assert [event.item.type for event in events if event.type == "response.output_item.added"] == [
        "message",
        "function_call",
    ]
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]


def test_input_items_are_the_messages_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}', "id": "fc_1"}
    given = [
        {"role": "developer", "content": "Short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        call,
        {**call, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "sun"},
    ]
    function = {"name": "f", "arguments": {"a": 1}}
    messages = messages_of(BODY.parse({"input": given, "instructions": "Kind."}, "body"))
    assert messages == [
        {"role": "system", "content": "Kind."},
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Well.",
            "tool_calls": [
                {"id": "c", "type": "function", "function": function},
                {"id": "d", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "c", "name": "f"},
    ]
    assert ChatTemplate(TOOL_TEMPLATE).render(messages).endswith("tool: sun")


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": "x" * 600}, 400, "input"),
        ({"input": [{"content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"role": "user"}]}, 400, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"type": "reasoning"}]}, 400, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, 400, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"background": True}, 400, "background"),
        ({"store": True}, 400, "store"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"reasoning": {"effort": "high"}}, 400, "reasoning"),
        ({"include": ["reasoning.encrypted_content"]}, 400, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, 400, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, 400, "tool_choice"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, 400, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"surprise": 1}, 400, "surprise"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(
    endpoint: Endpoint, body: dict[str, Any], status: int, field: str, stream: bool
) -> None:
    whole = {"input": "x", **body} if body else body
    answer = post(endpoint, "/v1/responses", {**whole, "stream": stream})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == field


def test_fields_that_change_nothing_are_accepted(endpoint: Endpoint) -> None:
    body = {
        "input": "x",
        "max_output_tokens": 1,
        "store": False,
        "background": False,
        "truncation": "disabled",
        "reasoning": {},
        "service_tier": "auto",
        "user": "me",
        "prompt_cache_key": "k",
        "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    answer = post(endpoint, "/v1/responses", body)
    assert answer.status_code == 200, answer.text
