"""Errors of requests and of the server: status, shape, field, remedy. And access by token."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_runtime import errors
from penstock_runtime.errors import RequestError
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.settings import Settings
from penstock_runtime.tasks.factory import make_task
from tests.runtime.http.serving import Endpoint, Gate, Model, make_model, serving, write_folder

EndpointOf = Callable[[TaskName], Endpoint]
LONG = "a " * 99
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Of a feature-extraction endpoint with small limits."""
    task = TaskName.FEATURE_EXTRACTION
    flags: Any = {"max_body_bytes": 2000, "max_inputs": 4}
    model = make_model(tmp_path_factory.mktemp("model"), task, Settings.load({}, flags))
    with serving(model, task, **flags) as endpoint, httpx.Client(base_url=endpoint.url) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "status", "error", "field", "remedy"),
    [
        (b"", 400, "the body is empty", None, 'Send JSON such as {"inputs": "some text"}'),
        (b"{", 400, "the body is not JSON: unexpected end of data at line 1, column 2", None, "Send JSON with"),
        (b'{"inputs":\n  nope}', 400, "at line 2, column", None, "Send JSON with"),
        (b'{"inputs": "a"} x', 400, "unexpected content after document", None, "Send JSON with"),
        (b'{"inputs": NaN}', 400, "line 1, column 12", None, "JSON has no NaN and no Infinity"),
        (b'{"inputs": "a", "parameters": {"x": 1e999}}', 400, "infinity", None, "JSON has no NaN and no Infinity"),
        (b'{"inputs": "\xff"}', 400, "UTF-8", None, "Encode the body as UTF-8"),
        (b'{"inputs": "\\ud800"}', 400, "surrogate", None, "Send characters outside the basic plane as a pair"),
        (b"[" * 1500, 400, "it is nested too deeply at line 1", None, "Send JSON with"),
        (b"[" * 1900 + b"1" + b"]" * 99, 400, "it is nested too deeply", None, "Send JSON with"),
        (b"[]", 422, "body must be an object, not a list", None, 'Send {"inputs": …}'),
        (b"17", 422, "body must be an object, not the number 17", None, 'Send {"inputs": …}'),
        (b"{}", 422, "body has no field 'inputs'", "inputs", "Add 'inputs' (/docs has an example)"),
        (
            b'{"input": "x"}', 422, "body has no field 'inputs'; did you mean it instead of 'input'?", "inputs",
            "Rename 'input' to 'inputs'",
        ),
        (b'{"inputs": "x", "paramters": {}}', 422, "there is no field 'paramters'", "paramters", "Did you mean 'param"),
        (b'{"inputs": "x", "parameters": []}', 422, "parameters must be an object", "parameters", "Give an object"),
        (b'{"inputs": "x", "options": 1}', 422, "options must be an object", "options", "Leave it out"),
        (b'{"inputs": "x", "options": {"use_cach": true}}', 422, "no option 'use_cach'", "use_cach", "'use_cache'"),
        (b'{"inputs": "x", "parameters": {"normalise": true}}', 422, "no such field", "parameters.normalise", "norm"),
        (b'{"inputs": "x", "normalize": 1}', 422, "parameters.normalize must be true or false", "parameters.norm", ""),
        (
            b'{"inputs": "x", "normalize": true, "parameters": {"normalize": true}}', 422,
            "'normalize' is both next to 'inputs' and in 'parameters'", "normalize", "Give one",
        ),
        (b'{"inputs": ""}', 422, "inputs is empty", "inputs", "Send a text with at least one character"),
        (b'{"inputs": ["a", ""]}', 422, "inputs[1] is empty", "inputs[1]", "Send a text"),
        (b'{"inputs": ["a", 1]}', 422, "inputs[1] must be a text, not the number 1", "inputs[1]", "Send a text"),
        (b'{"inputs": ["a", "a", "a", "a", "a"]}', 422, "at most 4 fit", "inputs", "Split it"),
        (b'{"inputs": "%s"}' % b"a " * 100, 400, "unexpected content", None, ""),
        (
            b'{"inputs": "%s", "truncate": false}' % (b"a " * 100), 422, "inputs has", "inputs",
            "Send a shorter text, or set parameters.truncate to true",
        ),
        (b'"' + b"x" * 3000 + b'"', 413, "the body is over 2000 bytes", None, "Send fewer or shorter texts"),
    ],
)  # fmt: skip
def test_an_invalid_body_is_refused_with_a_reason(  # noqa: PLR0917 - the columns of the table
    client: httpx.Client, body: bytes, status: int, error: str, field: str | None, remedy: str
) -> None:
    answer = client.post("/predict", content=body, headers=JSON)

    value = answer.json()
    assert answer.status_code == status, value
    assert error in value["error"]
    assert (value.get("field") or "").startswith(field or ""), value
    assert (field is None) == ("field" not in value)
    assert remedy in value.get("remedy", "")
    assert set(value) <= {"error", "error_type", "field", "remedy"}


@pytest.mark.parametrize(
    ("body", "answer_count"),
    [
        (b'"a bare text"', 1),
        (b'{"inputs": "x", "parameters": null, "options": {"use_cache": false, "wait_for_model": true}}', 1),
        (b'{"inputs": "x", "truncate": true, "parameters": {"normalize": false}}', 1),
        (b'{"inputs": "x", "inputs": ["y", "z"]}', 2),
        (b'\n {"inputs": ["x"]}\n', 1),
    ],
    ids=["bare text", "the hosted API's options", "a parameter next to inputs", "the last of two keys", "white space"],
)
def test_a_tolerable_body_is_answered(client: httpx.Client, body: bytes, answer_count: int) -> None:
    answer = client.post("/predict", content=body, headers=JSON)

    assert answer.status_code == 200, answer.text
    assert len(answer.json()) == answer_count


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({}, 200),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
        ({"content-type": "application/json", "x-use-cache": "0", "x-wait-for-model": "1"}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "x-deadline-ms": "0"}, 422),
        ({"content-type": "application/json", "x-deadline-ms": "soon"}, 422),
        ({"content-type": "application/json", "x-deadline-ms": "nan"}, 422),
    ],
)
def test_headers_of_a_request(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    answer = client.post("/predict", content=b'{"inputs": "x"}', headers=headers)

    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["remedy"]


class TestRoutes:
    """Existing and missing routes."""

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("/classify", "/classify is for "),
            ("/embedd", "there is no /embedd; did you mean /embed?"),
            ("/v1/chat/completions", "is for text-generation, and this endpoint does feature-extraction"),
            ("/v1/responses", "is for text-generation, and this endpoint does feature-extraction"),
            ("/v1/files", "there is no /v1/files"),
            ("/" + "x" * 500, "there is no /" + "x" * 99 + "…"),
            ("/%2e%2e/etc/passwd", "there is no /%2e%2e/etc/passwd"),
        ],
    )
    def test_the_error_for_a_missing_route_lists_the_routes(
        self, client: httpx.Client, path: str, message: str
    ) -> None:
        answer = client.post(path, json={})

        assert answer.status_code == 404
        value = answer.json()["error"]
        text = f"{value['message']}" if isinstance(value, dict) else f"{value}. {answer.json()['remedy']}"
        assert message in text
        assert (
            "POST to /, /api/embed, /api/embeddings, /api/show, /decode, /embed, /embed_all, /embed_sparse, "
            "/invocations, /predict, /rerank, /similarity, /tokenize, /v1/embeddings" in text
        )

    @pytest.mark.parametrize(
        ("method", "path", "allow"),
        [
            ("GET", "/predict", "OPTIONS, POST"),
            ("DELETE", "/", "GET, HEAD, OPTIONS, POST"),
            ("POST", "/healthz", "GET, HEAD, OPTIONS"),
            ("PUT", "/v2/models/emotion/infer", "OPTIONS, POST"),
        ],
    )
    def test_the_error_for_a_wrong_method_lists_the_allowed_ones(
        self, client: httpx.Client, method: str, path: str, allow: str
    ) -> None:
        answer = client.request(method, path)

        assert answer.status_code == 405
        assert answer.headers["allow"] == allow
        assert answer.json()["error_type"] == "method"
        assert client.options(path).headers["allow"] == allow

    def test_a_trailing_slash_is_ignored(self, client: httpx.Client) -> None:
        assert client.post("/predict/", json={"inputs": "x"}).status_code == 200

    @pytest.mark.parametrize("path", ["/openai/v1/embeddings", "/embeddings", "/openai/v1/embeddings/"])
    def test_openais_api_is_also_where_other_servers_have_it(self, client: httpx.Client, path: str) -> None:
        expected = client.post("/v1/embeddings", json={"input": "x"}).json()["data"]

        assert client.post(path, json={"input": "x"}).json()["data"] == expected
        assert client.post(path, json={}).json()["error"]["param"] == "input"
        assert client.get("/openai/v1/models").json() == client.get("/models").json() == client.get("/v1/models").json()

    def test_a_path_of_another_server_for_another_task_names_the_task(self, client: httpx.Client) -> None:
        for path in ("/openai/v1/chat/completions", "/chat/completions"):
            refused = client.post(path, json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
            assert "is for text-generation" in refused.json()["error"]["message"]

    def test_openai_routes_have_openai_errors(self, client: httpx.Client) -> None:
        answer = client.post("/v1/embeddings", json={"inpt": "x"})

        assert answer.status_code == 400
        assert answer.json() == {
            "error": {
                "message": "body.inpt: there is no such field. Did you mean 'input'?",
                "type": "invalid_request_error",
                "param": "inpt",
                "code": "validation",
            }
        }

    @pytest.mark.parametrize(
        ("task", "path", "body", "field"),
        [
            (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": ["a", ""]}, "inputs[1]"),
            (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": "a", "dimensions": 10_000}, "dimensions"),
            (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": [5, 6, 99_999]}, "inputs[2]"),
            (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": [[5], [6, -1]]}, "inputs[1][1]"),
            (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": [[5], []]}, "inputs[1]"),
            (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": [5, "a"]}, "inputs[1]"),
            (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": [5] * 99, "truncate": False}, "inputs"),
            (
                TaskName.FEATURE_EXTRACTION,
                "/similarity",
                {"inputs": {"source_sentence": "a", "sentences": []}},
                "inputs.se",
            ),
            (
                TaskName.FEATURE_EXTRACTION,
                "/similarity",
                {"inputs": {"source_sentence": "a", "sentences": ["b", "c " * 99]}, "parameters": {"truncate": False}},
                "inputs.sentences[1]",
            ),
            (
                TaskName.FEATURE_EXTRACTION,
                "/similarity",
                {"inputs": {"source_sentence": "a " * 99, "sentences": ["b"]}, "parameters": {"truncate": False}},
                "inputs.source_sentence",
            ),
            (TaskName.TEXT_RANKING, "/rerank", {"query": "a", "texts": ["b", 3]}, "texts[1]"),
            (TaskName.TEXT_RANKING, "/rerank", {"query": "a", "texts": ["b"], "truncate": "x"}, "truncate"),
            (TaskName.TEXT_RANKING, "/rerank", {"query": "a", "texts": ["a " * 99], "truncate": False}, "texts[0]"),
            (TaskName.TEXT_RANKING, "/v1/rerank", {"query": "a", "documents": [{"txt": "b"}]}, "documents[0].text"),
            (TaskName.TEXT_RANKING, "/v2/rerank", {"query": "", "documents": ["b"]}, "query"),
        ],
    )
    def test_errors_name_the_fields_of_the_shape_that_was_used(
        self, endpoint_of: EndpointOf, task: TaskName, path: str, body: dict[str, Any], field: str
    ) -> None:
        answer = httpx.post(endpoint_of(task).url + path, json=body)

        assert answer.status_code == 422
        assert answer.json()["field"].startswith(field)


@pytest.mark.parametrize(
    ("task", "path", "body", "remedy"),
    [
        (TaskName.FEATURE_EXTRACTION, "/predict", {"inputs": LONG}, "or set parameters.truncate to true"),
        (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": LONG}, "or set truncate to true"),
        (TaskName.FEATURE_EXTRACTION, "/v1/embeddings", {"input": LONG}, ""),
        (TaskName.TEXT_RANKING, "/rerank", {"query": "a", "texts": [LONG]}, "or set truncate to true"),
        (TaskName.TEXT_RANKING, "/v1/rerank", {"query": "a", "documents": [LONG]}, ""),
        (TaskName.TEXT_CLASSIFICATION, "/classify", {"inputs": LONG}, "or set parameters.truncate to true"),
        (TaskName.TEXT_CLASSIFICATION, "/classify", {"input": LONG}, ""),
    ],
)
def test_the_remedy_for_a_long_text_has_the_field_of_the_shape_that_was_used(
    tmp_path: Path, task: TaskName, path: str, body: dict[str, Any], remedy: str
) -> None:
    folder = ModelFolder.open(write_folder(tmp_path, task), weights=False)
    made = make_task(task, folder, truncate=False)
    with serving(Model(made, HEAD_OF_TASK[task], labels=2, vocabulary=folder.config["vocab_size"]), task) as endpoint:
        answer = httpx.post(endpoint.url + path, json=body)

    assert answer.status_code == (400 if path == "/v1/embeddings" else 422)
    assert "Send a shorter text" in answer.text
    assert remedy in answer.text
    assert ("truncate" in answer.text) is bool(remedy)


class TestFailures:
    """Errors of the server."""

    @pytest.mark.parametrize(
        ("error", "status", "retry_after"),
        [
            (errors.Overloaded("the queue is full", retry_after_seconds=3), 429, "3"),
            (errors.NotReady("the model is being replaced", retry_after_seconds=2), 503, "2"),
            (errors.DeadlineExceeded("it waited 5 s"), 504, None),
            (errors.InferenceFailed("the engine failed"), 500, None),
        ],
    )
    def test_errors_of_the_predictor_become_responses(
        self, error: RequestError, status: int, retry_after: str | None
    ) -> None:
        gate = Gate()
        gate.error = error
        gate.open()
        with serving(gate) as endpoint:
            answer = httpx.post(f"{endpoint.url}/predict", json={"inputs": "x"})

        assert answer.status_code == status
        assert answer.json()["error"] == error.message
        assert answer.headers.get("retry-after") == retry_after

    def test_an_unexpected_error_returns_the_request_id_and_nothing_else(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate = Gate()
        gate.error = RuntimeError("the secret is 1234")
        gate.open()
        with serving(gate) as endpoint, caplog.at_level(logging.ERROR, logger="penstock.http"):
            answer = httpx.post(f"{endpoint.url}/predict", json={"inputs": "x"}, headers={"x-request-id": "mine-7"})

        assert answer.status_code == 500
        assert answer.headers["x-request-id"] == "mine-7"
        assert answer.json() == {
            "error": "the server failed on this request",
            "error_type": "internal",
            "remedy": "Its log has the details under the request id mine-7",
        }
        assert "the secret is 1234" in caplog.text
        assert "mine-7" in caplog.text

    def test_the_deadline_is_the_shorter_of_ours_and_the_clients(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)
        before = len(endpoint.model.deadlines)

        for milliseconds in ("250", "9999999", "inf"):
            httpx.post(f"{endpoint.url}/predict", json="x", headers={"x-deadline-ms": milliseconds})
        httpx.post(f"{endpoint.url}/predict", json="x")

        assert endpoint.model.deadlines[before:] == [0.25, 30.0, 30.0, 30.0]


class TestHeaders:
    """Headers of every answer."""

    def test_timings_are_milliseconds_with_three_decimals(self, client: httpx.Client) -> None:
        headers = client.post("/predict", json={"inputs": ["a text", "of words"]}).headers

        assert headers["x-compute-time"] == "1.000"
        assert headers["x-queue-time"] == "0.125"
        assert headers["x-tokenization-time"] == "0.250"
        assert headers["x-inference-time"] == "0.500"
        assert headers["x-compute-tokens"] == "8"
        assert "x-truncated" not in headers

    def test_truncated_inputs_are_counted(self, client: httpx.Client) -> None:
        assert client.post("/predict", json={"inputs": ["a " * 100, "a"]}).headers["x-truncated"] == "1"

    @pytest.mark.parametrize("given", ["abc-123", "x" * 128])
    def test_a_request_id_is_echoed(self, client: httpx.Client, given: str) -> None:
        assert client.get("/healthz", headers={"x-request-id": given}).headers["x-request-id"] == given

    @pytest.mark.parametrize("given", [None, "", "x" * 129])
    def test_without_a_usable_request_id_the_server_makes_one(self, client: httpx.Client, given: str | None) -> None:
        headers = {} if given is None else {"x-request-id": given}

        identifiers = {client.get("/healthz", headers=headers).headers["x-request-id"] for _ in range(3)}

        assert len(identifiers) == 3
        assert given not in identifiers


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of an endpoint that requires a token."""
    tokens = tmp_path_factory.mktemp("secret") / "tokens"
    tokens.write_text("new-token\n\nold-token\n")
    gate = Gate()
    gate.open()
    with serving(gate, auth_token_file=tokens) as endpoint, httpx.Client(base_url=endpoint.url) as client:
        tokens.unlink()  # those that were read stay accepted
        yield client


class TestAccess:
    """Tokens and other origins."""

    @pytest.mark.parametrize(
        "path",
        [
            "/healthz", "/readyz", "/health", "/metrics", "/", "/docs", "/v2/health/live", "/v2/health/ready",
            "/v2/models/emotion/ready", "/v2/models/emotion/versions/1/ready",
        ],
    )  # fmt: skip
    def test_health_metrics_and_pages_are_public(self, guarded: httpx.Client, path: str) -> None:
        assert guarded.get(path).status_code == 200

    @pytest.mark.parametrize("path", ["/info", "/openapi.json", "/v1/models", "/v2/models/emotion"])
    def test_other_routes_need_a_token(self, guarded: httpx.Client, path: str) -> None:
        answer = guarded.get(path)

        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")

    @pytest.mark.parametrize(
        ("header", "status"),
        [
            ("Bearer new-token", 200),
            ("bearer old-token", 200),
            ("Bearer new-toke", 401),
            ("Bearer", 401),
            ("Bearer new-token-and-more", 401),
            ("Basic bmV3LXRva2Vu", 401),
        ],
    )
    def test_a_token_gives_access(self, guarded: httpx.Client, header: str, status: int) -> None:
        answer = guarded.post("/predict", json="x", headers={"authorization": header})

        assert answer.status_code == status

    def test_other_origins_are_not_allowed_by_default(self, client: httpx.Client) -> None:
        answer = client.get("/info", headers={"origin": "https://app.example.com"})

        assert "access-control-allow-origin" not in answer.headers

    @pytest.mark.parametrize(
        ("allowed", "origin", "expected"),
        [
            ("https://app.example.com", "https://app.example.com", "https://app.example.com"),
            ("https://app.example.com", "https://evil.example.com", None),
            ("*", "https://any.example.com", "*"),
        ],
    )
    def test_origins_that_are_allowed(self, allowed: str, origin: str, expected: str | None) -> None:
        gate = Gate()
        gate.open()
        with serving(gate, cors_origins=allowed) as endpoint, httpx.Client(base_url=endpoint.url) as client:
            asked = {"origin": origin, "access-control-request-method": "POST"}
            preflight = client.options("/predict", headers=asked)
            answer = client.post("/predict", json="x", headers={"origin": origin})

        assert preflight.status_code == 204
        for one in (preflight, answer):
            assert one.headers.get("access-control-allow-origin") == expected
        assert preflight.headers["access-control-allow-methods"] == "OPTIONS, POST"
        assert expected is None or "x-compute-time" in answer.headers["access-control-expose-headers"]
        assert expected is None or "retry-after" in answer.headers["access-control-expose-headers"]

    @pytest.mark.parametrize(
        ("asked", "allowed"),
        [
            (None, "authorization, content-type, x-deadline-ms, x-request-id"),
            ("authorization,content-type,x-stainless-os", "authorization,content-type,x-stainless-os"),
            ("x-one; x-two", "authorization, content-type, x-deadline-ms, x-request-id"),
        ],
    )
    def test_pages_may_send_the_headers_of_their_sdk(self, asked: str | None, allowed: str) -> None:
        with serving(Gate(), cors_origins="*") as endpoint:
            headers = {"origin": "https://app.example.com", "access-control-request-method": "POST"}
            if asked is not None:
                headers["access-control-request-headers"] = asked
            preflight = httpx.options(f"{endpoint.url}/v1/embeddings", headers=headers)

        assert preflight.headers["access-control-allow-headers"] == allowed


def test_every_error_class_has_a_status_and_a_type() -> None:
    kinds: list[type[RequestError]] = [RequestError, *RequestError.__subclasses__()]

    assert len({kind.error_type for kind in kinds}) == len(kinds)
    assert all(400 <= kind.status <= 599 for kind in kinds)
    for kind in kinds:
        assert f"{kind.status} {kind.error_type}" in str(errors.__doc__) or kind is RequestError


def test_a_body_that_contains_http_is_read_as_a_body(client: httpx.Client) -> None:
    body = json.dumps({"inputs": "POST /predict HTTP/1.1\r\ncontent-length: 0\r\n\r\n"}).encode()

    assert client.post("/predict", content=body).status_code == 200
