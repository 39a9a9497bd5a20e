"""The routes of text-embeddings-inference: what its clients send, its defaults, its answers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.manifest import Axes, GraphIO
from penstock.tasks import ENCODER_TASKS, Head, TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.api.tei.answers import TOKEN_BYTES, tokens_of
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import POOLED, Outputs, Row
from penstock_runtime.tasks import make_task
from penstock_runtime.tasks.base import RequestLimits
from tests.runtime.http.serving import (
    WIDTH,
    Endpoint,
    Model,
    make_model,
    model_of,
    serving,
    write_folder,
    write_sparse_folder,
    write_three_outputs_folder,
    write_token_vectors_folder,
)

EndpointOf = Callable[[TaskName], Endpoint]

FROM_OTHER_SERVERS: dict[str, Any] = {
    "top_n": 2,
    "model": "a model",
    "documents": ["another text"],
    "return_documents": True,
    "user": None,
}
"""Fields that clients of several reranking servers send to all of them."""


@pytest.fixture(scope="module")
def unnormalised(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An endpoint whose model's files have a mean and no Normalize."""
    folder = write_folder(tmp_path_factory.mktemp("mean"), TaskName.FEATURE_EXTRACTION)
    modules = folder / "modules.json"
    modules.write_text(modules.read_text().partition(', {"idx": 2')[0] + "]")
    with serving(model_of(folder, TaskName.FEATURE_EXTRACTION)) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An endpoint with sparse vectors."""
    folder = write_sparse_folder(tmp_path_factory.mktemp("sparse"))
    with serving(model_of(folder, TaskName.FEATURE_EXTRACTION)) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def token_vectors(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An endpoint with a vector for each token."""
    folder = write_token_vectors_folder(tmp_path_factory.mktemp("tokens"))
    with serving(model_of(folder, TaskName.FEATURE_EXTRACTION)) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def three_outputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An endpoint with the three outputs of BGE-M3."""
    folder = write_three_outputs_folder(tmp_path_factory.mktemp("three"))
    with serving(model_of(folder, TaskName.FEATURE_EXTRACTION)) as endpoint:
        yield endpoint


class PooledModel(Model):
    """A model whose graph gives one vector for each text."""

    def _run(self, row: Row) -> Outputs:
        return {POOLED: super()._run(row)["last_hidden_state"].mean(axis=0)}


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An endpoint whose graph gives one vector for each text, and none for tokens."""
    folder = ModelFolder.open(
        write_folder(tmp_path_factory.mktemp("pooled"), TaskName.FEATURE_EXTRACTION), weights=False
    )
    io = GraphIO(inputs=("input_ids",), outputs={POOLED: Axes.ROW})
    task = make_task(TaskName.FEATURE_EXTRACTION, folder, io=io)
    with serving(PooledModel(task, Head.ENCODER, 0, folder.config["vocab_size"])) as endpoint:
        yield endpoint


class TestPredict:
    """The route of text-embeddings-inference for classifiers."""

    def test_a_batch_is_lists_of_texts_and_of_pairs(self, endpoint_of: EndpointOf) -> None:
        url = f"{endpoint_of(TaskName.TEXT_CLASSIFICATION).url}/predict"

        def ask(inputs: Any, **more: Any) -> Any:
            return httpx.post(url, json={"inputs": inputs, **more}).json()

        pair = {"text": "like", "text_pair": "love"}
        assert ask([["like"], ["love"]]) == ask(["like", "love"]) == [ask("like")[0], ask("love")[0]]
        assert ask([["like", "love"], ["love"]]) == [ask(pair)[0], ask("love")[0]]
        assert ask([["like", "love"]]) == ask(pair) != ask(["like", "love"])[:1]

    def test_parameters_are_next_to_the_inputs(self, endpoint_of: EndpointOf) -> None:
        url = f"{endpoint_of(TaskName.TEXT_CLASSIFICATION).url}/predict"
        given = {"raw_scores": True, "truncate": True, "truncation_direction": "Right"}
        answer = httpx.post(url, json={"inputs": "like", **given})
        logits = {"inputs": "like", "parameters": {"function_to_apply": "none"}}
        assert answer.json() == httpx.post(url, json=logits).json()
        usual = httpx.post(url, json={"inputs": "like"}).json()
        assert httpx.post(url, json={"inputs": "like", "raw_scores": False}).json() == usual

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"inputs": [[]]}, "inputs[0]"),
            ({"inputs": [["a", "b", "c"]]}, "inputs[0]"),
            ({"inputs": [["a", 1]]}, "inputs[0][1]"),
            ({"inputs": [["a"], "b", [["c"]]]}, "inputs[2][0]"),
            ({"inputs": "a", "raw_scores": True, "function_to_apply": "none"}, "parameters.raw_scores"),
            ({"inputs": "a", "raw_score": True}, "raw_score"),
        ],
    )
    def test_errors_name_the_field(self, endpoint_of: EndpointOf, body: Any, field: str) -> None:
        answer = httpx.post(f"{endpoint_of(TaskName.TEXT_CLASSIFICATION).url}/predict", json=body)
        assert (answer.status_code, answer.json()["field"]) == (422, field)


class TestPooledGraph:
    def test_routes_for_one_vector_give_it(self, pooled: Endpoint, endpoint_of: EndpointOf) -> None:
        by_tokens = endpoint_of(TaskName.FEATURE_EXTRACTION).url
        sentences = {"source_sentence": "a text", "sentences": ["cheese .", "some words"]}
        bodies = {
            "/embed": {"inputs": ["a text", "cheese ."]},
            "/v1/embeddings": {"input": "a text"},
            "/similarity": {"inputs": sentences},
            "/predict": {"inputs": "a text"},
        }
        for path, body in bodies.items():
            answer, expected = (httpx.post(url + path, json=body).json() for url in (pooled.url, by_tokens))
            if path == "/v1/embeddings":
                answer, expected = answer["data"][0]["embedding"], expected["data"][0]["embedding"]
            np.testing.assert_allclose(answer, expected, atol=1e-6)

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/embed_all", {"inputs": "a text"}),
            ("/embed", {"inputs": "a text", "pooling": "none"}),
            ("/embed", {"inputs": "a text", "pooling": "cls"}),
            ("/predict", {"inputs": "a text", "parameters": {"pooling": "mean"}}),
        ],
    )
    def test_what_needs_vectors_of_tokens_is_refused_with_the_reason(
        self, path: str, body: dict[str, Any], pooled: Endpoint
    ) -> None:
        answer = httpx.post(pooled.url + path, json=body)

        assert answer.status_code == 422
        assert "needs the vectors of tokens; this model's ONNX file gives one vector" in answer.json()["error"]
        assert "last_hidden_state" in answer.json()["remedy"]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/rerank", {"query": "a", "texts": ["text"]}),
            ("/rerank", {"query": "a", "texts": ["text"], "return_text": True}),
            ("/v2/rerank", {"query": "a", "documents": ["text"], "top_n": 1}),
            ("/invocations", {"query": "a", "texts": ["text"]}),
            ("/predict", {"inputs": {"query": "a", "texts": ["text"]}, "parameters": {"top_k": 1}}),
        ],
    )
    @pytest.mark.parametrize("kind", ["pooled", "sparse"])
    def test_texts_are_not_ranked_and_the_error_names_the_reason(
        self, path: str, body: dict[str, Any], kind: str, request: pytest.FixtureRequest
    ) -> None:
        endpoint: Endpoint = request.getfixturevalue(kind)
        answer = httpx.post(endpoint.url + path, json=body)

        assert answer.status_code == 422
        assert "this model ranks none" in answer.text
        assert "task: text-ranking" in answer.text

    @pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/embed_sparse"])
    def test_other_routes_are_refused(self, path: str, pooled: Endpoint) -> None:
        bodies = {
            "/rerank": {"query": "a", "texts": ["text"]},
            "/v1/rerank": {"query": "a", "documents": ["text"]},
            "/embed_sparse": {"inputs": "a text"},
        }
        answer = httpx.post(pooled.url + path, json=bodies[path])

        assert answer.status_code == 422
        assert "vector" in answer.text


class TestTokenVectors:
    def test_embed_all_gives_a_vector_for_each_token(self, token_vectors: Endpoint) -> None:
        texts = ["a text", "cheese ."]
        documents = httpx.post(f"{token_vectors.url}/embed_all", json={"inputs": texts}).json()
        predicted = httpx.post(f"{token_vectors.url}/predict", json={"inputs": texts}).json()
        queries = httpx.post(f"{token_vectors.url}/embed_all", json={"inputs": texts, "prompt_name": "query"}).json()

        assert [matrix[0] for matrix in predicted] == documents
        assert {len(vector) for matrix in documents for vector in matrix} == {3}
        assert [len(matrix) for matrix in queries] == [12, 12]
        np.testing.assert_allclose(np.linalg.norm(documents[0], axis=1), 1, atol=1e-5)

    @pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/invocations"])
    def test_texts_are_ranked_by_max_sim(self, path: str, token_vectors: Endpoint) -> None:
        texts = ["cheese", "a text of a dog", "what is deep learning ?"]
        embed = f"{token_vectors.url}/embed_all"
        query = np.array(httpx.post(embed, json={"inputs": "what ?", "prompt_name": "query"}).json()[0])
        documents = map(np.array, httpx.post(embed, json={"inputs": texts}).json())
        scores = [float((query @ document.T).max(axis=1).sum()) for document in documents]
        order = sorted(range(3), key=lambda index: -scores[index])

        named = "documents" if path.startswith("/v") else "texts"
        answer = httpx.post(token_vectors.url + path, json={"query": "what ?", named: texts}).json()

        found = answer["results"] if path.startswith("/v") else answer
        assert [entry["index"] for entry in found] == order
        values = [entry["relevance_score" if path.startswith("/v") else "score"] for entry in found]
        np.testing.assert_allclose(values, [scores[index] for index in order], atol=1e-4)

    @pytest.mark.parametrize(("path", "field"), [("/embed", "inputs"), ("/v1/embeddings", "input")])
    def test_routes_for_one_vector_refuse_with_the_reason(self, path: str, field: str, token_vectors: Endpoint) -> None:
        answer = httpx.post(token_vectors.url + path, json={field: "a text"})
        assert answer.status_code == (400 if path.startswith("/v1") else 422)
        assert "a vector for each token (ColBERT)" in answer.text
        assert "/embed_all" in answer.text

    def test_embed_sparse_is_refused(self, token_vectors: Endpoint) -> None:
        answer = httpx.post(f"{token_vectors.url}/embed_sparse", json={"inputs": "a text"})
        assert answer.status_code == 422
        assert "a vector for each token" in answer.json()["error"]


class TestThreeOutputs:
    def test_each_route_serves_its_output(self, three_outputs: Endpoint) -> None:
        texts = ["a text", "cheese ."]
        asked = {"inputs": texts, "parameters": {"outputs": ["dense", "sparse", "multi_vector"]}}
        whole = httpx.post(f"{three_outputs.url}/predict", json=asked).json()

        routes = {"dense": "/embed", "sparse": "/embed_sparse", "multi_vector": "/embed_all"}
        for output, path in routes.items():
            answer = httpx.post(three_outputs.url + path, json={"inputs": texts}).json()
            if output == "sparse":
                assert answer == whole[output]
            else:
                for one, other in zip(answer, whole[output], strict=True):
                    np.testing.assert_allclose(one, other, atol=1e-6)
        openai = httpx.post(f"{three_outputs.url}/v1/embeddings", json={"input": texts}).json()
        np.testing.assert_allclose([entry["embedding"] for entry in openai["data"]], whole["dense"], atol=1e-6)

    def test_a_tensor_holds_one_output(self, three_outputs: Endpoint) -> None:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a text"]}
        body = {"inputs": [tensor], "parameters": {"outputs": ["dense", "sparse"]}}
        name = httpx.get(f"{three_outputs.url}/info").json()["name"]
        answer = httpx.post(f"{three_outputs.url}/v2/models/{name}/infer", json=body)
        assert answer.status_code in {400, 422}
        assert "outputs" in answer.text


class TestSparseVectors:
    def test_embed_sparse_gives_pairs_for_each_text(self, sparse: Endpoint) -> None:
        one = httpx.post(f"{sparse.url}/embed_sparse", json={"inputs": "a text", "more": 1}).json()
        two = httpx.post(f"{sparse.url}/embed_sparse", json={"inputs": ["a text", "cheese"]}).json()
        predicted = httpx.post(f"{sparse.url}/predict", json={"inputs": ["a text", "cheese"]}).json()

        assert two[0] == one[0]
        assert predicted == two
        indices = [pair["index"] for pair in one[0]]
        assert indices == sorted(set(indices))
        assert all(pair["value"] > 0 for pair in one[0])

    def test_the_forms_have_the_same_weights(self, sparse: Endpoint) -> None:
        def ask(form: str) -> Any:
            body = {"inputs": ["a text", "cheese"], "sparse_format": form}
            return httpx.post(f"{sparse.url}/embed_sparse", json=body).json()

        for pairs, tokens, arrays, dense in zip(*map(ask, ("pairs", "tokens", "arrays", "dense")), strict=True):
            indices = [pair["index"] for pair in pairs]
            values = [pair["value"] for pair in pairs]
            names = httpx.post(f"{sparse.url}/decode", json={"ids": [[one] for one in indices]}).json()
            assert arrays == {"indices": indices, "values": values}
            assert list(tokens.values()) == values
            assert {name for name in names if name} <= set(tokens)
            assert [value for value in dense if value] == values

    def test_token_ids_are_taken(self, sparse: Endpoint) -> None:
        tokens = httpx.post(f"{sparse.url}/tokenize", json={"inputs": "a text", "add_special_tokens": False}).json()
        body = {"inputs": [[token["id"] for token in tokens[0]]]}

        answer = httpx.post(f"{sparse.url}/embed_sparse", json=body).json()

        assert answer == httpx.post(f"{sparse.url}/embed_sparse", json={"inputs": "a text"}).json()

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/embed", {"inputs": "a text"}),
            ("/embed_all", {"inputs": "a text"}),
            ("/v1/embeddings", {"input": "a text"}),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ],
    )
    def test_routes_for_dense_vectors_name_the_sparse_one(
        self, sparse: Endpoint, path: str, body: dict[str, Any]
    ) -> None:
        answer = httpx.post(sparse.url + path, json=body)

        assert answer.status_code == (400 if path.startswith("/v1") else 422)
        assert "this model gives sparse vectors" in answer.text
        assert "/embed_sparse" in answer.text

    def test_a_dense_model_refuses_the_route(self, unnormalised: Endpoint) -> None:
        answer = httpx.post(f"{unnormalised.url}/embed_sparse", json={"inputs": "a text"})

        assert answer.status_code == 422
        assert "this model gives dense vectors" in answer.json()["error"]

    def test_a_tensor_holds_dense_values(self, sparse: Endpoint) -> None:
        name = httpx.get(f"{sparse.url}/v1/models").json()["data"][0]["id"]
        url = f"{sparse.url}/v2/models/{name}/infer"
        inputs = [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a text", "cheese"]}]

        refused = httpx.post(url, json={"inputs": inputs})
        answer = httpx.post(url, json={"inputs": inputs, "parameters": {"sparse_format": "dense"}}).json()

        assert refused.status_code == 422
        assert "sparse_format" in refused.text
        (tensor,) = answer["outputs"]
        dense = httpx.post(
            f"{sparse.url}/embed_sparse", json={"inputs": ["a text", "cheese"], "sparse_format": "dense"}
        )
        np.testing.assert_allclose(np.reshape(tensor["data"], tensor["shape"]), dense.json(), atol=1e-6)


class TestUnknownFields:
    """They are ignored, except where they are probably a misspelt field."""

    @pytest.mark.parametrize("count", [1, 2, len(FROM_OTHER_SERVERS)])
    def test_rerank_ignores_fields_of_other_servers(self, endpoint_of: EndpointOf, count: int) -> None:
        endpoint = endpoint_of(TaskName.TEXT_RANKING)
        body = {"query": "what is cheese ?", "texts": ["cheese", "a dog"], "truncate": True, "raw_scores": True}
        expected = httpx.post(f"{endpoint.url}/rerank", json=body).json()

        for names in combinations(FROM_OTHER_SERVERS, count):
            more = {name: FROM_OTHER_SERVERS[name] for name in names}
            answer = httpx.post(f"{endpoint.url}/rerank", json={**body, **more})

            assert (answer.status_code, answer.json()) == (200, expected)

    @pytest.mark.parametrize(
        ("task", "path", "body"),
        [
            (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": "a text"}),
            (TaskName.FEATURE_EXTRACTION, "/embed_all", {"inputs": "a text"}),
            (TaskName.FEATURE_EXTRACTION, "/v1/embeddings", {"input": "a text"}),
            (TaskName.TEXT_RANKING, "/v1/rerank", {"query": "a", "documents": ["b"]}),
            (TaskName.TEXT_RANKING, "/v2/rerank", {"query": "a", "documents": ["b"]}),
            (
                TaskName.SENTENCE_SIMILARITY,
                "/similarity",
                {"inputs": {"source_sentence": "a", "sentences": ["b"], "more": 1}, "parameters": {"more": 1}},
            ),
        ],
    )
    def test_routes_of_other_servers_ignore_unknown_fields(
        self, endpoint_of: EndpointOf, task: TaskName, path: str, body: dict[str, Any]
    ) -> None:
        answer = httpx.post(endpoint_of(task).url + path, json={**body, "of_a_newer_version": {"any": ["value"]}})

        assert answer.status_code == 200, answer.text

    def test_predict_refuses_them(self, endpoint_of: EndpointOf) -> None:
        url = f"{endpoint_of(TaskName.FEATURE_EXTRACTION).url}/predict"

        assert httpx.post(url, json={"inputs": "a text", "of_a_newer_version": 1}).status_code == 422

    def test_a_misspelt_required_field_is_named(self, endpoint_of: EndpointOf) -> None:
        url = f"{endpoint_of(TaskName.TEXT_RANKING).url}/rerank"

        answer = httpx.post(url, json={"query": "a", "text": ["b"], "model": "x"}).json()

        assert (answer["field"], answer["remedy"]) == ("text", "Did you mean 'texts'?")

    def test_a_known_field_of_a_wrong_type_is_refused(self, endpoint_of: EndpointOf) -> None:
        url = f"{endpoint_of(TaskName.FEATURE_EXTRACTION).url}/embed"

        assert httpx.post(url, json={"inputs": "a text", "normalize": "yes"}).json()["field"] == "normalize"


class TestNormalize:
    """Vectors have length 1 by default, also where the model's files have no Normalize."""

    def test_embed_and_v1_embeddings_normalise_by_default(self, unnormalised: Endpoint) -> None:
        whole = httpx.post(f"{unnormalised.url}/predict", json={"inputs": "a text"}).json()[0]
        embedded = httpx.post(f"{unnormalised.url}/embed", json={"inputs": "a text"}).json()[0]
        openai = httpx.post(f"{unnormalised.url}/v1/embeddings", json={"input": "a text"}).json()["data"]

        assert np.linalg.norm(whole) > 1.1
        np.testing.assert_allclose(embedded, np.divide(whole, np.linalg.norm(whole)), atol=1e-6)
        assert openai[0]["embedding"] == embedded

    @pytest.mark.parametrize(
        ("path", "body"), [("/embed", {"inputs": "a text"}), ("/v1/embeddings", {"input": "a text"})]
    )
    def test_fewer_dimensions_are_normalised(self, unnormalised: Endpoint, path: str, body: dict[str, Any]) -> None:
        answer = httpx.post(unnormalised.url + path, json={**body, "dimensions": 4}).json()

        vector = answer[0] if path == "/embed" else answer["data"][0]["embedding"]
        assert np.shape(vector) == (4,)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)

    def test_normalize_false_gives_the_vectors_of_the_model(self, unnormalised: Endpoint) -> None:
        whole = httpx.post(f"{unnormalised.url}/predict", json={"inputs": "a text"}).json()

        answer = httpx.post(f"{unnormalised.url}/embed", json={"inputs": "a text", "normalize": False}).json()

        assert answer == whole


@pytest.mark.parametrize("single", [True, False])
def test_embed_all_gives_the_vectors_of_all_tokens(endpoint_of: EndpointOf, single: bool) -> None:
    endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)
    texts = ["i like you"] if single else ["i like you", "a text"]

    answer = httpx.post(f"{endpoint.url}/embed_all", json={"inputs": texts[0] if single else texts}).json()

    body = {"inputs": texts, "parameters": {"pooling": "none"}}
    expected = httpx.post(f"{endpoint.url}/predict", json=body).json()
    assert answer == [matrix[0] for matrix in expected]
    assert [np.shape(matrix) for matrix in answer] == [(len(text.split()) + 2, WIDTH) for text in texts]


def test_v1_embeddings_takes_the_name_of_a_prompt(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TaskName.FEATURE_EXTRACTION)
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "what is "}}')
    with serving(model_of(folder, TaskName.FEATURE_EXTRACTION)) as endpoint:
        url = f"{endpoint.url}/v1/embeddings"
        prompted = httpx.post(url, json={"input": ["a text"], "prompt_name": "query"}).json()
        written = httpx.post(url, json={"input": ["what is a text"]}).json()
        unknown = httpx.post(url, json={"input": ["a text"], "prompt_name": "other"}).json()

    assert prompted["data"] == written["data"]
    assert unknown["error"]["param"] == "prompt_name"


class TestTokens:
    """`/tokenize` and `/decode`."""

    @pytest.mark.parametrize("task", list(ENCODER_TASKS))
    def test_tokens_have_the_text_and_its_place_in_bytes(self, endpoint_of: EndpointOf, task: TaskName) -> None:
        answer = httpx.post(f"{endpoint_of(task).url}/tokenize", json={"inputs": "\u00fc i like"}).json()

        special = {"special": True, "start": None, "stop": None}
        assert answer[0][0] == {"id": 2, "text": "[CLS]", **special}
        assert answer[0][-1] == {"id": 3, "text": "[SEP]", **special}
        assert [(one["text"], one["start"], one["stop"]) for one in answer[0][1:-1]] == [
            ("\u00fc", 0, 2),
            ("i", 3, 4),
            ("like", 5, 9),
        ]

    def test_tokens_are_decoded_to_the_text(self, endpoint_of: EndpointOf) -> None:
        url = endpoint_of(TaskName.FEATURE_EXTRACTION).url
        texts = ["i like you", "a text"]
        tokens = httpx.post(f"{url}/tokenize", json={"inputs": texts}).json()
        ids = [[one["id"] for one in row] for row in tokens]

        assert httpx.post(f"{url}/decode", json={"ids": ids}).json() == texts
        assert httpx.post(f"{url}/decode", json={"ids": ids[0]}).json() == texts[:1]
        whole = httpx.post(f"{url}/decode", json={"ids": ids[1], "skip_special_tokens": False}).json()
        assert whole == ["[CLS] a text [SEP]"]

    def test_special_tokens_are_left_out_on_request(self, endpoint_of: EndpointOf) -> None:
        url = endpoint_of(TaskName.FEATURE_EXTRACTION).url

        answer = httpx.post(f"{url}/tokenize", json={"inputs": "a text", "add_special_tokens": False}).json()

        assert [one["text"] for one in answer[0]] == ["a", "text"]

    @pytest.mark.parametrize(
        ("path", "body", "field"),
        [
            ("/tokenize", {"inputs": ["a", ""]}, "inputs[1]"),
            ("/tokenize", {"inputs": "a", "prompt_name": "query"}, "prompt_name"),
            ("/decode", {"ids": [[1], [-1]]}, "ids[1][0]"),
            ("/decode", {"ids": []}, "ids"),
            ("/decode", {"ids": "a"}, "ids"),
        ],
    )
    def test_errors_name_the_field(self, endpoint_of: EndpointOf, path: str, body: dict[str, Any], field: str) -> None:
        answer = httpx.post(endpoint_of(TaskName.FEATURE_EXTRACTION).url + path, json=body)

        assert (answer.status_code, answer.json()["field"]) == (422, field)

    def test_a_very_large_answer_is_refused(self, endpoint_of: EndpointOf) -> None:
        tokenizer = endpoint_of(TaskName.FEATURE_EXTRACTION).model.task.tokenizer
        limits = RequestLimits(answer_bytes=100 * TOKEN_BYTES)

        assert len(tokens_of(["a " * 98], True, limits, tokenizer)[0]) == 100
        with pytest.raises(InvalidInput, match="the limit is 8"):
            tokens_of(["a " * 50, "a " * 50], True, limits, tokenizer)


def test_info_has_the_fields_of_text_embeddings_inference(tmp_path: Path) -> None:
    task = TaskName.TEXT_CLASSIFICATION
    with serving(make_model(tmp_path, task), task, max_inputs=7) as endpoint:
        endpoint.server.status.labels = ("joy", "love")
        endpoint.server.status.limits = {"max_input_tokens": 64}
        info = httpx.get(f"{endpoint.url}/info").json()

    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("emotion", 64, 7)
    assert info["model_type"] == {
        "classifier": {"id2label": {"0": "joy", "1": "love"}, "label2id": {"joy": 0, "love": 1}}
    }
    assert info["task"] == "text-classification"
