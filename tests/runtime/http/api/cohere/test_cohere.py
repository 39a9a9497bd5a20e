"""`/v1/rerank` and `/v2/rerank`, with requests of Cohere's clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.tasks import TaskName
from tests.runtime.http.serving import Endpoint

EndpointOf = Callable[[TaskName], Endpoint]


@pytest.mark.parametrize("version", ["1", "2"])
def test_cohere_rerank(endpoint_of: EndpointOf, version: str) -> None:
    endpoint = endpoint_of(TaskName.TEXT_RANKING)
    body = {"model": "any", "query": "what ?", "documents": ["cheese", {"text": "a dog"}], "top_n": 1}

    answer = httpx.post(f"{endpoint.url}/v{version}/rerank", json={**body, "return_documents": True}).json()

    assert len(answer["results"]) == 1
    best = answer["results"][0]
    assert best["document"] == {"text": ["cheese", "a dog"][best["index"]]}
    assert answer["meta"]["api_version"] == {"version": version}


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"top_n": 3, "max_tokens_per_doc": None}, id="langchain-cohere's CohereRerank"),
        pytest.param({"top_n": 10, "max_tokens_per_doc": 4096}, id="Haystack's CohereRanker"),
        pytest.param({"max_chunks_per_doc": 10, "rank_fields": ["text"]}, id="Cohere's v1"),
        pytest.param({"max_chunks_per_doc": None, "rank_fields": None, "priority": None}, id="nulls"),
        pytest.param({"priority": 0}, id="Cohere's v2"),
    ],
)
def test_requests_of_cohere_clients_are_accepted(endpoint_of: EndpointOf, version: str, more: dict[str, Any]) -> None:
    url = f"{endpoint_of(TaskName.TEXT_RANKING).url}/v{version}/rerank"
    body = {"model": "rerank-v3.5", "query": "what ?", "documents": ["cheese", "a dog"]}

    answer = httpx.post(url, json={**body, **more})

    assert answer.status_code == 200, answer.text
    assert answer.json()["results"] == httpx.post(url, json=body).json()["results"]


@pytest.mark.parametrize("version", ["1", "2"])
def test_cohere_documents_are_repeated_as_they_were_sent(endpoint_of: EndpointOf, version: str) -> None:
    documents = [{"text": "cheese", "title": "t", "n": [1, {"deep": None}]}, "a dog"]
    body = {"query": "what ?", "documents": documents, "return_documents": True}

    answer = httpx.post(f"{endpoint_of(TaskName.TEXT_RANKING).url}/v{version}/rerank", json=body).json()

    by_index = {one["index"]: one["document"] for one in answer["results"]}
    assert by_index == {0: documents[0], 1: {"text": "a dog"}}


@pytest.mark.parametrize(
    ("more", "field", "remedy"),
    [
        ({"rank_fields": ["title", "text"]}, "rank_fields", "document's text, and leave rank_fields out"),
        ({"rank_fields": "text"}, "rank_fields", "leave rank_fields out"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc", "a whole number from 1"),
        ({"priority": "high"}, "priority", "a whole number"),
        ({"documents": ["a", {"title": "t"}]}, "documents[1].text", "Add a text"),
    ],
)
def test_unsupported_parameters_of_cohere_are_refused(
    endpoint_of: EndpointOf, more: dict[str, Any], field: str, remedy: str
) -> None:
    body = {"query": "what ?", "documents": ["cheese", {"text": "a", "title": "t"}], **more}

    answer = httpx.post(f"{endpoint_of(TaskName.TEXT_RANKING).url}/v2/rerank", json=body)

    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert remedy in answer.json()["remedy"]
