"""Clients of Anthropic and Ollama, as coding agents and desktop programs use them, run by `calls.py`."""

from __future__ import annotations

from typing import Any

GENERATION, VECTORS = "text-generation", "feature-extraction"
MESSAGES: Any = [{"role": "user", "content": "i like you"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["paris", "berkeley"]}},
    "required": ["city"],
    "additionalProperties": False,
}
GREEDY: Any = {"temperature": 0}
"""Newer versions of the package have no such parameter."""
ABOUT = "The weather in a city"


def anthropic() -> list[Any]:
    from anthropic import Anthropic

    def create(url: str, *, messages: Any = MESSAGES, tokens: int = 8, **more: Any) -> Any:
        # As coding agents do, with the key as a bearer token.
        with Anthropic(base_url=url, auth_token="any", max_retries=0) as client:
            return client.messages.create(model="emotion", max_tokens=tokens, messages=messages, **more)

    def streamed(url: str) -> str:
        with (
            Anthropic(base_url=url, auth_token="any", max_retries=0) as client,
            client.messages.stream(model="emotion", max_tokens=8, messages=MESSAGES, extra_body=GREEDY) as stream,
        ):
            text = "".join(stream.text_stream)
            assert stream.get_final_message().content[0].text == text
            return text

    def called(url: str, *, stream: bool) -> Any:
        tools: Any = [{"name": "weather", "description": ABOUT, "input_schema": SCHEMA}]
        options: Any = {"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}, "extra_body": GREEDY}
        if not stream:
            (block,) = create(url, tokens=200, **options).content
            return {**block.input, "name": block.name}
        with (
            Anthropic(base_url=url, auth_token="any", max_retries=0) as client,
            client.messages.stream(model="emotion", max_tokens=200, messages=MESSAGES, **options) as found,
        ):
            (block,) = found.get_final_message().content
            return {**block.input, "name": block.name}

    def conversation(url: str) -> Any:
        used = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "paris"}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]}
        messages = [*MESSAGES, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
        return create(
            url, messages=messages, tools=tools, extra_body=GREEDY, system=[{"type": "text", "text": "Be kind"}]
        ).usage.output_tokens

    def counted(url: str) -> int:
        with Anthropic(base_url=url, auth_token="any", max_retries=0) as client:
            found: int = client.messages.count_tokens(model="emotion", messages=MESSAGES, system="Be kind").input_tokens
            return found

    return [
        ("anthropic", "messages.create", GENERATION, lambda url: create(url, extra_body=GREEDY).content[0].text),
        ("anthropic", "messages.stream", GENERATION, streamed),
        ("anthropic", "tool_choice", GENERATION, lambda url: called(url, stream=False)),
        ("anthropic", "tool_choice, stream", GENERATION, lambda url: called(url, stream=True)),
        ("anthropic", "tool_result", GENERATION, conversation),
        ("anthropic", "messages.count_tokens", GENERATION, counted),
    ]


def ollama() -> list[Any]:
    from ollama import Client

    greedy: Any = {"temperature": 0, "num_predict": 8}
    longer: Any = {"temperature": 0, "num_predict": 200}

    def chat(url: str, **more: Any) -> Any:
        return Client(host=url).chat("emotion", MESSAGES, **{"options": greedy, **more})

    def with_tools(url: str) -> Any:
        tool = {"type": "function", "function": {"name": "weather", "description": ABOUT, "parameters": SCHEMA}}
        return chat(url, tools=[tool]).done_reason

    def generated(url: str, **more: Any) -> Any:
        return Client(host=url).generate("emotion:latest", "i like you", options=greedy, **more)

    return [
        ("ollama", "chat", GENERATION, lambda url: chat(url).message.content),
        (
            "ollama",
            "chat, stream",
            GENERATION,
            lambda url: "".join(one.message.content for one in chat(url, stream=True)),
        ),
        ("ollama", "chat, format", GENERATION, lambda url: chat(url, format=SCHEMA, options=longer).message.content),
        ("ollama", "chat, tools", GENERATION, with_tools),
        ("ollama", "generate", GENERATION, lambda url: generated(url).response),
        (
            "ollama",
            "generate, stream",
            GENERATION,
            lambda url: "".join(one.response for one in generated(url, stream=True)),
        ),
        ("ollama", "list", GENERATION, lambda url: [one.model for one in Client(host=url).list().models]),
        ("ollama", "ps", GENERATION, lambda url: [one.model for one in Client(host=url).ps().models]),
        ("ollama", "show", GENERATION, lambda url: Client(host=url).show("emotion").capabilities),
        (
            "ollama",
            "embed",
            VECTORS,
            lambda url: Client(host=url).embed("emotion", ["i like you", "a text"]).embeddings,
        ),
        ("ollama", "embeddings", VECTORS, lambda url: Client(host=url).embeddings("emotion", "i like you").embedding),
    ]


CLIENTS = (anthropic, ollama)
