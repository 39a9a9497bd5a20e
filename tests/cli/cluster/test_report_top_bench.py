"""`penstock report`, `top` and `bench modelendpoint/NAME`, with a kubectl of the test and real stores and servers."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from penstock.artefact_store import StoreUri
from penstock.errors import PenstockError
from penstock.tasks import TaskName
from penstock_cli.cluster.report import digest_of, pod_with_the_store
from penstock_cli.cluster.top import rows, used
from penstock_runtime.store import open_store
from tests.cli.cluster.test_commands import endpoint
from tests.cli.endpoints import invoke
from tests.runtime.http.serving import make_model, serving
from tests.runtime.store.artefacts import write_artefact

KUBECTL = """#!/bin/sh
case "$*" in
  *"get modelendpoints"*closed*) echo '{"metadata": {"name": "closed"}, "spec": {"tls": {"secretName": "s"}}}';;
  *"get modelendpoints"*) cat "$ANSWERS/endpoint";;
  *"get optimizedmodels"*) cat "$ANSWERS/model";;
  *"get pods"*) cat "$ANSWERS/pods";;
  *exec*) shift; while [ "$1" != -- ]; do shift; done; shift 2; exec "$PYTHON" "$@";;
  *port-forward*service/absent*) echo "error: services \\"absent\\" not found" >&2; exit 1;;
  *port-forward*service*) echo "Forwarding from 127.0.0.1:$SERVICE_PORT -> 8080"; exec sleep 600;;
  *port-forward*deployment*) echo "Forwarding from 127.0.0.1:$SERVICE_PORT -> 8081"; exec sleep 600;;
esac
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a command whose kubectl answers with the files of a folder."""
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    path = f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin"
    return {"PATH": path, "ANSWERS": str(folder), "PYTHON": sys.executable, **more}


def test_the_report_is_read_from_the_store_through_a_serving_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreUri.parse(f"file://{tmp_path}/store")
    published = open_store(store).publish(write_artefact(tmp_path / "artefact"))
    pod = {"metadata": {"name": "emotion-1"}, "status": {"phase": "Running"}}
    answers = {
        "endpoint": endpoint("emotion", "True", "Serving", optimizedModel="om"),
        "model": {"metadata": {"name": "om"}, "status": {"artefact": {"digest": str(published.digest)}}},
        "pods": {"items": [pod]},
    }
    for name, value in answers.items():
        (tmp_path / name).write_text(json.dumps(value))
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    variables = environment(tmp_path, PENSTOCK_STORE_URI=str(store))
    output = tmp_path / "report.html"

    run = invoke("report", "emotion", "--output", output, environment=variables)

    assert run.exit_code == 0, run.output
    assert output.read_text() == "<title>evidence</title>"
    assert opened == [output.as_uri()]
    assert invoke("report", "emotion", "--no-open", environment=variables).exit_code == 0
    assert len(opened) == 1
    (tmp_path / "store" / published.digest.hexadecimal / "report.html").unlink()
    missing = invoke("report", "emotion", "--no-open", environment=variables)
    assert missing.exit_code == 1
    assert f"has no report of {published.digest}" in missing.output


def test_an_endpoint_without_a_result_or_a_pod_has_no_report() -> None:
    searching = endpoint("e", "False", "Optimizing 7/23", plan={"digest": "sha256:f", "baseline": True})
    with pytest.raises(PenstockError, match=r"e has no report yet.*Optimizing 7/23"):
        digest_of(searching, {"status": {}})
    with pytest.raises(PenstockError, match="no pod of e runs"):
        pod_with_the_store([{"metadata": {"name": "x"}, "status": {"phase": "Pending"}}], "e")
    pinned = endpoint("e", "True", "Serving", plan={"digest": "sha256:p"})
    assert digest_of(pinned, None) == "sha256:p"
    pods: list[dict[str, Any]] = [
        {"metadata": {"name": name}, "status": {"phase": phase}} for name, phase in (("a", "Failed"), ("b", "Running"))
    ]
    assert pod_with_the_store(pods, "e") == "b"


def test_the_busiest_endpoints_come_first_and_what_is_not_known_stays_empty() -> None:
    scaling = {
        "desired": 3,
        "requestsPerSecond": 150.0,
        "capacityPerReplica": 100.0,
        "p95Milliseconds": 14.06,
        "slowDown": 1.1,
        "cause": "Demand",
    }
    busy = endpoint("busy", "True", "Serving", readyReplicas=2, scaling=scaling)
    idle = endpoint("idle", "True", "Serving", readyReplicas=1, scaling={**scaling, "requestsPerSecond": 0.0})
    new = {"metadata": {"name": "new", "namespace": "a"}}

    assert [used(one) for one in (busy, idle, new)] == [0.75, 0.0, -1.0]
    assert rows([new, idle, busy])[0] == (*("a", "busy", "2/3", "150.0", "200.0", "75%", "14.1 ms", "1.10x", "Demand"),)
    assert [row[1] for row in rows([new, idle, busy])] == ["busy", "idle", "new"]
    assert rows([new])[0][3:] == ("",) * 6


def test_the_table_of_a_namespace_without_endpoints_states_that(tmp_path: Path) -> None:
    (tmp_path / "endpoint").write_text('{"items": []}')

    assert "There are no endpoints in this namespace." in invoke("top", environment=environment(tmp_path)).output


def test_an_endpoint_of_a_cluster_is_measured_through_a_forwarded_port(tmp_path: Path) -> None:
    task = TaskName.FEATURE_EXTRACTION
    model = make_model(tmp_path / "model", task)
    (tmp_path / "endpoint").write_text(json.dumps(endpoint("emotion", "True", "Serving")))
    with serving(model, task) as server:
        variables = environment(tmp_path, SERVICE_PORT=str(server.server.port))
        words = ("--lengths", 8, "--batches", 1, "--seconds", 0.1, "--rounds", 1, "--output", tmp_path / "results")
        run = invoke("bench", "modelendpoint/emotion", *words, environment=variables)
        failed = invoke("bench", "modelendpoint/absent", environment=variables)

    assert run.exit_code == 0, run.output
    assert (tmp_path / "results" / "report.html").is_file()
    assert failed.exit_code == 1
    assert 'kubectl port-forward service/absent: error: services "absent" not found' in failed.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("modelendpoint/closed", "closed serves HTTPS, and requests of the bench are plain HTTP. Measure an endpoint"),
        ("emotion", "there is no file emotion. Give modelendpoint/emotion for an endpoint of a cluster"),
    ],
)
def test_an_endpoint_that_cannot_be_measured_is_refused_with_what_to_do(
    target: str, message: str, tmp_path: Path
) -> None:
    run = invoke("bench", target, environment=environment(tmp_path))

    assert run.exit_code == 1
    assert message in " ".join(run.output.split())
