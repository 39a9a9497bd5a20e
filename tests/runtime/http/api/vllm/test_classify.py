"""`/classify`: requests as the clients of vLLM's semantic router and of vLLM send them, and their checks of answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tasks import TaskName
from tests.examples import examples
from tests.runtime.http.serving import LABELS, Endpoint, make_model, model_of, serving, write_folder

EndpointOf = Callable[[TaskName], Endpoint]
TEXT = "my name is clara and i live in berkeley"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    task = TaskName.TOKEN_CLASSIFICATION
    with serving(make_model(tmp_path_factory.mktemp("spans"), task), task) as running:
        yield running


def classify(endpoint: Endpoint, body: Any) -> Any:
    """As the semantic router's client sends it."""
    answer = httpx.post(
        f"{endpoint.url}/classify",
        content=json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(),
        headers={"content-type": "application/json", "accept": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def predict(endpoint: Endpoint, body: Any) -> Any:
    return httpx.post(f"{endpoint.url}/predict", json=body).json()


def check_spans(answer: Any, text: str) -> None:
    """The rules of token_spans.v1 that the semantic router enforces; it refuses the whole answer otherwise."""
    end = answer.get("truncated_at", len(text))
    assert 0 <= end <= len(text)
    seen = set()
    for span in answer["spans"]:
        assert 0 <= span["start"] < span["end"] <= end
        assert text[span["start"] : span["end"]] == span["text"]
        assert 0 <= span["score"] <= 1
        assert span["label"] in {"PER", "LOC"}
        seen.add((span["label"], span["start"], span["end"]))
    assert len(seen) == len(answer["spans"])


class TestTextClassifiers:
    def test_all_labels_come_as_one_flat_list(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.TEXT_CLASSIFICATION)

        answer = classify(endpoint, {"inputs": "i like you"})

        assert answer == predict(endpoint, {"inputs": "i like you"})[0]
        assert {one["label"] for one in answer} == set(LABELS[TaskName.TEXT_CLASSIFICATION])
        assert abs(sum(one["score"] for one in answer) - 1) <= 0.02

    def test_several_texts_get_a_list_each(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.TEXT_CLASSIFICATION)
        body = {"inputs": ["i like you", "a text"], "parameters": {"top_k": 1, "unknown": 1}, "other": 2}

        expected = predict(endpoint, {"inputs": body["inputs"], "parameters": {"top_k": 1}})
        assert classify(endpoint, body) == expected

    def test_a_model_with_one_output_gives_one_score(self, tmp_path: Path) -> None:
        task = TaskName.TEXT_CLASSIFICATION
        folder = write_folder(tmp_path, task)
        config = json.loads((folder / "config.json").read_bytes())
        config |= {"id2label": {"0": 7}, "label2id": {"7": 0}, "problem_type": "regression"}
        (folder / "config.json").write_text(json.dumps(config))
        model = model_of(folder, task)
        model._labels = 1
        with serving(model, task) as endpoint:
            answer = classify(endpoint, {"inputs": "i like you"})

            assert answer == [{"label": "7", "score": predict(endpoint, {"inputs": "i like you"})[0][0]["score"]}]

    @pytest.mark.parametrize("texts", ["i like you", ["i like you", "a text"]])
    def test_vllms_body_gets_vllms_answer_in_the_order_of_the_labels(
        self, endpoint_of: EndpointOf, texts: str | list[str]
    ) -> None:
        endpoint = endpoint_of(TaskName.TEXT_CLASSIFICATION)
        endpoint.server.status.labels = labels = LABELS[TaskName.TEXT_CLASSIFICATION]

        answer = classify(endpoint, {"model": "emotion", "input": texts, "truncate_prompt_tokens": 8})

        expected = predict(endpoint, {"inputs": texts})
        assert [one["label"] for one in answer["data"]] == [found[0]["label"] for found in expected]
        for one, found in zip(answer["data"], expected, strict=True):
            scores = {entry["label"]: entry["score"] for entry in found}
            assert one["probs"] == [scores[label] for label in labels]
            assert one["num_classes"] == len(labels)
        assert answer["usage"]["prompt_tokens"] > 0

    def test_vllms_body_may_ask_for_logits(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.TEXT_CLASSIFICATION)

        answer = classify(endpoint, {"input": "i like you", "use_activation": False})

        expected = predict(endpoint, {"inputs": "i like you", "parameters": {"function_to_apply": "none"}})
        assert sorted(answer["data"][0]["probs"]) == sorted(one["score"] for one in expected[0])


class TestTokenClassifiers:
    def test_spans_are_the_entities_of_predict(self, endpoint: Endpoint) -> None:
        answer = classify(endpoint, {"inputs": TEXT})

        found = predict(endpoint, {"inputs": TEXT, "parameters": {"aggregation_strategy": "simple"}})
        check_spans(answer, TEXT)
        assert "truncated_at" not in answer
        assert [(one["label"], one["start"], one["end"], one["score"]) for one in answer["spans"]] == [
            (one["entity_group"], one["start"], one["end"], one["score"]) for one in found
        ]
        assert answer["spans"]

    def test_a_text_that_was_cut_has_the_place(self, endpoint: Endpoint) -> None:
        long = " ".join([TEXT] * 20)

        (short, cut) = classify(endpoint, {"inputs": [TEXT, long]})

        check_spans(cut, long)
        assert "truncated_at" not in short
        # 62 of its tokens fit, and each word is one.
        assert cut["truncated_at"] == len(" ".join(long.split()[:62]))
        assert cut["spans"]

    def test_with_a_stride_the_whole_text_is_read(self, endpoint: Endpoint) -> None:
        long = " ".join([TEXT] * 20)

        answer = classify(endpoint, {"inputs": long, "parameters": {"stride": 8}})

        check_spans(answer, long)
        assert "truncated_at" not in answer
        assert answer["spans"][-1]["end"] > len(long) - len(TEXT)

    @given(parts=st.lists(st.sampled_from(["clara ", "berkeley ", "é", "日", "😀", "\u0301", "  ", "a", "?"])))
    @settings(max_examples=examples(100), deadline=None)
    def test_offsets_count_code_points(self, endpoint: Endpoint, parts: list[str]) -> None:
        whole = f"i live in {''.join(parts)} berkeley"

        check_spans(classify(endpoint, {"inputs": whole}), whole)

    def test_input_is_refused_with_the_name_that_works(self, endpoint: Endpoint) -> None:
        answer = httpx.post(f"{endpoint.url}/classify", json={"input": TEXT})

        assert answer.status_code == 422
        assert answer.json()["remedy"] == "Rename 'input' to 'inputs' to get spans"


def test_other_tasks_name_the_tasks_of_the_route(endpoint_of: EndpointOf) -> None:
    answer = httpx.post(f"{endpoint_of(TaskName.FILL_MASK).url}/classify", json={"inputs": "a"})

    assert answer.status_code == 404
    assert answer.json()["error"].startswith("/classify is for text-classification or token-classification")
