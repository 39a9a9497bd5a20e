"""Requests of clients, recorded from their packages or written from their source, get the answers that they expect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.recording import FROM_SOURCE, GROUPS, Recorder, Sent, load, parsed, recorder, replay

REQUESTS = [sent for file in (*(group.recorded for group in GROUPS), FROM_SOURCE) for sent in load(file)]
CLIENTS = {
    "@ai-sdk/openai-compatible (JavaScript)", "anthropic", "chromadb", "cohere", "dify", "haystack-ai",
    "huggingface-api-haystack", "huggingface_hub", "instructor", "kserve", "lancedb", "langchain-cohere",
    "langchain-openai", "litellm", "llama-index-embeddings-openai-like",
    "llama-index-embeddings-text-embeddings-inference", "llama-index-llms-openai-like", "ollama", "open-webui",
    "openai", "openai (JavaScript)", "openai-agents", "opensearch-py", "pydantic-ai-slim", "qdrant-client", "ragflow",
    "sagemaker-core", "semantic-router", "sqlite-vec", "tritonclient",
}  # fmt: skip


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    with recorder(tmp_path_factory.mktemp("clients")) as made:
        yield made


def close(found: Any, expected: Any) -> None:
    """The same structure and texts, and numbers that differ by rounding only."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5)
    elif isinstance(expected, dict):
        assert found.keys() >= expected.keys()
        for name, value in expected.items():
            close(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("sent", REQUESTS, ids=[one.name for one in REQUESTS])
def test_a_clients_request_gets_the_same_answer(endpoints: Recorder, sent: Sent) -> None:
    answer = replay(sent, endpoints.urls[sent.task])

    assert answer.status_code == 200, answer.text
    found = parsed(answer.headers["content-type"], answer.content)
    close(found, sent.answer)
    assert found is not None or answer.content.startswith(b'{"model_name"')


def test_every_client_of_the_documents_is_tried() -> None:
    assert {one.client for one in REQUESTS} == CLIENTS
