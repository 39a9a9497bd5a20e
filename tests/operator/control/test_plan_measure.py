"""`penstock plan NAME --measure` with a real kubectl, API server and operator: classes are measured by jobs of the
operator, and nothing is left but their results."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelNotFound
from penstock.resources.job_summary import Summary
from testbed.cluster import Cluster
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl
from tests.cli.endpoints import PROGRAM, clean_environment
from tests.operator import kubelet
from tests.operator.running import become_true, running
from tests.operator.scaling.scene import CAPACITY

QUICK, REFUSED, EMPTY = "quick-of-tests", "refused-of-tests", "empty-of-tests"
NODE, LABEL = "node-of-plan-tests", "penstock.dev/plan-tests"
NAME = "planned"
MEASURED_BY = f"{NAME}-{QUICK}-1"
ENDPOINT = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "ModelEndpoint",
    "metadata": {"name": NAME},
    "spec": {
        "model": "hf://org/emotion@main",
        "task": "text-classification",
        "objective": {"latency": {"p95Milliseconds": 20}},
        "pod": {"nodeSelector": {"kubernetes.io/hostname": "elsewhere"}},
        # Its own class is not optimised here.
        "suspend": True,
    },
}


def hardware_class(name: str, **spec: Any) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": LABEL, "operator": "In", "values": ["yes"]}]}
    fields = {"isa": "avx512-vnni", "price": {"perCoreHour": 0.05}, "nodeSelectorTerms": [term], **spec}
    return {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": name}, "spec": fields}


@pytest.fixture(scope="module")
def classes(nodeless: Cluster) -> Iterator[Cluster]:
    """A class with a node, one that is for other namespaces, and one without a node. No pod of other tests gets onto
    the node."""
    install_crds(nodeless)
    other = {"matchExpressions": [{"key": LABEL, "operator": "In", "values": ["no"]}]}
    objects = [
        {**hardware_class("any"), "spec": {}},
        hardware_class(QUICK),
        hardware_class(REFUSED, allowedNamespaces={"matchLabels": {"of": "others"}}),
        hardware_class(EMPTY, nodeSelectorTerms=[other]),
    ]
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "labels": {LABEL: "yes"}},
        "spec": {"taints": [{"key": LABEL, "effect": "NoExecute"}]},
    }
    nodeless.kubectl.apply(*objects, node)
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    status = {
        "conditions": [ready],
        "allocatable": {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "40Gi", "pods": "10"},
    }
    nodeless.kubectl("patch", "node", NODE, "--subresource=status", "-p", json.dumps({"status": status}))
    yield nodeless
    nodeless.kubectl("delete", "node", NODE)
    nodeless.kubectl("delete", "hardwareclass", QUICK, REFUSED, EMPTY)


@asynccontextmanager
async def planning(kubectl: Kubectl, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`penstock plan NAME --measure`, as a process."""
    folders = (str(kubectl.executable.parent), os.environ["PATH"])
    environment = clean_environment(PATH=os.pathsep.join(folders), KUBECONFIG=str(kubectl.kubeconfig))
    command = [sys.executable, "-m", *PROGRAM, "plan", NAME, "--measure", "--namespace", kubectl.namespace]
    process = await asyncio.create_subprocess_exec(
        *command, "--rate=10", *words, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def names(kubectl: Kubectl, kind: str = "modelendpoints") -> list[str]:
    return [one["metadata"]["name"] for one in kubectl.items(kind)]


def finish(kubectl: Kubectl, *, works: bool) -> None:
    """The job of the one endpoint that is measured ends."""
    pod = kubelet.pod_of_job(kubectl)
    if works:
        result = {**kubelet.RESULT, "capacity": CAPACITY}
        published = kubelet.artefact(kubectl.namespace).to_object()
        summary = Summary.model_validate({"succeeded": True, "artefact": published, "result": result})
    else:
        summary = Summary.failed(ModelNotFound("hf://org/emotion@main was not found", remedy="Correct spec.model"))
    kubelet.finish(kubectl, pod, summary.to_message(), code=0 if works else 1)


@pytest.mark.slow
def test_classes_are_measured_by_the_operator_and_the_rest_is_noted(
    classes: Cluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    async def scenario() -> None:
        await asyncio.to_thread(kubectl.apply, ENDPOINT)
        async with planning(kubectl, "--dry-run") as process:
            listed, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b"")
        lines = sorted(listed.decode().splitlines())
        assert [line.split()[1].rstrip(",") for line in lines] == [QUICK, REFUSED]
        assert f"1 core: on one of {NODE} (ModelEndpoint {MEASURED_BY})" in lines[0]
        assert await asyncio.to_thread(names, kubectl) == [NAME]

        async with (
            running(classes.kubeconfig, kubectl.namespace),
            planning(kubectl, "--output=json", f"--ledger={tmp_path / 'ledger'}") as process,
        ):
            await asyncio.to_thread(finish, kubectl, works=True)
            output, errors = await process.communicate()
            assert process.returncode == 0, errors
            assert await asyncio.to_thread(names, kubectl) == [NAME]
            (model,) = await asyncio.to_thread(kubectl.items, "optimizedmodels")

        assert model["spec"]["hardwareClass"] == QUICK
        shown = json.loads(output)
        (row,) = [one for one in shown["rows"] if (one["hardware_class"], one["cores"]) == (QUICK, 1)]
        assert row["evidence"]["origin"] == "measured on the class"
        assert row["evidence"]["basis"].startswith(f"OptimizedModel {model['metadata']['name']}, ")
        (note,) = [one for one in shown["notes"] if "was not measured" in one]
        assert note.startswith(f"{REFUSED}, 1 core was not measured: ")
        progress = errors.decode()
        assert f"{QUICK}, 1 core: measured: 79.7 requests/s for each replica" in progress

        # What was measured is not measured again.
        async with planning(kubectl, "--dry-run", f"--classes={QUICK},{EMPTY}") as process:
            _, errors = await process.communicate()
        assert process.returncode == 1
        assert "no hardware class is to be measured: those with nodes were measured" in errors.decode()
        assert f"{EMPTY}: no ready node" in errors.decode()

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["fails", "interrupted", "late"])
def test_endpoints_of_a_measurement_that_does_not_succeed_are_deleted(
    end: str, classes: Cluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    words = [
        f"--classes={QUICK}",
        f"--ledger={tmp_path / 'ledger'}",
        *(["--measure-seconds=1"] if end == "late" else []),
    ]

    async def scenario() -> tuple[int | None, str, str]:
        await asyncio.to_thread(kubectl.apply, ENDPOINT)
        async with running(classes.kubeconfig, kubectl.namespace), planning(kubectl, *words) as process:
            if end == "fails":
                await asyncio.to_thread(finish, kubectl, works=False)
            elif end == "interrupted":
                await become_true(lambda: bool(kubectl.items("jobs")))
                process.send_signal(signal.SIGTERM)
            output, errors = await process.communicate()
            await become_true(lambda: names(kubectl) == [NAME] and not names(kubectl, "jobs"))
        return process.returncode, output.decode(), errors.decode()

    code, output, errors = asyncio.run(scenario())
    if end == "interrupted":
        assert code == 130, errors
        return
    assert code == 0, errors
    why = "was not found. Correct spec.model." if end == "fails" else "not measured in time"
    assert f"{QUICK}, 1 core was not measured: " in output
    assert why in output
