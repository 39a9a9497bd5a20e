"""The measurement of a pod on Inferentia before it is ready, on the stand-in for the Neuron SDK."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.resources.result import CapacityFacts
from penstock.tasks import TaskName
from penstock_operator.facts.pods import HostReport
from penstock_optimizer.capacity.serving_pod import measure_before_ready
from penstock_runtime.app.server import Server
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.status import CapacityReport, ServerStatus
from tests.runtime.engines.neuron.small import Standin, compile_kinds, install_standin, write_artefact, write_compiled
from tests.runtime.http.serving import write_folder
from tests.runtime.models.s3_server import free_port
from tests.runtime.pod.pods import SECONDS, Pod

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    pytest.importorskip("torch")
    return install_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="module")
def artefact(standin: Standin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of vectors, with a workload of short texts and an objective."""
    folder = tmp_path_factory.mktemp("artefact")
    path = compile_kinds(standin, folder / "compiled", [("vectors", 1)])["vectors", 1]
    workload = {"lengths": [4, 8, 12, 16, 24], "p95_objective_milliseconds": 250.0}
    write_compiled(path.parent, "vectors", workload=workload)
    write_artefact(folder / "artefact", path, "vectors", TaskName.FEATURE_EXTRACTION, write_folder)
    return folder / "artefact"


class Serving:
    """A pod as the operator starts it, and its internal port."""

    def __init__(self, work: Path, standin: Standin, artefact: Path, **variables: Any) -> None:
        self.internal = free_port()
        self.pod = Pod(
            work,
            "penstock_optimizer.capacity",
            artefact=artefact,
            task="feature-extraction",
            neuron_target="inf2",
            internal_port=self.internal,
            **variables,
            **standin.variables(),
        )

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.internal, timeout=SECONDS)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def report(self) -> HostReport:
        """As the operator reads it."""
        found = HostReport.from_info(json.loads(self.ask("/info")[1]))
        assert found is not None
        return found


def test_a_pod_that_learns_it_while_the_model_loads_does_not_begin() -> None:
    server = SimpleNamespace(status=ServerStatus("model", TaskName.FEATURE_EXTRACTION, capacity=CapacityReport()))
    server.status.capacity.known.set()

    asyncio.run(measure_before_ready(cast("Server", server), cast("LoadedModel", None), Path("nowhere")))

    assert server.status.capacity.as_json() == {"state": "known", "message": "", "facts": None}


def measuring(pod: Pod) -> None:
    """Until it measures."""
    pod.wait_for("event=ServerListening object=model")
    pod.unready_for("the capacity of a replica is measured")


def test_the_first_pod_measures_what_a_replica_takes_before_it_is_ready(
    tmp_path: Path, standin: Standin, artefact: Path
) -> None:
    serving = Serving(tmp_path / "pod", standin, artefact, neuron_capacity_seconds=25)
    with serving.pod as pod:
        measuring(pod)
        assert serving.report().measures_capacity
        assert pod.ask("POST", "/predict", {"inputs": "i like you"})[0] == 503
        pod.wait_for("event=ServerReady object=model", 180)
        status, answer = pod.ask("POST", "/predict", {"inputs": "i like you"})
        report, metrics = serving.report(), serving.ask("/metrics")[1]
        assert pod.end() == 0
        output = pod.output

    assert status == 200
    assert answer
    found = report.capacity
    assert found is not None
    assert not report.measures_capacity
    assert found.is_measured
    assert found.p95_objective_milliseconds == 250.0
    assert len(found.points) >= 2
    assert (found.requests_per_second or 0) > 0
    assert 4 <= (found.tokens_per_request or 0) <= 24
    again = CapacityFacts.of(found.curve)
    assert again.points == found.points
    assert again.requests_per_second == pytest.approx(found.requests_per_second, rel=1e-3)
    # No measured request is counted as traffic.
    (counted,) = [line for line in metrics.splitlines() if line.startswith("penstock_request_seconds_count")]
    assert float(counted.split()[-1]) == 1
    assert "event=CapacityMeasured" in output


def test_a_pod_that_learns_that_the_capacity_is_known_is_ready_at_once(
    tmp_path: Path, standin: Standin, artefact: Path
) -> None:
    serving = Serving(tmp_path / "pod", standin, artefact, neuron_capacity_seconds=500)
    with serving.pod as pod:
        measuring(pod)
        begin = time.monotonic()
        assert serving.ask("/capacity/known", "POST") == (200, "ok\n")
        pod.wait_for("event=ServerReady object=model", 180)
        seconds, report = time.monotonic() - begin, serving.report()
        assert pod.ask("POST", "/predict", {"inputs": "i like you"})[0] == 200
        assert pod.end() == 0

    assert seconds < 100
    assert (report.capacity, report.measures_capacity, report.capacity_problem) == (None, False, "")


def test_a_pod_without_time_for_a_measurement_serves_and_reports_it(
    tmp_path: Path, standin: Standin, artefact: Path
) -> None:
    serving = Serving(tmp_path / "pod", standin, artefact, neuron_capacity_seconds=2.1)
    with serving.pod as pod:
        pod.wait_for("event=ServerReady object=model", 180)
        report = serving.report()
        assert pod.ask("POST", "/predict", {"inputs": "i like you"})[0] == 200
        assert pod.end() == 0

    assert report.capacity is None
    assert report.capacity_problem == "the time budget was spent before the capacity could be measured"


def test_a_pod_that_ends_while_it_measures_ends_at_once(tmp_path: Path, standin: Standin, artefact: Path) -> None:
    serving = Serving(tmp_path / "pod", standin, artefact, neuron_capacity_seconds=500)
    with serving.pod as pod:
        measuring(pod)
        begin = time.monotonic()
        pod.end()
        assert time.monotonic() - begin < 60
