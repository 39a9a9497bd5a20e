"""The routes of text-generation-inference and of the pipeline, with huggingface_hub's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

from tests.runtime.generation.small_model import serving_generation, small_generation_model
from tests.runtime.http.serving import Endpoint


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with serving_generation(small_generation_model(tmp_path_factory.mktemp("model"))) as running:
        yield running


def post(endpoint: Endpoint, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{endpoint.url}{path}", json=body, timeout=60, verify=False)


class TestHuggingFaceHub:
    def test_a_text_is_continued(self, endpoint: Endpoint) -> None:
        client = InferenceClient(model=endpoint.url)
        text = client.text_generation("Once", max_new_tokens=8)
        assert (
            text
            == post(endpoint, "/generate", {"inputs": "Once", "parameters": {"max_new_tokens": 8}}).json()[
                "generated_text"
            ]
        )

    def test_details_have_the_tokens_and_the_reason(self, endpoint: Endpoint) -> None:
        client = InferenceClient(model=endpoint.url)
        answer = client.text_generation("Once", max_new_tokens=8, details=True, seed=3, temperature=1.5)
        assert answer.details is not None
        assert answer.details.finish_reason == "length"
        assert answer.details.generated_tokens == 8
        assert answer.details.seed == 3
        assert [token.logprob <= 0 for token in answer.details.tokens] == [True] * 8

    def test_a_stream_has_the_text(self, endpoint: Endpoint) -> None:
        client = InferenceClient(model=endpoint.url)
        whole = client.text_generation("Once", max_new_tokens=8)
        assert "".join(client.text_generation("Once", max_new_tokens=8, stream=True)) == whole
        events = list(client.text_generation("Once", max_new_tokens=8, stream=True, details=True))
        assert [event.token.id >= 0 for event in events] == [True] * 8
        assert events[-1].generated_text == whole

    def test_the_prompt_may_be_part_of_the_text(self, endpoint: Endpoint) -> None:
        client = InferenceClient(model=endpoint.url)
        assert client.text_generation("Once", max_new_tokens=2, return_full_text=True).startswith("Once")

    def test_a_grammar_gives_the_form_of_the_text(self, endpoint: Endpoint) -> None:
        client = InferenceClient(model=endpoint.url)
        number: Any = {"type": "regex", "value": "[0-9]{5}"}
        assert client.text_generation("Once", max_new_tokens=20, grammar=number).isdecimal()
        schema: Any = {"type": "json", "value": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}
        assert isinstance(json.loads(client.text_generation("Once", max_new_tokens=60, grammar=schema)), list)

    def test_a_conversation_is_answered_also_as_a_stream(self, endpoint: Endpoint) -> None:
        client = InferenceClient(base_url=f"{endpoint.url}/v1")
        messages: Any = [{"role": "user", "content": "Hello"}]
        answer = client.chat_completion(messages, max_tokens=8, temperature=0)
        assert answer.choices[0].finish_reason == "length"
        chunks = client.chat_completion(messages, max_tokens=8, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"watermark": True}, "watermark"),
        ({"grammar": {"type": "lark", "value": "a"}}, "parameters.grammar.type"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"best_of": 2}, "best_of"),
        ({"adapter_id": "x"}, "adapter_id"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
def test_unsupported_parameters_are_refused_by_name(
    endpoint: Endpoint, path: str, parameters: dict[str, Any], field: str
) -> None:
    answer = post(endpoint, path, {"inputs": "Once", "parameters": parameters})
    assert answer.status_code == 400
    assert answer.json()["error_type"] == "unsupported_option"
    assert answer.json()["field"] == field


class TestPipeline:
    def test_the_answer_is_that_of_the_pipeline(self, endpoint: Endpoint) -> None:
        parameters = {"max_new_tokens": 4, "do_sample": False}
        (one,) = post(endpoint, "/predict", {"inputs": "Once", "parameters": parameters}).json()
        assert one["generated_text"].startswith("Once")
        several = post(endpoint, "/predict", {"inputs": ["Once", "Twice"], "parameters": parameters}).json()
        assert several[0] == [one]
        assert several[1][0]["generated_text"].startswith("Twice")

    def test_a_conversation_gets_a_message_more(self, endpoint: Endpoint) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        (one,) = post(endpoint, "/predict", {"inputs": messages, "parameters": {"max_new_tokens": 4}}).json()
        assert one["generated_text"][0] == messages[0]
        assert one["generated_text"][1]["role"] == "assistant"

    def test_continuations_and_stop_strings(self, endpoint: Endpoint) -> None:
        parameters = {"max_new_tokens": 30, "num_return_sequences": 2, "seed": 1, "return_full_text": False}
        texts = [
            one["generated_text"]
            for one in post(endpoint, "/predict", {"inputs": "a", "parameters": parameters}).json()
        ]
        assert len(set(texts)) == 2
        stop = texts[0][5:7]
        parameters["stop_strings"] = stop
        stopped = post(endpoint, "/predict", {"inputs": "a", "parameters": parameters}).json()
        assert stopped[0]["generated_text"] == texts[0][: texts[0].index(stop) + 2]

    @pytest.mark.parametrize(
        ("body", "status", "field"),
        [
            ({"inputs": "a" * 600}, 400, "inputs"),
            ({"inputs": 5}, 422, "inputs"),
            ({"inputs": "a", "parameters": {"num_beams": 2}}, 422, "parameters.num_beams"),
            ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, 422, "parameters.max_new_tokens"),
        ],
    )
    def test_bad_requests_are_refused(self, endpoint: Endpoint, body: Any, status: int, field: str) -> None:
        answer = post(endpoint, "/predict", body)
        assert answer.status_code == status
        assert answer.json().get("field", "") == field

    def test_other_servers_routes_answer_as_predict(self, endpoint: Endpoint) -> None:
        parameters = {"max_new_tokens": 4, "do_sample": False}
        expected = post(endpoint, "/predict", {"inputs": ["Once"], "parameters": parameters}).json()
        kserve = post(endpoint, "/v1/models/smol:predict", {"instances": ["Once"], "parameters": parameters})
        assert kserve.json() == {"predictions": expected}
        long = post(endpoint, "/v1/models/smol:predict", {"instances": ["Once", "a" * 600]})
        assert long.json()["error"].startswith("instances[1] has 600 tokens")
        sagemaker = post(endpoint, "/invocations", {"inputs": ["Once"], "parameters": parameters})
        assert sagemaker.json() == expected


def test_a_slow_reader_delays_no_other_request(endpoint: Endpoint) -> None:
    with (
        httpx.Client(verify=False, timeout=60) as client,
        client.stream(
            "POST", f"{endpoint.url}/generate_stream", json={"inputs": "a", "parameters": {"max_new_tokens": 400}}
        ),
    ):
        assert post(endpoint, "/generate", {"inputs": "b", "parameters": {"max_new_tokens": 4}}).status_code == 200
