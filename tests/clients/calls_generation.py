"""Frameworks over text generation and components of Hugging Face's API, run by `calls.py`.

The model writes random tokens. Where a grammar limits them, the answers are `PARAMETERS` with one of the cities.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

CITIES = Literal["paris", "berkeley"]
GENERATION, VECTORS, RANKING = "text-generation", "feature-extraction", "text-ranking"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["paris", "berkeley"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "weather", "description": "The weather in a city", "parameters": PARAMETERS}
TEXT = "i like you"


def weather_model() -> Any:
    """A class for answers. A random model would add properties for ever if it were allowed to."""
    from pydantic import BaseModel, ConfigDict

    class Weather(BaseModel):
        """The weather in a city"""

        model_config = ConfigDict(extra="forbid")
        city: CITIES

    return Weather


def pydantic_ai() -> list[Any]:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    weather_class = weather_model()

    def agent(url: str, kind: Any = OpenAIChatModel, *, tokens: int = 8, **more: Any) -> Any:
        model = kind("emotion", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any"))
        return Agent(model, model_settings={"max_tokens": tokens, "temperature": 0}, retries=0, **more)

    async def streamed(url: str) -> str:
        async with agent(url).run_stream(TEXT) as found:
            return "".join([one async for one in found.stream_text(delta=True, debounce_by=None)])

    def cities(url: str, output: Any) -> Any:
        return agent(url, tokens=200, output_type=output).run_sync("where ?").output.city

    return [
        ("pydantic-ai-slim", "Agent.run_sync", GENERATION, lambda url: agent(url).run_sync(TEXT).output),
        ("pydantic-ai-slim", "Agent.run_stream", GENERATION, lambda url: asyncio.run(streamed(url))),
        ("pydantic-ai-slim", "output_type, by a tool", GENERATION, lambda url: cities(url, weather_class)),
        (
            "pydantic-ai-slim", "NativeOutput, json_schema", GENERATION,
            lambda url: cities(url, NativeOutput(weather_class)),
        ),
        (
            "pydantic-ai-slim", "OpenAIResponsesModel", GENERATION,
            lambda url: agent(url, OpenAIResponsesModel, tokens=16).run_sync(TEXT).output,
        ),
    ]  # fmt: skip


def openai_agents() -> list[Any]:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        RunConfig,
        Runner,
        function_tool,
    )
    from openai import AsyncOpenAI

    def weather(city: CITIES) -> str:
        """The weather in a city"""
        return f"sunny in {city}"

    tool = function_tool(weather)

    def run(url: str, kind: Any, *, called: bool = False) -> Any:
        async def ask() -> Any:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
                settings = ModelSettings(
                    temperature=0, max_tokens=100 if called else 8, tool_choice="required" if called else None
                )
                agent = Agent(
                    name="a", instructions="a text", model=kind(model="emotion", openai_client=client),
                    model_settings=settings, tools=[tool] if called else [],
                    tool_use_behavior="stop_on_first_tool" if called else "run_llm_again",
                )  # fmt: skip
                return (await Runner.run(agent, TEXT, run_config=RunConfig(tracing_disabled=True))).final_output

        return asyncio.run(ask())

    return [
        ("openai-agents", "Runner.run, chat completions", GENERATION, lambda url: run(url, OpenAIChatCompletionsModel)),
        (
            "openai-agents", "Runner.run, function_tool", GENERATION,
            lambda url: run(url, OpenAIChatCompletionsModel, called=True),
        ),
        (
            "openai-agents", "Runner.run, responses, function_tool", GENERATION,
            lambda url: run(url, OpenAIResponsesModel, called=True),
        ),
    ]  # fmt: skip


def haystack() -> list[Any]:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    def run(url: str, *, streaming: bool = False, **settings: Any) -> Any:
        tools = settings.pop("tools", None)
        arrived: list[str] = []
        generator = OpenAIChatGenerator(
            api_key=Secret.from_token("any"), model="emotion", api_base_url=f"{url}/v1", max_retries=0,
            streaming_callback=(lambda chunk: arrived.append(chunk.content)) if streaming else None,
            generation_kwargs={"max_tokens": 8, "temperature": 0, **settings}, tools=tools,
        )  # fmt: skip
        reply = generator.run([ChatMessage.from_user(TEXT)])["replies"][0]
        if tools:
            return [one.arguments for one in reply.tool_calls]
        assert not streaming or "".join(arrived) == reply.text
        return reply.text

    def calling(url: str, **more: Any) -> Any:
        tool = Tool(**TOOL, function=lambda city: city)
        return run(url, tools=[tool], tool_choice="required", max_tokens=200, **more)

    schema = {"name": "place", "schema": PARAMETERS, "strict": True}
    structured: Any = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 200}
    return [
        ("haystack-ai", "OpenAIChatGenerator", GENERATION, run),
        ("haystack-ai", "OpenAIChatGenerator, stream", GENERATION, lambda url: run(url, streaming=True)),
        ("haystack-ai", "OpenAIChatGenerator, tools", GENERATION, calling),
        ("haystack-ai", "OpenAIChatGenerator, tools, stream", GENERATION, lambda url: calling(url, streaming=True)),
        ("haystack-ai", "OpenAIChatGenerator, json_schema", GENERATION, lambda url: run(url, **structured)),
    ]


def haystack_of_hugging_face() -> list[Any]:
    from haystack import Document
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPIDocumentEmbedder,
        HuggingFaceAPITextEmbedder,
    )
    from haystack_integrations.components.generators.huggingface_api import HuggingFaceAPIChatGenerator
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    package, token = "huggingface-api-haystack", Secret.from_token("any")

    def query(url: str) -> Any:
        embedder = HuggingFaceAPITextEmbedder(
            api_type="text_embeddings_inference", api_params={"url": url}, token=token, normalize=True
        )
        return embedder.run(TEXT)["embedding"]

    def documents(url: str) -> Any:
        embedder = HuggingFaceAPIDocumentEmbedder(
            api_type="text_embeddings_inference", api_params={"url": url}, token=token, normalize=True,
            progress_bar=False,
        )  # fmt: skip
        found = embedder.run([Document(content=TEXT), Document(content="a text")])["documents"]
        return [one.embedding for one in found]

    def ranked(url: str) -> Any:
        texts = ["cheese", "a kind of machine learning"]
        ranker = HuggingFaceTEIRanker(url=url, top_k=1, token=token)
        found = ranker.run(query="what is deep learning ?", documents=[Document(content=one) for one in texts])
        return [one.content for one in found["documents"]]

    def chat(url: str, **more: Any) -> Any:
        generator = HuggingFaceAPIChatGenerator(
            api_type="text_generation_inference", api_params={"url": f"{url}/v1"}, token=token,
            generation_kwargs={"max_tokens": 8, "temperature": 0}, **more,
        )  # fmt: skip
        return generator.run([ChatMessage.from_user(TEXT)])["replies"][0].text

    return [
        (package, "HuggingFaceAPITextEmbedder", VECTORS, query),
        (package, "HuggingFaceAPIDocumentEmbedder", VECTORS, documents),
        (package, "HuggingFaceTEIRanker", RANKING, ranked),
        (package, "HuggingFaceAPIChatGenerator", GENERATION, chat),
        (
            package, "HuggingFaceAPIChatGenerator, stream", GENERATION,
            lambda url: chat(url, streaming_callback=lambda chunk: None),
        ),
    ]  # fmt: skip


def instructor() -> list[Any]:
    import instructor as package
    from openai import OpenAI

    weather_class = weather_model()

    def city(url: str, mode: Any) -> Any:
        with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            found = package.from_openai(client, mode=mode).chat.completions.create(
                model="emotion",
                messages=[{"role": "user", "content": TEXT}],
                response_model=weather_class,
                max_retries=0,
                max_tokens=200,
                temperature=0,
            )
            return found.city

    modes = package.Mode
    return [
        ("instructor", "Mode.TOOLS", GENERATION, lambda url: city(url, modes.TOOLS)),
        ("instructor", "Mode.JSON_SCHEMA", GENERATION, lambda url: city(url, modes.JSON_SCHEMA)),
    ]


def llama_index() -> list[Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def model(url: str, **more: Any) -> Any:
        return OpenAILike(
            model="emotion", api_base=f"{url}/v1", api_key="any", context_window=500, max_retries=0,
            **{"is_chat_model": True, "max_tokens": 8, "temperature": 0, **more},
        )  # fmt: skip

    def weather(city: str) -> str:
        """The weather in a city"""
        return city

    def called(url: str) -> Any:
        llm = model(url, is_function_calling_model=True, max_tokens=100)
        tool = FunctionTool.from_defaults(weather, fn_schema=weather_model())
        found = llm.chat_with_tools([tool], user_msg=TEXT, tool_required=True, allow_parallel_tool_calls=False)
        return [one.tool_kwargs for one in llm.get_tool_calls_from_response(found)]

    def structured(url: str) -> Any:
        schema = {"name": "place", "schema": PARAMETERS, "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        return model(url, max_tokens=200).chat([ChatMessage(TEXT)], response_format=form).message.content

    name = "llama-index-llms-openai-like"
    return [
        (name, "chat", GENERATION, lambda url: model(url).chat([ChatMessage(TEXT)]).message.content),
        (
            name, "stream_chat", GENERATION,
            lambda url: "".join(one.delta for one in model(url).stream_chat([ChatMessage(TEXT)])),
        ),
        (name, "complete", GENERATION, lambda url: model(url, is_chat_model=False).complete(TEXT).text),
        (name, "chat_with_tools, tool_required", GENERATION, called),
        (name, "chat, json_schema", GENERATION, structured),
    ]  # fmt: skip


CLIENTS = (pydantic_ai, openai_agents, haystack, haystack_of_hugging_face)
WITH_OPENAI_2 = (instructor, llama_index)
