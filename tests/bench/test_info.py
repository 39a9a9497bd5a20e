"""Servers given by URL: Penstock servers are recognised, and others are measured too."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.errors import SpecError
from penstock.tasks import TaskName
from penstock_bench import BenchOptions, BenchResults, run_bench
from penstock_bench.cell import MeasurementFailed
from penstock_bench.subject import PublicInfo, ServerInfo, read_info
from penstock_runtime.app.server import Server as Penstock
from penstock_runtime.host import read_host
from penstock_runtime.http.api.penstock.answers import info
from penstock_runtime.http.api.tei.answers import tei_info
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from tests.optimizer.report.sample import sample_manifest


@contextmanager
def answering(info: object, *, token: str = "", ready: bool = False) -> Iterator[str]:
    """A server that answers this at `/info` (None: 404), answers `/predict`, and has no other path; 401 to
    clients without the token. With `ready` also `/readyz`. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = self.path == "/info" and info is not None
            is_ready = ready and self.path == "/readyz"
            self._answer(200 if found or is_ready else 404, json.dumps(info if found else "not here"))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(200 if self.path == "/predict" else 404, "[[0.1]]")

        def _answer(self, status: int, body: str) -> None:
            if token and self.headers["authorization"] != f"Bearer {token}":
                status = 401
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ours() -> dict[str, object]:
    """The answer of a Penstock server."""
    return whole_info(
        ServerStatus("emotion", TaskName.FEATURE_EXTRACTION, manifest=sample_manifest(), host=read_host())
    )


def whole_info(status: ServerStatus) -> dict[str, object]:
    """The body of `/info`."""
    service = Penstock(status, Settings()).service
    return {**tei_info(service), **info(service)}


def measured(url: str, output: Path, **values: object) -> BenchResults:
    """One setting, measured briefly."""
    return run_bench(
        BenchOptions.model_validate(
            {"target": url, "output": output, "lengths": (8,), "batches": (1,), "seconds": 0.1, "rounds": 1, **values}
        )
    )


def test_a_penstock_server_is_recognised_by_its_info() -> None:
    with answering(ours()) as url:
        found = read_info(url)

    assert isinstance(found, ServerInfo)
    assert found.task is TaskName.FEATURE_EXTRACTION
    assert found.artefact is not None
    assert found.artefact.model.max_tokens == sample_manifest().model.max_tokens
    assert found.host is not None
    assert found.host.cpu == read_host().cpu


def test_a_task_that_is_not_that_of_the_server_is_refused(tmp_path: Path) -> None:
    with answering(ours()) as url, pytest.raises(SpecError, match="--task is fill-mask") as caught:
        measured(url, tmp_path, task="fill-mask")

    assert f"{url}/info has the task feature-extraction" in caught.value.message


@pytest.mark.parametrize(
    "info",
    [
        None,
        [],
        {"model_id": "x/y", "model_type": {"classifier": {}}, "max_input_length": 512, "version": "1.9"},
        {"plan": "free"},
        {"host": "0.0.0.0", "version": "1"},
        {"task": "feature-extraction", "artefact": {"model": {"max_tokens": "lots"}}},
    ],
    ids=["none", "list", "tei", "plan", "host", "task"],
)
def test_servers_of_other_kinds_are_measured(info: object, tmp_path: Path) -> None:
    with answering(info) as url:
        results = measured(url, tmp_path, task="feature-extraction")

    assert results.settings[0].ours.failed == 0
    assert results.settings[0].ours.latency is not None
    if not isinstance(info, dict) or "model_id" not in info:
        assert [note for note in results.notes if "the model, the plan and its verdict are not known" in note]


def test_the_info_of_a_server_with_an_internal_port_is_read_there(tmp_path: Path) -> None:
    with answering(None, ready=True) as url, answering(ours()) as internal:
        results = measured(url, tmp_path, info_url=f"{internal}/info")

    assert results.task == "feature-extraction"
    assert results.model == sample_manifest().model.source
    assert not [note for note in results.notes if "not known" in note]


def public(task: TaskName, labels: tuple[str, ...] = ()) -> dict[str, object]:
    """The answer of the public port of such a server."""
    status = ServerStatus("emotion", task, labels=labels, limits={"max_input_tokens": 32})
    return tei_info(Penstock(status, Settings()).service)


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (TaskName.FEATURE_EXTRACTION, TaskName.FEATURE_EXTRACTION),
        (TaskName.SENTENCE_SIMILARITY, TaskName.FEATURE_EXTRACTION),
        (TaskName.TEXT_RANKING, TaskName.TEXT_RANKING),
        (TaskName.TEXT_CLASSIFICATION, TaskName.TEXT_CLASSIFICATION),
        (TaskName.FILL_MASK, None),
    ],
)
def test_the_public_port_of_a_server_names_the_kind_of_its_model(task: TaskName, named: TaskName | None) -> None:
    with answering(public(task, ("joy", "anger"))) as url:
        found = read_info(url)

    assert isinstance(found, PublicInfo)
    assert (found.task, found.model_id, found.max_input_length) == (named, "emotion", 32)


def test_a_public_port_is_measured_without_further_options(tmp_path: Path) -> None:
    """As the tutorial of the cluster does with the address of a Service."""
    with answering(public(TaskName.FEATURE_EXTRACTION), ready=True) as url:
        results = measured(url, tmp_path, lengths=(8, 64))

    assert (results.task, results.model) == ("feature-extraction", "emotion")
    assert [one.tokens for one in results.settings] == [8]
    assert [note for note in results.notes if "--task is for another" in note]


def test_an_info_url_of_another_kind_of_server_is_refused(tmp_path: Path) -> None:
    with answering(None) as url, pytest.raises(SpecError, match="is not that of a Penstock server") as caught:
        measured(url, tmp_path, task="feature-extraction", info_url=url)

    assert caught.value.field == "info_url"


def test_a_required_token_is_sent_and_not_stored(tmp_path: Path) -> None:
    with answering(None, token="open sesame") as url:
        results = measured(url, tmp_path, task="feature-extraction", auth_token="open sesame")

    assert results.settings[0].ours.failed == 0
    assert not [file for file in tmp_path.iterdir() if "sesame" in file.read_text()]


@pytest.mark.parametrize(("token", "words"), [("", "asks for a token"), ("wrong", "refuses this token")])
def test_a_missing_or_wrong_token_is_reported(token: str, words: str, tmp_path: Path) -> None:
    with answering(None, token="open sesame") as url, pytest.raises(MeasurementFailed) as caught:
        measured(url, tmp_path, task="feature-extraction", auth_token=token)

    assert caught.value.message == f"{url}/info {words} (401)"
    assert "PENSTOCK_AUTH_TOKEN" in caught.value.remedy
