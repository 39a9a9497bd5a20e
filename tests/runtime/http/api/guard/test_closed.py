"""A server that cannot classify never lets a request pass, and each request is counted once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.manifest import Axes, GraphIO
from penstock.recipe import Precision
from penstock_runtime.engines.base import EngineFacts, Streams, Threads
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.errors import DeadlineExceeded, InferenceFailed, InvalidInput, NotReady, Overloaded
from penstock_runtime.rows import Batch, Outputs
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.settings import QueueSettings
from tests.runtime.http.api.guard.keywords import BLOCKING, TEXTS, guarding, words
from tests.runtime.http.serving import Endpoint, Gate, post, until
from tests.runtime.serving.test_predictor_over_http import plan_of

TEXT = "i like you"
ROUTES: dict[str, Any] = {
    "/beta/litellm_basic_guardrail_api": {"texts": [TEXT], "input_type": "request"},
    "/request": {"body": {"messages": [{"role": "user", "content": TEXT}]}},
    "/response": {"body": {"choices": [{"message": {"role": "assistant", "content": TEXT}}]}},
    "/v1/moderations": {"input": TEXT},
}


class Raising:
    """A predictor that answers with an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def predict(self, *_: Any, **__: Any) -> Any:
        raise self.error

    async def drain(self) -> None:
        return

    def queue_depth(self) -> tuple[int, int]:
        return 0, 0

    def facts(self) -> dict[str, Any]:
        return {}


def asked(endpoint: Endpoint, path: str, **headers: str) -> httpx.Response:
    return httpx.post(endpoint.url + path, json=ROUTES[path], headers=headers, timeout=60, verify=False)


def counted(endpoint: Endpoint) -> dict[str, int]:
    return {name: count for name, count in endpoint.server.metrics.guard.coverage.items() if count}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (Overloaded("the queue is full", retry_after_seconds=7), 503, "refused"),
        (NotReady("the server is shutting down"), 503, "refused"),
        (DeadlineExceeded("not run"), 504, "late"),
        (InferenceFailed("not a number"), 503, "failed"),
        (RuntimeError("a defect"), 503, "failed"),
        (InvalidInput("too many tokens"), 422, "refused"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else str(one),
)
def test_an_error_of_the_model_is_never_a_pass(path: str, error: Exception, status: int, outcome: str) -> None:
    with guarding(Raising(error)) as endpoint:
        answer = asked(endpoint, path)

        wanted = 400 if status == 422 and path.startswith("/v1/") else status
        assert answer.status_code == wanted, answer.text
        assert counted(endpoint) == {outcome: 1}
        assert endpoint.server.metrics.guard.verdicts == ({"unavailable": 1} if status >= 500 else {})
        reason = {
            "Overloaded": "unavailable",
            "InferenceFailed": "classifier_failed",
            "RuntimeError": "classifier_failed",
        }
        assert list(endpoint.server.metrics.rejected) == [
            reason.get(type(error).__name__, getattr(error, "error_type", ""))
        ]
        if isinstance(error, Overloaded):
            assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize("path", ROUTES)
def test_a_server_that_loads_answers_503(path: str) -> None:
    with guarding(None) as endpoint:
        assert asked(endpoint, path).status_code == 503
        assert counted(endpoint) == {"refused": 1}


def test_an_answer_after_the_deadline_is_late(tmp_path: Path) -> None:
    with guarding(words(tmp_path, TEXTS), policy={**BLOCKING, "deadlineMilliseconds": 1e-6}) as endpoint:
        statuses = [asked(endpoint, path).status_code for path in ROUTES]

        assert statuses == [504] * len(ROUTES)
        assert counted(endpoint) == {"late": len(ROUTES)}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 1.0),
        ({"x-deadline-ms": "250"}, 0.25),
        ({"x-deadline-ms": "25000"}, 1.0),
        ({"x-envoy-expected-rq-timeout-ms": "200"}, 0.2),
        ({"x-envoy-expected-rq-timeout-ms": "200", "x-deadline-ms": "100"}, 0.1),
        ({"x-envoy-expected-rq-timeout-ms": "nonsense"}, 1.0),
    ],
)
def test_the_shortest_deadline_counts(tmp_path: Path, headers: dict[str, str], expected: float) -> None:
    model = words(tmp_path, TEXTS)
    with guarding(model) as endpoint:
        asked(endpoint, "/request", **headers)

    assert model.deadlines == [expected]


class Held:
    """An engine of a text classifier that runs when it is let go."""

    def __init__(self) -> None:
        self.facts = EngineFacts("arithmetic", "1", Threads(2, 1), "f32")
        self.go = threading.Event()

    def run(self, batch: Batch) -> Outputs:
        assert self.go.wait(300)
        return {"logits": np.tile(np.array([5.0, 0.0], np.float32), (len(batch.input_ids), 1))}

    run_wide = run
    run_widening = run

    def start_streams(self) -> Streams:
        return ThreadStreams(self)

    def close(self) -> None:
        return


@contextmanager
def queued(path: Path, **queue: Any) -> Iterator[tuple[Endpoint, Held]]:
    """A server with the real queue."""

    async def start(endpoint: Endpoint, model: LoadedModel) -> Predictor:
        predictor = Predictor(model, endpoint.server.metrics, queue=QueueSettings(**queue))
        endpoint.server.serve_with(predictor, model.plan)
        return predictor

    engine = Held()
    io = GraphIO(inputs=("input_ids", "attention_mask", "token_type_ids"), outputs={"logits": Axes.ROW})
    with guarding(None, policy={**BLOCKING, "deadlineMilliseconds": 60_000}, deadline_seconds=600) as endpoint:
        model = LoadedModel(words(path, TEXTS).task, engine, plan_of(Precision.FP32), io)
        endpoint.model = asyncio.run_coroutine_threadsafe(start(endpoint, model), endpoint.loop).result(60)
        try:
            yield endpoint, engine
        finally:
            engine.go.set()


def test_at_overload_classified_late_and_refused_requests_are_all_requests(tmp_path: Path) -> None:
    total, room = 60, 8
    paths = list(ROUTES)
    with queued(tmp_path, max_queue_rows=room) as (endpoint, engine), ThreadPoolExecutor(total) as threads:
        pending = [threads.submit(asked, endpoint, paths[index % len(paths)]) for index in range(room)]
        until(lambda: endpoint.server.metrics.in_flight == room)
        late = threads.submit(asked, endpoint, paths[0], **{"x-deadline-ms": "1"})
        until(lambda: endpoint.server.metrics.in_flight == room + 1 or late.done())
        pending += [threads.submit(asked, endpoint, paths[index % len(paths)]) for index in range(room, total - 1)]
        # While the model is busy, those that find no room in the queue are answered.
        running = 2 * 4
        until(lambda: endpoint.server.metrics.guard.coverage["refused"] >= total - room - running)
        engine.go.set()
        statuses = Counter(one.result(300).status_code for one in [late, *pending])

        found = counted(endpoint)
        requests = sum(count for (route, _), count in endpoint.server.metrics.requests.items() if route in ROUTES)
        assert sum(found.values()) == requests == total
        assert set(found) <= {"classified", "late", "refused"}
        assert (statuses[200], statuses[503], statuses[504]) == (
            found["classified"],
            found["refused"],
            found["late"],
        )
        assert found["classified"] >= room - 1
        assert found["late"] == 1
        assert set(statuses) <= {200, 503, 504}


def test_a_gateway_that_gave_up_is_counted_as_abandoned() -> None:
    gate = Gate()
    with guarding(gate) as endpoint:
        with endpoint.connect() as client:
            client.sendall(post("/request", b'{"body": {"messages": [{"role": "user", "content": "i like you"}]}}'))
            gate.wait_for("waiting", 1)
        gate.wait_for("cancelled", 1)

        until(lambda: counted(endpoint) == {"abandoned": 1})
        gate.open()


def test_a_draining_server_finishes_what_it_has_and_takes_nothing_else(tmp_path: Path) -> None:
    with queued(tmp_path) as (endpoint, engine), ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(asked, endpoint, "/request")
        until(lambda: endpoint.server.metrics.in_flight == 1)
        asyncio.run_coroutine_threadsafe(drain(endpoint), endpoint.loop).result(60)

        statuses = {asked(endpoint, path).status_code for path in ROUTES}
        engine.go.set()

        assert statuses == {503}
        assert accepted.result(60).status_code == 200


async def drain(endpoint: Endpoint) -> None:
    endpoint.drained = asyncio.create_task(endpoint.model.drain())  # type: ignore[attr-defined]
    await asyncio.sleep(0)


KILLED = """
from tests.runtime.http.api.guard.keywords import guarding
from tests.runtime.http.serving import Gate
gate = Gate()
with guarding(gate) as endpoint:
    print(endpoint.server.port, flush=True)
    gate.wait_for("waiting", 1, 300)
    print("waiting", flush=True)
    gate.wait_for("answered", 1, 300)
"""


def test_a_killed_server_answers_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[5]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "runtime")))}
    with (
        subprocess.Popen(
            [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        ) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/request"
        pending = threads.submit(httpx.post, url, json=ROUTES["/request"], timeout=300)
        assert server.stdout.readline() == "waiting\n"
        server.send_signal(signal.SIGKILL)

        with pytest.raises(httpx.TransportError):
            pending.result(60)
        with pytest.raises(httpx.TransportError):
            httpx.post(url, json=ROUTES["/request"], timeout=60)
