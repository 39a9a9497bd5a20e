"""From `kubectl apply` to the first answer of `/predict` through the Service, with the artefact in the store.

    make cluster && make deploy
    eval "$(.venv/bin/python -m testbed status | grep ^export)"
    python -m benchmarks.first_answer

On the cluster of KUBECONFIG, where Penstock is installed; run on one of its nodes, from where Services can be reached.
The example of one core is optimised once, for half a minute, and deleted. Then, alternately: another endpoint of the
same spec is applied, gets requests until it answers, and is deleted. The aim is 10 s. The steps of the pod: made by
the operator, container started, ready.
"""

from __future__ import annotations

import http.client
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.operator_scale import processor
from testbed.cluster import given_cluster
from testbed.errors import BedError
from testbed.kubectl import Kubectl

Json = dict[str, Any]

EXAMPLE = Path(__file__).parents[2] / "examples/one-core.yaml"
AIM_SECONDS = 10.0
PATIENCE_SECONDS = 600.0
BODY = json.dumps({"inputs": "I like you. I love you."})


def apply(kubectl: Kubectl, name: str) -> None:
    """The example under this name, with a short search and an objective that any machine keeps."""
    value: Json = yaml.safe_load(EXAMPLE.read_text())
    value["metadata"]["name"] = name
    value["spec"] |= {
        "objective": {"latency": {"p95Milliseconds": 2000}},
        "workload": {"sequenceLengths": [16]},
        "optimization": {"budgetSeconds": 30, "engines": ["onnxruntime"], "precisions": ["fp32", "int8-dynamic"]},
        "scaling": {"mode": "None"},
        "rollout": {"drainSeconds": 1},
    }
    kubectl.apply(value)


def answers(address: str) -> bool:
    """Whether one request is answered by the model."""
    connection = http.client.HTTPConnection(address, 80, timeout=5)
    try:
        connection.request("POST", "/predict", BODY, {"content-type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def until(condition: Any, what: str, pause: float) -> None:
    """Return when it is so. ClickException after ten minutes."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise click.ClickException(f"{what} after {PATIENCE_SECONDS:g} s: see kubectl describe modelendpoints")
        time.sleep(pause)


def optimised(kubectl: Kubectl, name: str) -> bool:
    """Whether it serves a result and not the fp32 graph."""
    status: Json = kubectl.get("modelendpoint", name).get("status") or {}
    plan: Json = status.get("plan") or {}
    return bool(plan.get("digest") and not plan.get("baseline"))


def remove(kubectl: Kubectl, name: str) -> None:
    """Delete it and wait until its pods have given their cores back."""
    kubectl("delete", "modelendpoint", name)
    kubectl.wait("delete", "pods", f"--selector=penstock.dev/endpoint={name}", timeout_seconds=120)


def steps(kubectl: Kubectl, name: str, began: float) -> Json:
    """Seconds after `began` (since the epoch) at which its pod was made, started and ready; API times are whole
    seconds, so these may be one too few."""
    (pod,) = kubectl.items("pods", f"penstock.dev/endpoint={name}")
    status = pod["status"]
    started = status["containerStatuses"][0]["state"]["running"]["startedAt"]
    ready = next(one["lastTransitionTime"] for one in status["conditions"] if one["type"] == "Ready")
    moments = {"made": pod["metadata"]["creationTimestamp"], "started": started, "ready": ready}
    return {
        step: round(datetime.strptime(moment, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp() - began, 1)
        for step, moment in moments.items()
    }


def turn(kubectl: Kubectl, name: str) -> Json:
    """One life; what took how long."""
    epoch, began = time.time(), time.monotonic()
    apply(kubectl, name)
    # One process of kubectl for each look would be part of the measured time: it waits by itself.
    kubectl("wait", "--for=create", f"service/{name}", "--timeout=60s", timeout_seconds=90)
    address = str(kubectl.get("service", name)["spec"]["clusterIP"])
    until(lambda: answers(address), f"{name} does not answer", 0.02)
    seconds = time.monotonic() - began
    found = {"first answer": round(seconds, 2), **steps(kubectl, name, epoch)}
    remove(kubectl, name)
    return found


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True)
def main(rounds: int) -> None:
    """Measure."""
    try:
        cluster = given_cluster()
        if cluster is None:
            raise click.ClickException(
                "no cluster: set KUBECONFIG (`make cluster` prints the value), and `make deploy`"
            )
        with cluster.temporary_namespace("answer", wait_for_pods=True) as namespace:
            kubectl = cluster.kubectl.within(namespace)
            apply(kubectl, "first")
            click.echo("optimising the model, once")
            until(lambda: optimised(kubectl, "first"), "it is not optimised", 1.0)
            kubectl("rollout", "status", "deployment/first", "--timeout=120s", timeout_seconds=150)
            remove(kubectl, "first")
            turns = []
            for number in range(rounds):
                turns.append(turn(kubectl, f"again-{number}"))
                click.echo(f"  {turns[-1]}")
    except BedError as error:
        raise click.ClickException(str(error)) from error
    waits = sorted(one["first answer"] for one in turns)
    figures = {"median": waits[len(waits) // 2], "worst": waits[-1], "aim": AIM_SECONDS}
    click.echo(
        json.dumps({"processor": processor(), "apply_to_first_answer_seconds": figures, "turns": turns}, indent=1)
    )
    click.echo("pass" if waits[-1] <= AIM_SECONDS else "FAIL")


if __name__ == "__main__":
    main()
