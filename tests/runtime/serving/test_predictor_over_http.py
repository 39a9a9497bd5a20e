"""The server with the real predictor, queue and threads: only the forward pass is arithmetic."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.manifest import Axes, GraphIO
from penstock.recipe import Batching, EngineName, Plan, Precision, Recipe
from penstock.tasks import TaskName
from penstock_runtime.admission import Entry, FairLine
from penstock_runtime.engines.base import EngineFacts, Streams, Threads
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Batch, Outputs
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.settings import QueueSettings
from penstock_runtime.tasks import Task, make_task
from tests.runtime.http.serving import WIDTH, Endpoint, ask, post, serving, wait_for_sample, write_folder

IO = GraphIO(inputs=("input_ids", "attention_mask", "token_type_ids"), outputs={"last_hidden_state": Axes.TOKENS})


class Arithmetic:
    """An engine whose vectors are sines of token ids; it can be held, and counts its runs."""

    def __init__(self, factor: float = 1.0) -> None:
        self.facts = EngineFacts("arithmetic", "1", Threads(2, 1), "f32")
        self.factor = factor
        self.runs = 0
        self.running = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()
        self.closed = False

    def run(self, batch: Batch) -> Outputs:
        assert not self.closed
        self.runs += 1
        self.running.release()
        assert self.go.wait(30)
        ids = batch.input_ids[..., None].astype(np.float32)
        return {"last_hidden_state": np.sin(self.factor * ids * np.arange(1, WIDTH + 1, dtype=np.float32))}

    run_wide = run
    run_widening = run

    def start_streams(self) -> Streams:
        return ThreadStreams(self)

    def close(self) -> None:
        self.closed = True


def plan_of(precision: Precision) -> Plan:
    recipe = Recipe(engine=EngineName.ONNXRUNTIME, precision=precision)
    return Plan(recipe=recipe, streams=2, threads_per_stream=1, batching=Batching.EQUAL_LENGTH, max_batch_rows=4)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Feature extraction with the small tokenizer."""
    folder = write_folder(tmp_path_factory.mktemp("model"), TaskName.FEATURE_EXTRACTION)
    return make_task(TaskName.FEATURE_EXTRACTION, ModelFolder.open(folder, weights=False))


@contextmanager
def serving_engine(
    task: Task, engine: Arithmetic, queue: QueueSettings | None = None, **flags: Any
) -> Iterator[Endpoint]:
    """A server whose predictor was made in its loop, as `penstock serve` does."""

    async def change(endpoint: Endpoint, predictor: Predictor, plan: Plan) -> None:
        endpoint.server.serve_with(predictor, plan)

    plan = plan_of(Precision.FP32)
    with serving(None, **flags) as endpoint:
        model = LoadedModel(task, engine, plan, IO)
        predictor = Predictor(model, endpoint.server.metrics, queue=queue or QueueSettings())
        asyncio.run_coroutine_threadsafe(change(endpoint, predictor, plan), endpoint.loop).result(10)
        endpoint.model = predictor
        yield endpoint


def test_before_there_is_a_model_requests_get_503_with_retry_after() -> None:
    with serving(None) as endpoint, httpx.Client(base_url=endpoint.url) as client:
        alive, ready = client.get("/healthz"), client.get("/readyz")
        answer = client.post("/predict", json="a text")
        info = client.get("/info").json()

    assert alive.status_code == 200
    assert ready.status_code == answer.status_code == 503
    assert answer.json()["error"] == "the model is loading"
    assert answer.headers["retry-after"] == "5"
    assert (info["phase"], info["plan"]) == ("loading", None)


def test_the_compute_time_covers_tokenization_and_inference(task: Task) -> None:
    with serving_engine(task, Arithmetic()) as endpoint:
        headers = httpx.post(f"{endpoint.url}/predict", json={"inputs": ["a text", "some words"]}).headers

    times = {name: float(headers[f"x-{name}-time"]) for name in ("compute", "tokenization", "inference", "queue")}
    assert times["compute"] >= times["tokenization"] + times["inference"] > 0
    assert headers["x-compute-tokens"] == "8"


def test_routes_of_the_tokenizer_share_it_by_bearer_token_else_by_address(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[str] = []
    wait = FairLine.wait

    async def recorded(line: FairLine, client: str, cost: int = 1) -> Entry:
        clients.append(client)
        return await wait(line, client, cost)

    monkeypatch.setattr(FairLine, "wait", recorded)
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"secret-of-{name}")
    bodies = {"/tokenize": {"inputs": "a text " * 1000}, "/decode": {"ids": [[1] * 1001]}}
    with serving_engine(task, Arithmetic(), auth_token_folder=str(tmp_path)) as endpoint:
        for name in ("one", "two"):
            for path, body in bodies.items():
                headers = {"authorization": f"Bearer secret-of-{name}"}
                assert httpx.post(endpoint.url + path, json=body, headers=headers).status_code == 200
    with serving_engine(task, Arithmetic()) as endpoint:
        for path, body in bodies.items():
            assert httpx.post(endpoint.url + path, json=body).status_code == 200

    assert clients == ["token one"] * 2 + ["token two"] * 2 + ["127.0.0.1"] * 2


def test_a_model_is_replaced_without_one_failed_request(task: Task) -> None:
    old, new = Arithmetic(), Arithmetic(factor=2.0)
    stop = threading.Event()

    def ask_on(url: str) -> list[Any]:
        seen: list[Any] = []
        with httpx.Client(base_url=url, timeout=120, verify=False) as client:
            while not seen or not stop.is_set():
                answer = client.post("/predict", json="i like you")
                assert answer.status_code == 200, answer.text
                seen.append(tuple(answer.json()[0]))
        return seen

    plan = plan_of(Precision.INT8_ROWWISE)
    with serving_engine(task, old) as endpoint, ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask_on, endpoint.url) for _ in range(8)]
        assert old.running.acquire(timeout=120)
        replacing = endpoint.model.replace(LoadedModel(task, new, plan, IO))
        asyncio.run_coroutine_threadsafe(replacing, endpoint.loop).result(30)
        endpoint.loop.call_soon_threadsafe(endpoint.server.serve_with, endpoint.model, plan)
        before = new.runs
        while new.runs < before + 20:
            assert new.running.acquire(timeout=120)
        stop.set()
        seen = [one.result(30) for one in asking]
        info = httpx.get(f"{endpoint.url}/info").json()

    assert old.closed
    assert len({vector for answers in seen for vector in answers}) == 2
    for answers in seen:
        switched = [answers.index(vector) for vector in dict.fromkeys(answers)]
        assert all(one == answers[-1] for one in answers[switched[-1] :]), "an old answer came after a new one"
    assert info["plan"]["recipe"]["precision"] == "int8-rowwise"


@pytest.mark.parametrize("inputs", ["a text", ["a text"] * 3], ids=["single", "batch"])
def test_a_full_queue_refuses_singles_and_batches_alike(task: Task, inputs: Any) -> None:
    engine = Arithmetic()
    engine.go.clear()
    queue = QueueSettings(max_queue_rows=4)
    with serving_engine(task, engine, queue) as endpoint, ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, endpoint, "a text") for _ in range(2)]
        for _ in running:
            assert engine.running.acquire(timeout=120)
        waiting = pool.submit(ask, endpoint, ["of some words"] * 4)
        wait_for_sample(endpoint.server.port, "penstock_queue_rows 4.0")
        refused = ask(endpoint, inputs)
        engine.go.set()
        answers = [one.result(30) for one in (*running, waiting)]

    assert refused.status_code == 429
    assert refused.json()["error_type"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in answers] == [200, 200, 200]


def test_a_deadline_that_passes_in_the_queue_is_an_error(task: Task) -> None:
    engine = Arithmetic()
    engine.go.clear()
    with serving_engine(task, engine) as endpoint, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, endpoint, "a text") for _ in range(2)]
        for _ in running:
            assert engine.running.acquire(timeout=120)
        late = ask(endpoint, "of some words", **{"x-deadline-ms": "30"})
        engine.go.set()
        assert [one.result(30).status_code for one in running] == [200, 200]

    assert late.status_code == 504
    assert late.json()["error_type"] == "deadline"
    assert engine.runs == 2


def test_a_request_whose_client_has_disconnected_is_not_run(task: Task) -> None:
    engine = Arithmetic()
    engine.go.clear()
    with serving_engine(task, engine) as endpoint, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, endpoint, "a text") for _ in range(2)]
        for _ in running:
            assert engine.running.acquire(timeout=120)
        with endpoint.connect() as leaving:
            leaving.sendall(post("/predict", b'"of some words"'))
            wait_for_sample(endpoint.server.port, "penstock_queue_rows 1.0")
        wait_for_sample(endpoint.server.port, "penstock_queue_rows 0.0")
        engine.go.set()
        assert [one.result(30).status_code for one in running] == [200, 200]
        counted = httpx.get(f"{endpoint.url}/metrics").text

    assert engine.runs == 2
    assert 'penstock_requests_total{code="499",route="/predict"} 1.0' in counted
    assert "penstock_batch_rows_count 2.0" in counted


def test_draining_answers_waiting_requests_and_closes_the_model(tmp_path: Path, task: Task) -> None:
    engine = Arithmetic()
    engine.go.clear()
    with serving_engine(task, engine) as endpoint, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, endpoint, "a text") for _ in range(4)]
        for _ in range(2):
            assert engine.running.acquire(timeout=120)
        wait_for_sample(endpoint.server.port, "penstock_in_flight_requests 5.0")
        endpoint.stop()
        engine.go.set()
        answers = [one.result(30) for one in asked]
        endpoint.thread.join(10)

    assert [answer.status_code for answer in answers] == [200] * 4
    assert endpoint.cut == [0]
    assert engine.closed
