"""Calls of real client packages, run by the interpreter of a virtual environment that has them.

    python calls.py [MODULE NAME] URLS    URLS: the address of each endpoint, as JSON

makes the calls below, or those in the tuple NAME of another module of this folder. It prints what each call returned,
as JSON: {"client": …, "version": …, "call": …, "task": …, "result": …}. Before each call it prints the entry without a
result, and waits for a line.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

TEXTS = ["i like you", "a text"]
QUERY = "what is deep learning ?"
CONTEXT = "my name is clara and i live in berkeley"
DOCUMENTS = ["cheese", "a kind of machine learning"]
VECTORS, RANKING, GENERATION = "feature-extraction", "text-ranking", "text-generation"
MESSAGES: Any = [{"role": "user", "content": "i like you"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["paris", "berkeley"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "weather", "description": "The weather in a city", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": TOOL}]
Call = tuple[str, str, str, Callable[[str], Any]]
"""Distribution, what is called, the task, and the call: a function of the endpoint's address."""


def plain(value: Any) -> Any:
    """Lists of arrays, and of other objects their fields."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return value


def huggingface_hub() -> list[Call]:
    from huggingface_hub import InferenceClient

    def of(url: str) -> Any:
        return InferenceClient(model=url, token="hf_any", timeout=60)

    def continued(url: str, **more: Any) -> Any:
        with of(url) as client:
            found = client.text_generation(CONTEXT, max_new_tokens=8, details=True, **more)
            return "".join(one.token.text for one in found) if more else found.generated_text

    def chat(url: str, **more: Any) -> Any:
        with InferenceClient(base_url=f"{url}/v1", api_key="any") as client:
            found = client.chat_completion(MESSAGES, max_tokens=8, temperature=0, **more)
            return (
                "".join(one.choices[0].delta.content or "" for one in found)
                if more
                else found.choices[0].message.content
            )

    return [
        ("huggingface_hub", "feature_extraction", VECTORS, lambda url: of(url).feature_extraction("i like you")),
        (
            "huggingface_hub", "sentence_similarity", "sentence-similarity",
            lambda url: of(url).sentence_similarity("a happy person", other_sentences=TEXTS),
        ),
        (
            "huggingface_hub", "text_classification", "text-classification",
            lambda url: [one.label for one in of(url).text_classification("i like you", top_k=3)],
        ),
        (
            "huggingface_hub", "token_classification", "token-classification",
            lambda url: [one.word for one in of(url).token_classification(CONTEXT, aggregation_strategy="simple")],
        ),
        (
            "huggingface_hub", "question_answering", "question-answering",
            lambda url: of(url).question_answering(question="what is my name ?", context=CONTEXT).answer,
        ),
        (
            "huggingface_hub", "fill_mask", "fill-mask",
            lambda url: [one.token_str for one in of(url).fill_mask("paris is the [MASK] of france", top_k=2)],
        ),
        (
            "huggingface_hub", "zero_shot_classification", "zero-shot-classification",
            lambda url: [one.label for one in of(url).zero_shot_classification("a problem", ["urgent", "phone"])],
        ),
        ("huggingface_hub", "text_generation", GENERATION, continued),
        ("huggingface_hub", "text_generation, stream", GENERATION, lambda url: continued(url, stream=True)),
        ("huggingface_hub", "chat_completion", GENERATION, chat),
        ("huggingface_hub", "chat_completion, stream", GENERATION, lambda url: chat(url, stream=True)),
    ]  # fmt: skip


def openai() -> list[Call]:
    import asyncio

    from openai import AsyncOpenAI, OpenAI

    def vectors(url: str, **more: Any) -> Any:
        with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            return [one.embedding for one in client.embeddings.create(model="emotion", input=TEXTS, **more).data]

    def chat(url: str, **more: Any) -> Any:
        with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            found = client.chat.completions.create(
                **{"model": "emotion", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **more}
            )
            if more.get("stream"):
                return "".join(one.choices[0].delta.content or "" for one in found)
            message = found.choices[0].message
            return message.content or [one.function.arguments for one in message.tool_calls]

    def respond(url: str, **more: Any) -> Any:
        with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            found: Any = client.responses.create(
                **{"model": "emotion", "input": "i like you", "max_output_tokens": 8, "temperature": 0, **more}
            )
            if more.get("stream"):
                return "".join(one.delta for one in found if one.type == "response.output_text.delta")
            return found.output_text

    async def chat_later(url: str) -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="emotion", messages=MESSAGES, max_tokens=8, temperature=0, stream=True
            )
            return "".join([one.choices[0].delta.content or "" async for one in stream])

    calling = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    return [
        ("openai", "embeddings.create", VECTORS, vectors),
        ("openai", "embeddings.create, dimensions", VECTORS, lambda url: vectors(url, dimensions=4)),
        ("openai", "chat.completions.create", GENERATION, chat),
        ("openai", "chat.completions.create, stream", GENERATION, lambda url: chat(url, stream=True)),
        ("openai", "AsyncOpenAI, stream", GENERATION, lambda url: asyncio.run(chat_later(url))),
        ("openai", "chat.completions.create, tools", GENERATION, lambda url: chat(url, **calling)),
        ("openai", "responses.create", GENERATION, respond),
        ("openai", "responses.create, stream", GENERATION, lambda url: respond(url, stream=True)),
    ]


def cohere() -> list[Call]:
    import cohere as package

    def ranked(client: Any) -> Any:
        found = client.rerank(model="emotion", query=QUERY, documents=DOCUMENTS, top_n=1)
        return [one.index for one in found.results]

    return [
        ("cohere", "Client.rerank", RANKING, lambda url: ranked(package.Client(api_key="any", base_url=url))),
        ("cohere", "ClientV2.rerank", RANKING, lambda url: ranked(package.ClientV2(api_key="any", base_url=url))),
    ]


def litellm() -> list[Call]:
    import litellm as package

    def vectors(url: str, provider: str) -> Any:
        # The provider huggingface asks the hub for the task of the model, unless it is given.
        more = {"input_type": "feature-extraction"} if provider == "huggingface" else {}
        found = package.embedding(model=f"{provider}/emotion", input=TEXTS, api_base=url, api_key="any", **more)
        return [one["embedding"] for one in found.data]

    def ranked(url: str, provider: str) -> Any:
        found = package.rerank(
            model=f"{provider}/emotion", query=QUERY, documents=DOCUMENTS, top_n=1, api_base=url, api_key="any"
        )
        return [one["index"] for one in found.results or []]

    def chat(url: str, **more: Any) -> Any:
        found: Any = package.completion(
            model="openai/emotion", messages=MESSAGES, max_tokens=8, temperature=0, api_base=f"{url}/v1",
            api_key="any", **more,
        )  # fmt: skip
        if more:
            return "".join(one.choices[0].delta.content or "" for one in found)
        return found.choices[0].message.content

    def respond(url: str) -> Any:
        found: Any = package.responses(
            model="openai/emotion", input="i like you", max_output_tokens=8, temperature=0, api_base=f"{url}/v1",
            api_key="any",
        )  # fmt: skip
        return found.output[0].content[0].text

    return [
        ("litellm", "completion, openai/", GENERATION, chat),
        ("litellm", "completion, openai/, stream", GENERATION, lambda url: chat(url, stream=True)),
        ("litellm", "responses, openai/", GENERATION, respond),
        ("litellm", "embedding, openai/", VECTORS, lambda url: vectors(f"{url}/v1", "openai")),
        ("litellm", "embedding, huggingface/", VECTORS, lambda url: vectors(url, "huggingface")),
        ("litellm", "rerank, cohere/", RANKING, lambda url: ranked(url, "cohere")),
        ("litellm", "rerank, huggingface/", RANKING, lambda url: ranked(url, "huggingface")),
        ("litellm", "rerank, jina_ai/", RANKING, lambda url: ranked(f"{url}/v1/rerank", "jina_ai")),
        ("litellm", "rerank, hosted_vllm/", RANKING, lambda url: ranked(url, "hosted_vllm")),
    ]


def langchain() -> list[Call]:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from pydantic import SecretStr

    def of_openai(url: str) -> Any:
        return OpenAIEmbeddings(
            base_url=f"{url}/v1", api_key=SecretStr("any"), model="emotion", check_embedding_ctx_length=False
        )

    def ranked(url: str) -> Any:
        import cohere as package
        from langchain_cohere import CohereRerank

        client = package.ClientV2(api_key="any", base_url=url)
        return [one["index"] for one in CohereRerank(client=client, model="emotion", top_n=1).rerank(DOCUMENTS, QUERY)]

    def model(url: str, **more: Any) -> Any:
        return ChatOpenAI(
            base_url=f"{url}/v1", api_key=SecretStr("any"), model="emotion", temperature=0, max_retries=0,
            **{"max_completion_tokens": 8, **more},
        )  # fmt: skip

    def structured(url: str) -> Any:
        schema = {"title": "place", **PARAMETERS}
        return (
            model(url, max_completion_tokens=200).with_structured_output(schema, method="json_schema").invoke("where ?")
        )

    def called(url: str) -> Any:
        bound = model(url, max_completion_tokens=200).bind_tools([TOOL], tool_choice="weather")
        return [one["args"] for one in bound.invoke("where ?").tool_calls]

    return [
        ("langchain-openai", "ChatOpenAI.invoke", GENERATION, lambda url: model(url).invoke("i like you").content),
        (
            "langchain-openai", "ChatOpenAI.stream", GENERATION,
            lambda url: "".join(str(one.content) for one in model(url).stream("i like you")),
        ),
        ("langchain-openai", "with_structured_output, json_schema", GENERATION, structured),
        ("langchain-openai", "bind_tools, tool_choice", GENERATION, called),
        (
            "langchain-openai", "ChatOpenAI.invoke, use_responses_api", GENERATION,
            lambda url: model(url, use_responses_api=True).invoke("i like you").text,
        ),
        ("langchain-openai", "embed_documents", VECTORS, lambda url: of_openai(url).embed_documents(TEXTS)),
        ("langchain-openai", "embed_query", VECTORS, lambda url: of_openai(url).embed_query(TEXTS[0])),
        ("langchain-cohere", "CohereRerank.rerank", RANKING, ranked),
    ]  # fmt: skip


def llama_index() -> list[Call]:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    return [
        (
            "llama-index-embeddings-openai-like", "get_text_embedding_batch", VECTORS,
            lambda url: OpenAILikeEmbedding(
                model_name="emotion", api_base=f"{url}/v1", api_key="any"
            ).get_text_embedding_batch(TEXTS),
        ),
        (
            "llama-index-embeddings-text-embeddings-inference", "get_text_embedding_batch", VECTORS,
            lambda url: TextEmbeddingsInference(model_name="emotion", base_url=url).get_text_embedding_batch(TEXTS),
        ),
    ]  # fmt: skip


def haystack() -> list[Call]:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret

    key = Secret.from_token("any")
    documents = [Document(content=text) for text in TEXTS]

    def embedded(url: str) -> Any:
        embedder = OpenAIDocumentEmbedder(api_key=key, model="emotion", api_base_url=f"{url}/v1", progress_bar=False)
        return [one.embedding for one in embedder.run(documents)["documents"]]

    return [
        (
            "haystack-ai", "OpenAITextEmbedder", VECTORS,
            lambda url: OpenAITextEmbedder(api_key=key, model="emotion", api_base_url=f"{url}/v1").run(TEXTS[0])[
                "embedding"
            ],
        ),
        ("haystack-ai", "OpenAIDocumentEmbedder", VECTORS, embedded),
    ]  # fmt: skip


def tritonclient() -> list[Call]:
    import numpy as np
    import tritonclient.http as triton

    def infer(url: str) -> Any:
        tensor = triton.InferInput("text", [len(TEXTS)], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], dtype=object))
        with triton.InferenceServerClient(url.removeprefix("http://")) as client:
            return client.infer("emotion", [tensor]).as_numpy("embedding")

    return [("tritonclient", "http.InferenceServerClient.infer", VECTORS, infer)]


def kserve() -> list[Call]:
    import asyncio

    from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

    async def infer(url: str, protocol: str) -> Any:
        client = InferenceRESTClient(RESTConfig(protocol=protocol, timeout=60))
        try:
            if protocol == "v1":
                return (await client.infer(url, {"instances": TEXTS}, model_name="emotion"))["predictions"]
            tensor = InferInput(name="text", shape=[len(TEXTS)], datatype="BYTES", data=TEXTS)
            asked = InferRequest(model_name="emotion", infer_inputs=[tensor])
            found = await client.infer(url, asked, model_name="emotion")
            return found.outputs[0].data
        finally:
            await client.close()

    return [
        ("kserve", "InferenceRESTClient.infer, v1", VECTORS, lambda url: asyncio.run(infer(url, "v1"))),
        ("kserve", "InferenceRESTClient.infer, v2", VECTORS, lambda url: asyncio.run(infer(url, "v2"))),
    ]


CLIENTS = (huggingface_hub, openai, cohere, litellm, langchain, llama_index, haystack, tritonclient, kserve)


def main() -> None:
    """Make all calls."""
    *chosen, addresses = sys.argv[1:]
    urls = json.loads(addresses)
    clients = getattr(importlib.import_module(chosen[0]), chosen[1]) if chosen else CLIENTS
    for client in clients:
        try:
            calls = client()
        except ImportError as error:
            print(json.dumps({"client": client.__name__, "error": f"import: {error}"}), flush=True)
            continue
        for package, call, task, run in calls:
            entry = {"client": package, "version": importlib.metadata.version(package), "call": call, "task": task}
            print(json.dumps(entry), flush=True)
            sys.stdin.readline()
            try:
                entry["result"] = plain(run(urls[task]))
            except Exception as error:
                entry["error"] = f"{type(error).__name__}: {error}"[:2000]
            print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
