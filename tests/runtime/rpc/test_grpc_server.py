"""The Open Inference Protocol over gRPC, as tritonclient calls it."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from cryptography import x509
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from penstock.tasks import TaskName
from penstock_runtime.rpc.grpc_server import address_of
from penstock_runtime.rpc.messages import CALLS, message
from penstock_runtime.rpc.translation import http_request
from tests.runtime.http.secret_files import CERTIFICATE, KEY, Authority, publish
from tests.runtime.http.serving import REQUESTS, WIDTH, Endpoint, Gate, make_model, serving

VECTORS = TaskName.FEATURE_EXTRACTION


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    model = make_model(tmp_path_factory.mktemp("rpc"), VECTORS)
    with serving(model, VECTORS, grpc_port=0) as running:
        yield running


@contextmanager
def client_of(endpoint: Endpoint) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{endpoint.server.grpc_port}") as client:
        yield client


def texts(name: str, *values: str) -> Any:
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() for value in values], dtype=object))
    return tensor


def test_the_messages_have_the_fields_of_the_published_definition() -> None:
    for call in CALLS:
        for name in (f"{call}Request", f"{call}Response"):
            ours = {field.number: field.name for field in message(name).DESCRIPTOR.fields}
            published = {field.number: field.name for field in getattr(service_pb2, name).DESCRIPTOR.fields}
            assert ours.items() <= published.items()


@pytest.mark.parametrize(("given", "taken"), [("a-request", b"a-request"), ("x" * 129, b"")])
def test_the_name_of_a_call_is_taken_as_that_of_a_request(given: str, taken: bytes) -> None:
    asked = http_request("ServerLive", message("ServerLiveRequest")(), [("x-request-id", given)], None)

    assert asked.identifier == taken


def test_health_and_metadata(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("emotion")
        assert client.is_model_ready("emotion", "1")
        assert client.get_server_metadata().name == "penstock"
        found = client.get_model_metadata("emotion")

    assert (found.name, list(found.versions)) == ("emotion", ["1"])
    assert [(one.name, one.datatype, list(one.shape)) for one in found.inputs] == [("text", "BYTES", [-1])]
    assert [one.name for one in found.outputs] == ["embedding"]


def test_vectors_are_those_of_predict(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client:
        result = client.infer(
            "emotion", [texts("text", "i like you", "a téxt")], request_id="r1", parameters={"dimensions": 4}
        )

    body = {"inputs": ["i like you", "a téxt"], "parameters": {"dimensions": 4}}
    expected = httpx.post(f"{endpoint.url}/predict", json=body).json()
    np.testing.assert_array_equal(result.as_numpy("embedding"), np.asarray(expected, dtype=np.float32))
    assert result.get_response().id == "r1"


def test_texts_in_contents_are_the_same(endpoint: Endpoint) -> None:
    request = service_pb2.ModelInferRequest(model_name="emotion")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"i like you")
    with grpc.insecure_channel(f"127.0.0.1:{endpoint.server.grpc_port}") as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        answer, finished = call.with_call(request, timeout=60)
        tensor.contents.int_contents.append(3)
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=60)

        other = [("x-expect-vector-space", "vs1-0123456789abcdef")]
        del tensor.contents.int_contents[:]
        with pytest.raises(grpc.RpcError) as refused:
            call(request, metadata=other, timeout=60)

    vector = np.frombuffer(answer.raw_output_contents[0], dtype="<f4")
    expected = httpx.post(f"{endpoint.url}/predict", json={"inputs": "i like you"}).json()
    np.testing.assert_array_equal(vector, np.asarray(expected[0], dtype=np.float32))
    assert {"x-compute-time", "x-compute-tokens"} <= {name for name, _ in finished.trailing_metadata()}
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs[0].contents has int_contents, and texts are expected" in caught.value.details()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("model", "sent", "kept"),
    [("emotion", "request-1", True), ("other", "request-2", True), ("emotion", "x" * 129, False)],
)
def test_the_request_id_is_that_of_the_client_or_a_new_one(
    endpoint: Endpoint, model: str, sent: str, kept: bool
) -> None:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"i like you")
    with grpc.insecure_channel(f"127.0.0.1:{endpoint.server.grpc_port}") as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        ).future(request, timeout=60, metadata=[("x-request-id", sent)])
        found = dict(call.trailing_metadata())["x-request-id"]

    assert found
    assert (found == sent) is kept


@pytest.mark.parametrize("task", [TaskName.TEXT_RANKING, TaskName.TEXT_CLASSIFICATION, TaskName.TOKEN_CLASSIFICATION])
def test_other_tasks_have_the_tensors_of_http(task: TaskName, tmp_path: Path) -> None:
    inputs = REQUESTS[task]["inputs"]
    with serving(make_model(tmp_path, task), task, grpc_port=0) as endpoint, client_of(endpoint) as client:
        given = (
            {"query": [inputs["query"]], "texts": inputs["texts"]} if isinstance(inputs, dict) else {"text": [inputs]}
        )
        result = client.infer("emotion", [texts(name, *values) for name, values in given.items()])

        tensors = [
            {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": values}
            for name, values in given.items()
        ]
        expected = httpx.post(f"{endpoint.url}/v2/models/emotion/infer", json={"inputs": tensors}).json()
        for output in expected["outputs"]:
            found = result.as_numpy(output["name"]).reshape(-1).tolist()
            assert [one.decode() if isinstance(one, bytes) else one for one in found] == (
                output["data"]
                if output["datatype"] == "BYTES"
                else np.asarray(output["data"], dtype=np.float32).tolist()
            )


def test_the_asynchronous_client_has_many_calls_in_one_connection(endpoint: Endpoint) -> None:
    async def ask() -> list[Any]:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{endpoint.server.grpc_port}") as client:
            return await asyncio.gather(*(client.infer("emotion", [texts("text", "i like you")]) for _ in range(20)))

    vectors = [result.as_numpy("embedding").tobytes() for result in asyncio.run(ask())]
    assert len(vectors) == 20
    assert len(set(vectors)) == 1


@pytest.mark.parametrize(
    ("model", "tensor", "code", "words"),
    [
        ("other", ("text", "a"), "NOT_FOUND", "there is no model 'other' here. This endpoint's model is 'emotion'"),
        ("emotion", ("text", ""), "INVALID_ARGUMENT", "is empty"),
        ("a/../b", ("text", "a"), "NOT_FOUND", "there is no model 'a/../b' here"),
    ],
)
def test_an_error_has_the_code_and_the_words_of_http(
    endpoint: Endpoint, model: str, tensor: tuple[str, str], code: str, words: str
) -> None:
    with client_of(endpoint) as client, pytest.raises(InferenceServerException) as caught:
        client.infer(model, [texts(*tensor)])

    assert caught.value.status() == f"StatusCode.{code}"
    assert words in caught.value.message()


def test_too_many_dimensions_are_refused(endpoint: Endpoint) -> None:
    with client_of(endpoint) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("emotion", [texts("text", "a")], parameters={"dimensions": WIDTH + 1})

    assert f"this model's vectors have {WIDTH}" in caught.value.message()


def test_calls_need_a_token_where_requests_do(tmp_path: Path) -> None:
    with (
        serving(make_model(tmp_path, VECTORS), VECTORS, grpc_port=0, auth_token="secret") as endpoint,
        client_of(endpoint) as client,
    ):
        assert client.is_server_ready()
        for headers in ({}, {"authorization": "Bearer wrong"}):
            with pytest.raises(InferenceServerException) as caught:
                client.infer("emotion", [texts("text", "a")], headers=headers)
            assert caught.value.status() == "StatusCode.UNAUTHENTICATED"

        result = client.infer("emotion", [texts("text", "a")], headers={"authorization": "Bearer secret"})
        assert result.as_numpy("embedding").shape == (1, WIDTH)


def test_a_changed_certificate_is_used_for_new_connections(tmp_path: Path) -> None:
    authority = Authority()
    folder = tmp_path / "tls"
    publish(folder, authority.issue(1), 1)
    gate = Gate()
    gate.open()
    root = authority._signed(authority.key.public_key(), "the authority", 1)
    trusted = grpc.ssl_channel_credentials(root.encode())
    with serving(gate, VECTORS, grpc_port=0, tls_certificate=folder / CERTIFICATE, tls_key=folder / KEY) as endpoint:
        address = f"127.0.0.1:{endpoint.server.grpc_port}"
        for number in (1, 2):
            served = ssl.get_server_certificate(("127.0.0.1", endpoint.server.grpc_port), timeout=60)
            assert x509.load_pem_x509_certificate(served.encode()).serial_number == number
            publish(folder, authority.issue(number + 1), number + 1)
        with triton.InferenceServerClient(address, ssl=True, creds=trusted) as client:
            assert client.is_server_ready()


def test_a_message_over_the_limit_of_bodies_is_refused(tmp_path: Path) -> None:
    with (
        serving(make_model(tmp_path, VECTORS), VECTORS, grpc_port=0, max_body_bytes=2048) as endpoint,
        client_of(endpoint) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer("emotion", [texts("text", "a" * 4096)])

    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_a_call_that_its_client_cancels_is_cancelled_in_the_queue() -> None:
    gate = Gate()
    with serving(gate, VECTORS, grpc_port=0) as endpoint, client_of(endpoint) as client:
        call = client.async_infer("emotion", [texts("text", "a")], callback=lambda result, error: None)
        gate.wait_for("waiting", 1)
        call.cancel()
        gate.wait_for("cancelled", 1)


def test_calls_in_progress_are_answered_while_the_server_drains() -> None:
    gate = Gate()
    with serving(gate, VECTORS, grpc_port=0, drain_limit_seconds=60.0) as endpoint, client_of(endpoint) as client:
        results: list[Any] = []
        answered = threading.Event()

        def keep(result: Any, error: Any) -> None:
            results.append((result, error))
            answered.set()

        client.async_infer("emotion", [texts("text", "a")], callback=keep)
        gate.wait_for("waiting", 1)
        endpoint.stop()
        gate.open()
        assert answered.wait(60)

    ((result, error),) = results
    assert error is None
    assert result.as_numpy("embedding").tolist() == [0.5]


def test_a_server_that_loads_is_alive_and_not_ready() -> None:
    with serving(None, VECTORS, grpc_port=0) as endpoint, client_of(endpoint) as client:
        assert client.is_server_live()
        assert client.is_server_ready() is False
        assert client.is_model_ready("emotion") is False
        with pytest.raises(InferenceServerException) as caught:
            client.infer("emotion", [texts("text", "a")])

    assert caught.value.status() == "StatusCode.UNAVAILABLE"


@pytest.mark.parametrize(
    ("peer", "address"), [("ipv4:10.0.0.1:47", "10.0.0.1"), ("ipv6:%5B::1%5D:47", "::1"), ("unix:/tmp/x", ""), ("", "")]
)
def test_the_address_of_a_peer(peer: str, address: str) -> None:
    assert address_of(peer) == address
