"""Existing clients of other projects: huggingface_hub, openai, tritonclient."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from huggingface_hub import InferenceClient
from tritonclient.utils import InferenceServerException

from penstock.tasks import ENCODER_TASKS, TaskName
from tests.runtime.http.serving import REQUESTS, WIDTH, Endpoint, make_model, model_of, serving

EndpointOf = Callable[[TaskName], Endpoint]


def predict(endpoint: Endpoint, body: Any) -> Any:
    answer = httpx.post(f"{endpoint.url}/predict", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


class TestHuggingFace:
    """The official client, with the endpoint's base URL as its model."""

    def client(self, endpoint: Endpoint) -> InferenceClient:
        return InferenceClient(model=endpoint.url, token="hf_any", timeout=60)

    def test_health(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)

        assert InferenceClient(model=endpoint.url, provider="hf-inference").health_check()

    def test_feature_extraction(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)

        vectors = self.client(endpoint).feature_extraction("i like you", normalize=True, truncate=True)

        np.testing.assert_allclose(vectors, predict(endpoint, {"inputs": "i like you"}), atol=1e-6)

    def test_sentence_similarity(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.SENTENCE_SIMILARITY)

        scores = self.client(endpoint).sentence_similarity("a happy person", other_sentences=["a dog", "a person"])

        body = {"inputs": {"source_sentence": "a happy person", "sentences": ["a dog", "a person"]}}
        assert scores == predict(endpoint, body)

    def test_text_classification(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.TEXT_CLASSIFICATION)

        labels = self.client(endpoint).text_classification("i like you", top_k=2, function_to_apply="sigmoid")

        assert [one.label for one in labels] == ["anger", "joy"]

    def test_token_classification(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.TOKEN_CLASSIFICATION)
        text = "my name is clara and i live in berkeley"

        entities = self.client(endpoint).token_classification(text, aggregation_strategy="simple")

        assert entities
        assert all(text[entity.start : entity.end] == entity.word for entity in entities)

    def test_question_answering(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.QUESTION_ANSWERING)
        context = "my name is clara and i live in berkeley"

        answer: Any = self.client(endpoint).question_answering(question="what is my name ?", context=context)

        assert answer.answer == context[answer.start : answer.end]

    def test_fill_mask(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.FILL_MASK)

        guesses = self.client(endpoint).fill_mask("paris is the [MASK] of france", top_k=3)

        assert len(guesses) == 3

    def test_zero_shot_classification(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.ZERO_SHOT_CLASSIFICATION)

        labels = self.client(endpoint).zero_shot_classification(
            "i have a problem with my phone", candidate_labels=["urgent", "phone"], multi_label=True
        )

        assert {one.label for one in labels} == {"urgent", "phone"}

    @pytest.mark.parametrize("given", [{}, {"output_format": "list"}, {"output_format": None}])
    def test_zero_shot_classification_gives_its_clients_a_list(
        self, endpoint_of: EndpointOf, given: dict[str, Any]
    ) -> None:
        url = f"{endpoint_of(TaskName.ZERO_SHOT_CLASSIFICATION).url}/predict"
        parameters = {"candidate_labels": ["urgent", "phone"], **given}
        client = {"user-agent": "unknown/None; hf_hub/1.33.0; python/3.11.7"}
        for inputs in ("i have a problem", ["i have a problem", "phone"]):
            body = {"inputs": inputs, "parameters": parameters}
            plain = {"inputs": inputs, "parameters": {**parameters, "output_format": "list"}}
            answer = httpx.post(url, json=body, headers=client)
            assert answer.status_code == 200
            assert answer.json() == httpx.post(url, json=plain).json()
        asked = {"inputs": "phone", "parameters": {**parameters, "output_format": "pipeline"}}
        assert set(httpx.post(url, json=asked, headers=client).json()) == {"sequence", "labels", "scores"}


class TestOpenAI:
    """OpenAI's own package."""

    def client(self, endpoint: Endpoint) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="any", max_retries=0)

    @pytest.mark.parametrize("encoding_format", ["float", "base64", None])
    def test_embeddings_in_every_encoding(self, endpoint_of: EndpointOf, encoding_format: Any) -> None:
        endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)
        more = {} if encoding_format is None else {"encoding_format": encoding_format}

        with self.client(endpoint) as client:
            answer = client.embeddings.create(model="emotion", input=["i like you", "a text"], **more)

        vectors: list[Any] = [one.embedding for one in answer.data]
        if encoding_format == "base64":
            vectors = [np.frombuffer(base64.b64decode(str(one)), dtype="<f4") for one in vectors]
        np.testing.assert_allclose(vectors, predict(endpoint, {"inputs": ["i like you", "a text"]}), atol=1e-6)
        assert [one.index for one in answer.data] == [0, 1]
        assert answer.usage.prompt_tokens == 9

    @pytest.mark.parametrize("single", [True, False])
    def test_token_ids_are_the_same_text(self, endpoint_of: EndpointOf, single: bool) -> None:
        endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)
        tokenizer = endpoint.model.task._embedding.fitter.tokenizer
        texts = ["i like you"] if single else ["i like you", "a text of some words"]
        ids = [pieces.ids for pieces in tokenizer.split(texts)]

        with self.client(endpoint) as client:
            answer = client.embeddings.create(model="emotion", input=ids[0] if single else ids)
        embedded = httpx.post(f"{endpoint.url}/embed", json={"inputs": ids[0] if single else ids}).json()

        expected = predict(endpoint, {"inputs": texts})
        np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=1e-6)
        np.testing.assert_allclose(embedded, expected, atol=1e-6)

    def test_dimensions(self, endpoint_of: EndpointOf) -> None:
        with self.client(endpoint_of(TaskName.FEATURE_EXTRACTION)) as client:
            answer = client.embeddings.create(model="emotion", input="i like you", dimensions=4)

        assert np.shape([one.embedding for one in answer.data]) == (1, 4)

    def test_an_error_names_the_parameter(self, endpoint_of: EndpointOf) -> None:
        client = self.client(endpoint_of(TaskName.FEATURE_EXTRACTION))

        with client, pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="emotion", input="i like you", dimensions=WIDTH + 1)

        assert caught.value.param == "dimensions"
        assert caught.value.type == "invalid_request_error"
        assert f"this model's vectors have {WIDTH}" in str(caught.value)

    def test_models(self, endpoint_of: EndpointOf) -> None:
        with self.client(endpoint_of(TaskName.FEATURE_EXTRACTION)) as client:
            assert [model.id for model in client.models.list()] == ["emotion"]
            assert client.models.retrieve("emotion").owned_by == "penstock"
            with pytest.raises(openai.NotFoundError, match="no model 'other'"):
                client.models.retrieve("other")


class TestTriton:
    """Triton's client for the Open Inference Protocol."""

    @pytest.fixture
    def client_of(self, endpoint_of: EndpointOf) -> Any:
        clients = []

        def of(task: TaskName) -> triton.InferenceServerClient:
            client = triton.InferenceServerClient(endpoint_of(task).url.removeprefix("http://"))
            clients.append(client)
            return client

        yield of
        for client in clients:
            client.close()

    @staticmethod
    def tensor(name: str, texts: list[str], *, binary: bool) -> Any:
        tensor = triton.InferInput(name, [len(texts)], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=object), binary_data=binary)
        return tensor

    def test_health_and_metadata(self, client_of: Any) -> None:
        client = client_of(TaskName.FEATURE_EXTRACTION)

        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("emotion")
        assert client.is_model_ready("emotion", "1")
        assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
        metadata = client.get_model_metadata("emotion")
        assert metadata["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
        assert not client.is_model_ready("other")

    @pytest.mark.parametrize("sent_binary", [True, False])
    @pytest.mark.parametrize("asked_binary", [True, False])
    def test_vectors_as_json_and_binary(
        self, client_of: Any, endpoint_of: EndpointOf, sent_binary: bool, asked_binary: bool
    ) -> None:
        texts = ["i like you", "ünïcode 文"]
        outputs = [triton.InferRequestedOutput("embedding", binary_data=asked_binary)]

        result = client_of(TaskName.FEATURE_EXTRACTION).infer(
            "emotion", [self.tensor("text", texts, binary=sent_binary)], outputs=outputs, request_id="7"
        )

        expected = predict(endpoint_of(TaskName.FEATURE_EXTRACTION), {"inputs": texts})
        np.testing.assert_allclose(result.as_numpy("embedding"), expected, atol=1e-6)
        assert result.get_response()["id"] == "7"

    @pytest.mark.parametrize("sent_binary", [True, False])
    def test_the_asynchronous_client(self, endpoint_of: EndpointOf, sent_binary: bool) -> None:
        """It gives every body the content type application/octet-stream, JSON as well."""
        endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)

        async def infer() -> Any:
            async with triton_aio.InferenceServerClient(endpoint.url.removeprefix("http://")) as client:
                return await client.infer("emotion", [self.tensor("text", ["i like you"], binary=sent_binary)])

        result = asyncio.run(infer())

        expected = predict(endpoint, {"inputs": ["i like you"]})
        np.testing.assert_allclose(result.as_numpy("embedding"), expected, atol=1e-6)

    def test_labels_and_scores(self, client_of: Any) -> None:
        result = client_of(TaskName.TEXT_CLASSIFICATION).infer(
            "emotion", [self.tensor("text", ["i like you", "a dog"], binary=True)], parameters={"top_k": 2}
        )

        assert result.as_numpy("label").shape == (2, 2)
        assert result.as_numpy("label")[0].tolist() == [b"anger", b"joy"]
        assert result.as_numpy("score").dtype == np.float32

    def test_vectors_of_single_tokens(self, client_of: Any) -> None:
        client = client_of(TaskName.FEATURE_EXTRACTION)

        one = client.infer(
            "emotion", [self.tensor("text", ["i like you"], binary=True)], parameters={"pooling": "none"}
        )

        assert one.as_numpy("embedding").shape == (1, 5, WIDTH)
        with pytest.raises(InferenceServerException, match="one text only"):
            client.infer("emotion", [self.tensor("text", ["a", "b"], binary=True)], parameters={"pooling": "none"})

    @pytest.mark.parametrize(
        ("task", "tensors", "output", "shape"),
        [
            (TaskName.SENTENCE_SIMILARITY, {"source_sentence": 1, "sentences": 3}, "score", (3,)),
            (TaskName.TEXT_RANKING, {"query": 1, "texts": 2}, "score", (2,)),
            (TaskName.ZERO_SHOT_CLASSIFICATION, {"text": 2, "candidate_labels": 3}, "score", (2, 3)),
            (TaskName.TOKEN_CLASSIFICATION, {"text": 2}, "answer", (2,)),
            (TaskName.QUESTION_ANSWERING, {"question": 2, "context": 2}, "answer", (2,)),
            (TaskName.FILL_MASK, {"text": 1}, "answer", (1,)),
        ],
    )
    def test_every_task_has_tensors(
        self, client_of: Any, task: TaskName, tensors: dict[str, int], output: str, shape: tuple[int, ...]
    ) -> None:
        inputs = [
            self.tensor(name, [f"{word} [MASK]" for word in ("paris", "dog", "phone")[:count]], binary=True)
            for name, count in tensors.items()
        ]

        result = client_of(task).infer("emotion", inputs)

        assert result.as_numpy(output).shape == shape

    @pytest.mark.parametrize("binary", [True, False])
    @pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
    def test_a_compressed_request_gets_an_error(self, client_of: Any, binary: bool, algorithm: str) -> None:
        client = client_of(TaskName.FEATURE_EXTRACTION)
        tensors = [self.tensor("text", ["i like you " * 50], binary=binary)]

        with pytest.raises(InferenceServerException, match=rf"the body is compressed \({algorithm}\)") as caught:
            client.infer("emotion", tensors, request_compression_algorithm=algorithm)

        assert caught.value.status() == "415"

    @pytest.mark.parametrize(
        ("task", "tensors", "where"),
        [
            (TaskName.FEATURE_EXTRACTION, {"text": ["a", "b", ""]}, "inputs[0].data[2]"),
            (TaskName.TEXT_CLASSIFICATION, {"text": ["a", ""]}, "inputs[0].data[1]"),
            (TaskName.TOKEN_CLASSIFICATION, {"text": [""]}, "inputs[0].data[0]"),
            (TaskName.FILL_MASK, {"text": ["[MASK]", ""]}, "inputs[0].data[1]"),
            (TaskName.SENTENCE_SIMILARITY, {"sentences": ["a", "b"], "source_sentence": [""]}, "inputs[1].data[0]"),
            (TaskName.SENTENCE_SIMILARITY, {"source_sentence": ["a"], "sentences": ["b", ""]}, "inputs[1].data[1]"),
            (TaskName.TEXT_RANKING, {"query": [""], "texts": ["a", "b"]}, "inputs[0].data[0]"),
            (TaskName.TEXT_RANKING, {"texts": ["a", "b", ""], "query": ["a"]}, "inputs[0].data[2]"),
            (TaskName.QUESTION_ANSWERING, {"question": ["a", ""], "context": ["a", "b"]}, "inputs[0].data[1]"),
            (TaskName.QUESTION_ANSWERING, {"question": ["a", "b"], "context": ["a", ""]}, "inputs[1].data[1]"),
            (TaskName.ZERO_SHOT_CLASSIFICATION, {"text": ["a", ""], "candidate_labels": ["b"]}, "inputs[0].data[1]"),
            (TaskName.ZERO_SHOT_CLASSIFICATION, {"candidate_labels": ["a", ""], "text": ["b"]}, "inputs[0].data[1]"),
        ],
    )
    def test_an_error_names_the_tensor_and_the_element(
        self, endpoint_of: EndpointOf, task: TaskName, tensors: dict[str, list[str]], where: str
    ) -> None:
        inputs = [{"name": n, "datatype": "BYTES", "shape": [len(t)], "data": t} for n, t in tensors.items()]

        answer = httpx.post(f"{endpoint_of(task).url}/v2/models/emotion/infer", json={"inputs": inputs})

        assert (answer.status_code, answer.json()["field"]) == (422, where)
        assert answer.json()["error"] == f"{where} is empty"

    def test_an_error_names_the_tensor_that_is_too_large(self, endpoint_of: EndpointOf) -> None:
        texts = ["a"] * 100_000
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        url = f"{endpoint_of(TaskName.FEATURE_EXTRACTION).url}/v2/models/emotion/infer"

        answer = httpx.post(url, json={"inputs": [tensor]})

        assert (answer.status_code, answer.json()["field"]) == (422, "inputs[0]")
        assert answer.json()["error"].startswith("inputs[0] has 100000 entries; at most")

    def test_an_error_names_what_to_send(self, client_of: Any) -> None:
        client = client_of(TaskName.QUESTION_ANSWERING)

        with pytest.raises(InferenceServerException, match="no tensor 'context'"):
            client.infer("emotion", [self.tensor("question", ["who ?"], binary=True)])


class TestShapes:
    """APIs whose clients are plain HTTP."""

    def test_tei_rerank(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.TEXT_RANKING)
        texts = ["cheese", "machine learning", "a dog"]

        answer = httpx.post(
            f"{endpoint.url}/rerank", json={"query": "what is deep learning ?", "texts": texts, "return_text": True}
        ).json()

        assert [texts[one["index"]] for one in answer] == [one["text"] for one in answer]
        assert [one["score"] for one in answer] == sorted((one["score"] for one in answer), reverse=True)

    def test_tei_embed_is_the_same_as_predict(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)

        answer = httpx.post(f"{endpoint.url}/embed", json={"inputs": ["a text"], "normalize": False}).json()

        assert answer == predict(endpoint, {"inputs": ["a text"], "parameters": {"normalize": False}})

    def test_requests_of_mlservers_codecs_are_accepted(self, endpoint_of: EndpointOf) -> None:
        """StringRequestCodec.encode_request(["i like you", "a dog"]), as model_dump_json writes it."""
        endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)
        content = {"parameters": {"content_type": "str"}}
        tensor = {"name": "input-1", "shape": [2, 1], "datatype": "BYTES", **content, "data": ["i like you", "a dog"]}

        answer = httpx.post(f"{endpoint.url}/v2/models/emotion/infer", json={**content, "inputs": [tensor]})
        headers = {"parameters": {"content_type": "str", "headers": {"x": "y"}}}
        same = httpx.post(f"{endpoint.url}/v2/models/emotion/infer", json={**headers, "inputs": [tensor]})

        assert answer.status_code == same.status_code == 200, answer.text
        vectors = np.reshape(answer.json()["outputs"][0]["data"], (2, WIDTH))
        np.testing.assert_allclose(vectors, predict(endpoint, {"inputs": ["i like you", "a dog"]}), atol=1e-6)

    def test_similarity_is_the_same_from_vectors(self, endpoint_of: EndpointOf) -> None:
        body = REQUESTS[TaskName.SENTENCE_SIMILARITY]

        of_vectors = httpx.post(f"{endpoint_of(TaskName.FEATURE_EXTRACTION).url}/similarity", json=body).json()
        of_task = httpx.post(f"{endpoint_of(TaskName.SENTENCE_SIMILARITY).url}/similarity", json=body).json()

        np.testing.assert_allclose(of_vectors, of_task, atol=1e-6)

    @pytest.mark.parametrize("task", [TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY])
    def test_similarity_takes_the_documented_number_of_sentences(self, endpoint_of: EndpointOf, task: TaskName) -> None:
        endpoint = endpoint_of(task)
        document = httpx.get(f"{endpoint.url}/openapi.json").json()
        content = document["paths"]["/similarity"]["post"]["requestBody"]["content"]["application/json"]
        most = content["schema"]["properties"]["inputs"]["properties"]["sentences"]["maxItems"]
        codes = [
            httpx.post(
                f"{endpoint.url}/similarity", json={"inputs": {"source_sentence": "a", "sentences": ["b"] * count}}
            ).status_code
            for count in (most, most + 1)
        ]

        assert codes == [200, 422]

    def test_routes_of_other_apis_give_one_vector_for_each_text_of_a_plain_model(self, tmp_path: Path) -> None:
        task = TaskName.FEATURE_EXTRACTION
        model = make_model(tmp_path, task)
        (tmp_path / "modules.json").unlink()
        plain = model_of(tmp_path, task)
        body = REQUESTS[TaskName.SENTENCE_SIMILARITY]
        with serving(model, task) as pooled, serving(plain, task) as endpoint:
            tokens = predict(endpoint, {"inputs": "a text"})
            means = predict(endpoint, {"inputs": "a text", "parameters": {"pooling": "mean", "normalize": True}})
            embeddings = httpx.post(f"{endpoint.url}/v1/embeddings", json={"input": "a text"}).json()["data"]
            embedded = httpx.post(f"{endpoint.url}/embed", json={"inputs": "a text"}).json()
            cosines = httpx.post(f"{endpoint.url}/similarity", json=body).json()
            expected = httpx.post(f"{pooled.url}/similarity", json=body).json()

        assert np.shape(tokens) == (1, 4, WIDTH)
        assert [one["embedding"] for one in embeddings] == embedded == means
        np.testing.assert_allclose(cosines, expected, atol=1e-6)

    @pytest.mark.parametrize("task", list(ENCODER_TASKS))
    def test_the_root_answers_like_predict(self, endpoint_of: EndpointOf, task: TaskName) -> None:
        endpoint = endpoint_of(task)

        assert httpx.post(f"{endpoint.url}/", json=REQUESTS[task]).json() == predict(endpoint, REQUESTS[task])
