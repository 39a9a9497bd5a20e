"""The parsers alone: any input gives a value or a RequestError with a reason."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httptools
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tasks import TaskName
from penstock_runtime.errors import RequestError
from penstock_runtime.http.api.core.bodies import Envelope, read_json
from penstock_runtime.http.api.kserve.requests import HEADER_LENGTH, read_inference
from penstock_runtime.http.api.kserve.signatures import SIGNATURES
from penstock_runtime.http.api.kserve.tensors import OutputTensor, read_texts
from penstock_runtime.http.transport.message import Request, Response, encode
from penstock_runtime.tasks.factory import request_schema
from tests.examples import examples
from tests.runtime.http.feeding import feed
from tests.runtime.http.serving import post

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=5)


def request(body: bytes) -> Request:
    made = Request("POST", "/predict")
    made.body = body
    return made


def tried(parse: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call, or the RequestError that it raises."""
    try:
        return parse(*arguments)
    except RequestError as error:
        assert error.message  # noqa: PT017 - whichever comes, comes with words
        return error


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_as_json_or_refused_with_a_reason(body: bytes) -> None:
    value = tried(read_json, request(body))

    if isinstance(value, RequestError):
        assert value.status == 400
        assert value.remedy
    else:
        assert value == orjson.loads(body)


@pytest.mark.parametrize("task", list(TaskName))
@given(data=st.data())
@settings(max_examples=examples(60))
def test_any_json_is_parsed_as_a_request_or_refused_with_a_reason(task: TaskName, data: st.DataObject) -> None:
    envelope = Envelope(request_schema(task), top_level_parameters=True)
    names = st.sampled_from(["inputs", "parameters", "options", *envelope.parameters]) | st.text(max_size=8)
    body: Any = data.draw(JSON_VALUES | st.dictionaries(names, JSON_VALUES, max_size=4))

    opened = tried(envelope.open, body)

    if isinstance(opened, RequestError):
        assert opened.status == 422
    else:
        inputs, parameters = opened
        assert inputs == (body if isinstance(body, str) else body["inputs"])
        assert isinstance(parameters, dict)


@given(TEXTS)
def test_texts_survive_the_binary_form(texts: list[str]) -> None:
    header, data = OutputTensor("text", (len(texts),), texts=texts).as_binary()

    assert header["parameters"]["binary_data_size"] == len(data)
    assert read_texts(header, data, "inputs[0]") == texts


@given(st.binary(max_size=60), st.lists(st.integers(0, 5), max_size=3))
def test_any_binary_tensor_is_parsed_or_refused_with_a_reason(data: bytes, shape: list[int]) -> None:
    texts = tried(read_texts, {"datatype": "BYTES", "shape": shape}, data, "inputs[0]")

    if isinstance(texts, RequestError):
        assert texts.field.startswith("inputs[0]")
    else:
        assert b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts) == data


@pytest.mark.parametrize(
    ("shape", "words"),
    [([1] * 33, "must be a list of sizes"), ([2**31 - 1] * 100_000, "must be a list of sizes"), ([3], "more than 3")],
    ids=["33 dimensions", "a hundred thousand", "more texts than it states"],
)
def test_a_tensor_that_would_take_seconds_is_refused_at_once(shape: list[int], words: str) -> None:
    empty_texts = bytes(4) * 1_000_000

    refused = tried(read_texts, {"datatype": "BYTES", "shape": shape}, empty_texts, "inputs[0]")

    assert isinstance(refused, RequestError)
    assert words in refused.message
    assert refused.field == "inputs[0].shape"


@pytest.mark.parametrize("digits", [19, 5000])
def test_a_header_of_too_many_digits_is_no_length(digits: int) -> None:
    sent = request(b'{"inputs": []}')
    sent.headers[HEADER_LENGTH] = b"9" * digits

    refused = tried(read_inference, sent, SIGNATURES[TaskName.FEATURE_EXTRACTION])

    assert isinstance(refused, RequestError)
    assert (refused.status, refused.field) == (422, HEADER_LENGTH.decode())


def test_a_mistyped_field_is_looked_for_among_the_first_hundred() -> None:
    envelope = Envelope(request_schema(TaskName.FEATURE_EXTRACTION), top_level_parameters=True)
    others = {f"field {index}": index for index in range(100_000)}

    near = tried(envelope.open, {"input": "x", **others})
    far = tried(envelope.open, {**others, "input": "x"})

    assert "did you mean it instead of 'input'?" in near.message
    assert far.message == "body has no field 'inputs'"


@pytest.mark.parametrize("task", list(TaskName))
@given(data=st.data())
@settings(max_examples=examples(60))
def test_any_tensors_are_parsed_or_refused_with_a_reason(task: TaskName, data: st.DataObject) -> None:
    signature = SIGNATURES[task]
    name = st.sampled_from([spec.name for spec in signature.inputs]) | st.text(max_size=5) | JSON_VALUES
    tensor = st.fixed_dictionaries(
        {},
        optional={
            "name": name,
            "datatype": st.sampled_from(["BYTES", "FP32", 3]),
            "shape": st.lists(st.integers(-1, 4), max_size=2) | JSON_VALUES,
            "data": TEXTS | JSON_VALUES,
            "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 40) | JSON_VALUES}),
        },
    )
    body = {
        "inputs": data.draw(st.lists(tensor, max_size=3) | JSON_VALUES),
        "outputs": data.draw(st.none() | st.lists(st.fixed_dictionaries({"name": name}), max_size=2) | JSON_VALUES),
        "parameters": data.draw(JSON_VALUES),
    }
    json = orjson.dumps(body)
    length = data.draw(st.sampled_from([str(len(json)), "0", "-1", "99999", "x"]) | st.text("0123456789", max_size=3))
    sent = request(json + data.draw(st.binary(max_size=40)))
    sent.headers[HEADER_LENGTH] = length.encode()

    inference = tried(read_inference, sent, signature)

    if isinstance(inference, RequestError):
        assert inference.status in {400, 422}
    else:
        assert set(inference.tensors) == {spec.name for spec in signature.inputs}


@given(st.lists(st.binary(max_size=60), max_size=8))
@settings(max_examples=examples(200))
def test_any_bytes_on_a_connection_are_answered_or_are_an_incomplete_request(pieces: list[bytes]) -> None:
    written = asyncio.run(feed(pieces)).written

    for answer in written.split(b"HTTP/1.1 ")[1:]:
        assert int(answer[:3]) in {200, 204, 400, 404, 405, 422}


@given(
    st.lists(
        st.sampled_from(
            [
                b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
                b'POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n"x"',
                b'POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\n"x"\r\n0\r\n\r\n',
                b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
                (
                    b"POST /predict HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
                    b'content-length: 3\r\n\r\n"x"'
                ),
            ]
        ),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(0, 400), max_size=12),
)
@settings(max_examples=examples(150))
def test_requests_are_parsed_the_same_in_any_segmentation(requests: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(requests)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})

    written = asyncio.run(feed([stream[start:end] for start, end in pairwise(edges)])).written

    expected = [b"404" if b"nowhere" in one else b"200" for one in requests]
    assert [answer[:3] for answer in written.split(b"HTTP/1.1 ")[1:]] == expected


@pytest.mark.parametrize("name", [[], {}, None, 3, True])
def test_a_tensor_whose_name_is_not_a_string_is_refused_with_a_reason(name: Any) -> None:
    body = {"inputs": [{"name": name, "datatype": "BYTES", "shape": [1], "data": ["a"]}]}

    refused = tried(read_inference, request(orjson.dumps(body)), SIGNATURES[TaskName.FEATURE_EXTRACTION])

    assert isinstance(refused, RequestError)
    assert (refused.status, refused.field) == (422, "inputs[0].name")


@pytest.mark.timeout(60)  # a failure would block the event loop
@pytest.mark.parametrize(
    ("behind", "codes"),
    [
        pytest.param(post("/predict", b"x" * 3000) + b"nonsense\r\n\r\n", [413], id="too large, and nonsense"),
        pytest.param(post("/predict", b"x" * 3000) * 2, [413], id="too large, twice"),
        pytest.param(post("/predict", b'"%b"' % (b"x" * 1900)) * 3, [200, 429], id="more than is held, twice"),
        pytest.param(post("/nowhere", b"x") + b"nonsense\r\n\r\n", [404, 400], id="no route, and nonsense"),
        pytest.param(post("/nowhere", b"x") + post("/predict", b"x" * 3000), [404, 413], id="no route, and too large"),
        pytest.param(post("/nowhere", b"x", "connection: close") * 2, [404], id="no route and the end, and more"),
    ],
)
def test_refusals_behind_a_slow_request_are_sent_up_to_the_one_that_closes_the_connection(
    behind: bytes, codes: list[int]
) -> None:
    pieces = [post("/predict", b'"x"') + behind]

    fed = asyncio.run(feed(pieces, opens_at=len(pieces), max_body_bytes=2000, max_held_bytes=3000))

    assert [int(answer[:3]) for answer in fed.written.split(b"HTTP/1.1 ")[1:]] == [200, *codes]
    assert fed.written.count(b"connection: close") == 1
    assert fed.held_bytes == 0


@given(
    st.binary(max_size=50),
    st.sampled_from([200, 204, 304, 404, 503]),
    st.booleans(),
    st.sampled_from([b"", b"close", b"keep-alive"]),
)
def test_responses_are_valid_http(body: bytes, status: int, head_only: bool, connection: bytes) -> None:
    seen: dict[str, Any] = {"body": b"", "headers": {}}

    class Reader:
        def on_header(self, name: bytes, value: bytes) -> None:
            seen["headers"][name] = value

        def on_body(self, piece: bytes) -> None:
            seen["body"] += piece

    response = Response(body, status=status, headers=b"x-one: 1\r\nx-two: 2\r\n")
    request = Request("HEAD" if head_only else "GET")
    request.identifier = b"7"
    request.keep_alive_by_header = connection == b"keep-alive"
    written = encode(response, request, b"now", close=connection == b"close")
    parser = httptools.HttpResponseParser(Reader())
    parser.feed_data(written)

    assert parser.get_status_code() == status
    bodiless = head_only or status in {204, 304}
    assert seen["body"] == (b"" if bodiless else body)
    assert seen["headers"][b"x-two"] == b"2"
    assert seen["headers"].get(b"connection", b"") == connection
    assert (b"content-length" in seen["headers"]) == (status not in {204, 304})
