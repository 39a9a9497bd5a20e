"""`serving.prompts`: default prompts of the endpoint and of routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from penstock.errors import SpecError
from penstock.resources.endpoint_parts.serving import PROMPT_ROUTES, PROMPT_TASKS, Prompts
from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_runtime.http.route_table import routes
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tasks.base import DEFAULT_LIMITS
from penstock_runtime.tasks.factory import make_task
from penstock_runtime.tasks.texts import ROUTE_ALIASES, of_routes
from tests.runtime.http.serving import Endpoint, Model, make_model, serving, write_folder

TEXTS = {"query": "what is ", "passage": "a text of "}
PROMPTS = Prompts(texts=TEXTS, default="query", routes={"/embed": "passage", "/v2/models/{name}/infer": "passage"})
TEXT = "deep learning"


@contextmanager
def endpoint_with(path: Path, prompts: Prompts, task: TaskName) -> Iterator[Endpoint]:
    """A server of a model whose files have no prompts."""
    folder = ModelFolder.open(write_folder(path, task), weights=False)
    made = make_task(task, folder, prompts=prompts)
    with serving(Model(made, HEAD_OF_TASK[task], labels=1, vocabulary=folder.config["vocab_size"]), task) as endpoint:
        endpoint.server.status.route_prompts = of_routes(prompts)
        yield endpoint


@pytest.fixture(scope="module")
def e5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with endpoint_with(tmp_path_factory.mktemp("e5"), PROMPTS, TaskName.FEATURE_EXTRACTION) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    task = TaskName.FEATURE_EXTRACTION
    with serving(make_model(tmp_path_factory.mktemp("plain"), task), task) as endpoint:
        yield endpoint


def post(endpoint: Endpoint, route: str, body: Any) -> Any:
    answer = httpx.post(f"{endpoint.url}{route}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vector(endpoint: Endpoint, text: str) -> Any:
    return post(endpoint, "/predict", {"inputs": text})[0]


def test_an_openai_client_gets_the_default_prompt_or_names_another(e5: Endpoint, plain: Endpoint) -> None:
    with openai.OpenAI(base_url=f"{e5.url}/v1", api_key="any", max_retries=0) as client:
        queried = client.embeddings.create(model="e5", input=TEXT).data[0].embedding
        stored = client.embeddings.create(model="e5", input=TEXT, extra_body={"prompt_name": "passage"}).data[0]

    np.testing.assert_allclose(queried, vector(plain, TEXTS["query"] + TEXT), atol=1e-6)
    np.testing.assert_allclose(stored.embedding, vector(plain, TEXTS["passage"] + TEXT), atol=1e-6)


@pytest.mark.parametrize("route", ["/v2/models/emotion/infer", "/v2/models/emotion/versions/1/infer"])
def test_all_forms_of_a_route_have_its_prompt(e5: Endpoint, plain: Endpoint, route: str) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}

    answer = post(e5, route, {"inputs": [tensor]})

    np.testing.assert_allclose(answer["outputs"][0]["data"], vector(plain, TEXTS["passage"] + TEXT), atol=1e-6)


def test_a_routes_prompt_takes_precedence_over_the_default_and_the_requests_over_both(
    e5: Endpoint, plain: Endpoint
) -> None:
    query, passage = (vector(plain, text + TEXT) for text in TEXTS.values())

    np.testing.assert_allclose(post(e5, "/embed", {"inputs": TEXT}), [passage], atol=1e-6)
    np.testing.assert_allclose(post(e5, "/embed", {"inputs": TEXT, "prompt_name": None}), [passage], atol=1e-6)
    np.testing.assert_allclose(post(e5, "/embed", {"inputs": TEXT, "prompt_name": "query"}), [query], atol=1e-6)
    np.testing.assert_allclose(post(e5, "/", {"inputs": TEXT}), [query], atol=1e-6)


def test_token_ids_are_refused_where_a_prompt_is_put_before_texts(e5: Endpoint) -> None:
    answer = httpx.post(f"{e5.url}/v1/embeddings", json={"input": [5, 6]})

    assert answer.status_code == 400
    assert "a prompt is put before the texts of this request. Send texts" in answer.json()["error"]["message"]


def test_a_ranking_has_the_prompt_before_its_query(tmp_path: Path) -> None:
    task = TaskName.TEXT_RANKING
    body = {"query": TEXT, "texts": ["cheese", "machine learning"]}
    with (
        endpoint_with(tmp_path / "a", PROMPTS, task) as ranking,
        serving(make_model(tmp_path / "b", task), task) as plain,
    ):
        expected = post(plain, "/rerank", {**body, "query": TEXTS["query"] + TEXT})

        assert post(ranking, "/rerank", body) == expected
        assert post(ranking, "/rerank", {**body, "prompt_name": "passage"}) != expected


def test_every_inference_route_of_a_task_with_prompts_may_have_its_own(e5: Endpoint) -> None:
    found = {
        ROUTE_ALIASES.get(route.path, route.path)
        for route in routes(e5.server.service, DEFAULT_LIMITS)
        if route.inference and (route.tasks is None or route.tasks.intersection(PROMPT_TASKS))
    }

    assert found <= set(PROMPT_ROUTES)


def test_a_prompt_that_does_not_exist_is_an_error_at_the_start(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TaskName.FEATURE_EXTRACTION)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"own": "i like "}}))
    opened = ModelFolder.open(folder, weights=False)

    made = make_task(TaskName.FEATURE_EXTRACTION, opened, prompts=Prompts(default="own", texts={"more": "x "}))
    assert made.parse("you", {}).texts == ["i like you"]
    for prompts, field in ((Prompts(default="owns"), "default"), (Prompts(routes={"/embed": "x"}), "routes[/embed]")):
        with pytest.raises(SpecError) as caught:
            make_task(TaskName.FEATURE_EXTRACTION, opened, prompts=prompts)
        assert caught.value.field == f"spec.serving.prompts.{field}"
        assert "name one of own" in caught.value.remedy
