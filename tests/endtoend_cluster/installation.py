"""Penstock on the whole cluster, as a user has it: helm, kubectl, and requests to a Service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.cluster import Cluster
from testbed.kubectl import Kubectl, KubectlError
from testbed.layout import parse_core_list
from tests.charts.helm import CHART, NAMESPACE, RELEASE, Helm

EXAMPLE = Path(__file__).parents[2] / "examples/sentence-embedding.yaml"
OPERATOR = "penstock-operator"
POLL_SECONDS = 0.5
"""A look costs a process, and a tenth of a second of a core that pods may be measured on."""
LONGEST_STEP_SECONDS = 5.0
"""Between two polls. A longer pause of the machine is not counted as waiting."""

CAPACITY_TOKENS = 128
"""Of each request where the load matters: heavy, so that a core's worth of them is a light load on what makes them."""
WITH_CAPACITY: dict[str, Any] = {
    # Many times what a request takes, so that it is the load that threatens it and not the machine's other work.
    "objective": {"latency": {"p95Milliseconds": 500}},
    "workload": {"sequenceLengths": [CAPACITY_TOKENS]},
    "serving": {"maxInputTokens": CAPACITY_TOKENS},
    # What counts is how much load a replica takes: nothing is searched for. It ends by itself, after a minute where
    # nothing else runs; a machine that is several times slower has time for it as well.
    "optimization": {"budgetSeconds": 240, "mode": "Disabled"},
}
"""The fields that scaled endpoints share; they therefore share one result, which `prepare_capacity` requests."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Installation:
    """A release of the chart, and the objects of its operator."""

    cluster: Cluster
    helm: Helm

    @property
    def system(self) -> Kubectl:
        """kubectl in the operator's namespace."""
        return self.cluster.kubectl.within(NAMESPACE)

    def operators(self, replicas: int) -> None:
        """Scale the operator to this number of pods, and wait until they are ready, or deleted."""
        self.system("scale", f"deployment/{OPERATOR}", f"--replicas={replicas}")
        if replicas:
            self.system("rollout", "status", f"deployment/{OPERATOR}", "--timeout=300s", timeout_seconds=330)
        else:
            self.system.wait(
                "delete", "pod", "--selector=app.kubernetes.io/name=penstock-operator", timeout_seconds=300
            )

    def leader(self) -> str:
        """The name of the pod that leads, or led until it was lost."""
        holder = str(self.system.get("lease", OPERATOR)["spec"].get("holderIdentity") or "")
        return holder.partition("_")[0]

    def words(self) -> str:
        """The last log lines of the operators, and the state of their pods: for a failed test."""
        try:
            pods = self.system("get", "pods", "--output", "wide")
            log = self.system("logs", f"deployment/{OPERATOR}", "--tail=15", "--all-pods=true")
        except KubectlError as error:
            return str(error)
        return f"{pods}\n{log}"


@dataclass(frozen=True)
class Endpoint:
    """One ModelEndpoint, by name, in a test's own namespace."""

    installation: Installation
    kubectl: Kubectl
    name: str

    def apply(self, **spec: Any) -> None:
        """The example, under this name and with these fields, as `kubectl apply` gives it to the API server.

        One core, a short search and a short drain: that is what fits on the smallest machine and into a test.
        """
        body: Json = yaml.safe_load(EXAMPLE.read_text())
        body["metadata"]["name"] = self.name
        body["spec"] |= {
            "cores": 1,
            # Which any machine keeps, however busy: a missed objective would be a condition, and rightly not be Ready.
            "objective": {"latency": {"p95Milliseconds": 2000}},
            "workload": {"sequenceLengths": [16]},
            # Longer ones need not be measured.
            "serving": {"maxInputTokens": 64},
            "optimization": {"budgetSeconds": 50, "engines": ["onnxruntime"], "precisions": ["fp32", "int8-dynamic"]},
            "scaling": {"mode": "None"},
            "rollout": {"drainSeconds": 3},
        } | spec
        self.kubectl.apply(body)

    def read(self) -> Json:
        """The object as it is."""
        found: Json = self.kubectl.get("modelendpoint", self.name)
        return found

    def condition(self, kind: str, body: Json | None = None) -> Json:
        """A condition; {} while there is none of that type."""
        conditions = (body or self.read()).get("status", {}).get("conditions", [])
        found: Json = next((one for one in conditions if one["type"] == kind), {})
        return found

    def until(self, is_it: Callable[[Json], bool], what: str, *, seconds: float = 600) -> Json:
        """Wait until the condition holds; fails with the logs of the operator and the state of the pods."""
        waited, looked_at = 0.0, time.monotonic()
        body: Json = {}
        while waited < seconds:
            body = self.read()
            if is_it(body):
                return body
            time.sleep(POLL_SECONDS)
            waited, looked_at = waited + min(time.monotonic() - looked_at, LONGEST_STEP_SECONDS), time.monotonic()
        pytest.fail(
            f"{self.name} is not {what} after {seconds:g} s: {yaml.safe_dump(body.get('status'))}\n{self.pods_text()}\n"
            f"{self.installation.words()}"
        )

    def until_optimised(self, *, seconds: float = 600, other_than: str = "") -> Json:
        """Ready for its current generation, on a plan from a search."""

        def is_it(body: Json) -> bool:
            status = body.get("status", {})
            plan = status.get("plan") or {}
            ready = self.condition("Ready", body)
            return bool(
                ready.get("status") == "True"
                and status.get("observedGeneration") == body["metadata"]["generation"]
                and plan.get("digest")
                and not plan.get("baseline")
                and plan["digest"] != other_than
            )

        return self.until(is_it, "Ready on an optimised plan", seconds=seconds)

    def pods(self) -> list[Json]:
        """Its serving pods that are not being deleted."""
        found = self.kubectl.items("pods", f"app.kubernetes.io/name=penstock-runtime,penstock.dev/endpoint={self.name}")
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def pods_text(self) -> str:
        """The namespace's pods and events, for people."""
        pods = self.kubectl("get", "pods,jobs,optimizedmodels", "--output", "wide")
        return f"{pods}\n{self.kubectl('get', 'events', '--sort-by=.lastTimestamp')[-4000:]}"

    def address(self) -> str:
        """The Service's own, which leads to whichever pod is ready."""
        return str(self.kubectl.get("service", self.name)["spec"]["clusterIP"])


def prepare_capacity(installation: Installation, kubectl: Kubectl) -> None:
    """Have the result measured that endpoints with a capacity share. This one serves no client and takes no core."""
    Endpoint(installation, kubectl, "prepared").apply(**WITH_CAPACITY, replicas=0)


def remove_endpoints(kubectl: Kubectl, *names: str) -> None:
    """Delete endpoints, and wait until their pods have given their cores back."""
    kubectl("delete", "modelendpoints", "--ignore-not-found", *names)
    pods = f"--selector=app.kubernetes.io/name=penstock-runtime,penstock.dev/endpoint in ({','.join(names)})"
    kubectl.wait("delete", "pods", pods, timeout_seconds=300)


def is_ready(pod: Json) -> bool:
    """Whether its condition Ready is True."""
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def processes(pod: Json) -> list[int]:
    """The processes that serve in a pod, from /proc of this machine, which is the nodes'."""
    found = []
    uid = pod["metadata"]["uid"]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if uid in (process / "cgroup").read_text() and b"python" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def cpus(pod: Json) -> set[int]:
    """The CPUs that the processes of a pod may run on."""
    found: set[int] = set()
    for process in processes(pod):
        with suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text()
            (allowed,) = [line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:")]
            found |= parse_core_list(allowed)
    return found


@contextmanager
def installed(cluster: Cluster, helm: Helm, values: Json, *, stays: bool = False) -> Iterator[Installation]:
    """`helm install --wait`, and `helm uninstall` at the end, with the definitions and the namespace.

    `stays`: not uninstalled, because the cluster ends as well.
    """
    installation = Installation(cluster, helm)
    try:
        helm.run(
            *("upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace"),
            *("--wait", "--timeout", "500s"),
            values=values,
            check=True,
            timeout_seconds=600,
        )
    except AssertionError as error:
        pytest.fail(f"{error}\n{installation.words()}")
    try:
        yield installation
    finally:
        if not stays:
            _uninstall(cluster, helm)


def _uninstall(cluster: Cluster, helm: Helm) -> None:
    helm.run("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", check=False, timeout_seconds=600)
    cluster.kubectl("delete", "--ignore-not-found", "--filename", str(CHART / "crds"), timeout_seconds=600)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout_seconds=600)
