"""Requests as KServe's V1 clients send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.tasks import ENCODER_TASKS, TaskName
from tests.runtime.http.serving import REQUESTS, Endpoint

EndpointOf = Callable[[TaskName], Endpoint]


ONE_OBJECT = (TaskName.TEXT_RANKING, TaskName.SENTENCE_SIMILARITY)


PREDICT = "/v1/models/emotion:predict"


def predict(endpoint: Endpoint, body: Any) -> Any:
    return httpx.post(f"{endpoint.url}/predict", json=body).json()


class TestKServe:
    """`POST /v1/models/{model}:predict` with `{"instances": [...]}`."""

    @pytest.mark.parametrize("field", ["instances", "inputs"])
    @pytest.mark.parametrize("task", [task for task in ENCODER_TASKS if task not in ONE_OBJECT])
    def test_a_prediction_for_each_instance(self, endpoint_of: EndpointOf, task: TaskName, field: str) -> None:
        endpoint = endpoint_of(task)
        request = REQUESTS[task]
        instances = [request["inputs"]] * 2
        more = {name: value for name, value in request.items() if name != "inputs"}

        answer = httpx.post(endpoint.url + PREDICT, json={field: instances, **more})

        assert answer.status_code == 200, answer.text
        assert answer.json() == {"predictions": predict(endpoint, {"inputs": instances, **more})}
        assert len(answer.json()["predictions"]) == 2

    @pytest.mark.parametrize("task", ONE_OBJECT)
    def test_one_object_with_several_texts_is_one_instance(self, endpoint_of: EndpointOf, task: TaskName) -> None:
        endpoint = endpoint_of(task)
        one = REQUESTS[task]["inputs"]

        answer = httpx.post(endpoint.url + PREDICT, json={"instances": [one]})
        two = httpx.post(endpoint.url + PREDICT, json={"instances": [one, one]})

        assert answer.json() == {"predictions": [predict(endpoint, REQUESTS[task])]}
        assert two.status_code == 422

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"instances": ["a", ""]}, "instances[1]"),
            ({"instances": []}, "instances"),
            ({"instances": "a"}, "instances"),
            ({"instance": ["a"]}, "instances"),
            ({"instances": ["a"], "signature_name": "x"}, "signature_name"),
            ({"instances": ["a"], "parameters": 1}, "parameters"),
            ({"instances": ["a"], "parameters": {"normalise": True}}, "parameters.normalise"),
            (["a"], ""),
        ],
    )
    def test_errors_name_the_field(self, endpoint_of: EndpointOf, body: Any, param: str) -> None:
        answer = httpx.post(endpoint_of(TaskName.FEATURE_EXTRACTION).url + PREDICT, json=body)

        assert (answer.status_code, answer.json().get("field", "")) == (422, param)

    def test_another_model_is_not_found(self, endpoint_of: EndpointOf) -> None:
        url = endpoint_of(TaskName.FEATURE_EXTRACTION).url

        assert httpx.post(f"{url}/v1/models/other:predict", json={"instances": ["a"]}).status_code == 404
        assert httpx.get(url + PREDICT).status_code == 405

    def test_the_models_have_the_fields_of_openai_and_of_kserve(self, endpoint_of: EndpointOf) -> None:
        url = endpoint_of(TaskName.FEATURE_EXTRACTION).url

        models = httpx.get(f"{url}/v1/models").json()
        model = httpx.get(f"{url}/v1/models/emotion").json()

        assert models["models"] == ["emotion"]
        assert models["data"] == [model]
        assert (model["id"], model["name"], model["ready"]) == ("emotion", "emotion", True)
