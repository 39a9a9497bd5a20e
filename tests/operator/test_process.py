"""The real process on a real API server, with the service account of the chart, its rights and admission policies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.resources.base import API_VERSION
from penstock_operator.facts import names
from testbed.cluster import Cluster
from testbed.control_plane import ControlPlane
from testbed.kubectl import Kubectl
from tests.charts.helm import CHART, NAMESPACE, ONE_NODE, RELEASE, Helm
from tests.operator import kubelet
from tests.operator.hostile import ATTACKS, Answer, hostile_pods
from tools import operator_rights as rbac

pytestmark = pytest.mark.slow

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:penstock-operator"
LONG_SECONDS = 180
LONG_LEASE = {"LEASE_DURATION_SECONDS": "60", "LEASE_DEADLINE_SECONDS": "50"}
"""Lease times for tests that are not about the Lease: on a busy machine an API server may take longer than the default
deadline."""


class Operator:
    """A process, its log and its metrics."""

    def __init__(self, kubeconfig: Path, log: Path, **settings: str) -> None:
        self.log = log
        variables = {
            "KUBECONFIG": str(kubeconfig),
            "HOST": "127.0.0.1",
            "PORT": "0",
            "IDENTITY": log.stem,
            "OPERATOR_NAMESPACE": NAMESPACE,
            # No kubelet runs the jobs of these tests: with a limit, the first one would keep the others waiting.
            "MAX_CONCURRENT_OPTIMIZATIONS": "100",
            "MAX_CONCURRENT_ROLLOUTS": "100",
            **settings,
        }
        environment = {"PATH": os.environ["PATH"], "HOME": str(log.parent)}
        environment.update({f"PENSTOCK_OPERATOR_{name}": value for name, value in variables.items()})
        with log.open("w") as file:
            self.process = subprocess.Popen([sys.executable, "-m", "penstock_operator"], env=environment, stderr=file)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def logged_message(self, part: str) -> bool:
        return any(part in line["message"] for line in self.lines())

    def logged(self, event: str) -> bool:
        return any(line.get("event") == event for line in self.lines())

    def leads(self) -> bool:
        return self.logged("ControllerStarted")

    def get(self, path: str) -> str:
        found = next(
            re.search(r"http://\S+", line["message"]) for line in self.lines() if "health on" in line["message"]
        )
        assert found is not None
        assert self.process.poll() is None, f"the operator has ended: {self.log.read_text()[-2000:]}"
        with urllib.request.urlopen(found.group() + path, timeout=60) as response:
            return str(response.read().decode())

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


def until(condition: Callable[[], Any], *, within: float = 240.0, what: str = "") -> None:
    """Wait until the condition holds. The limit only ends tests that hang; test_lease.py tests the guarantees in
    seconds, in virtual time."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < within, what or "the condition did not hold within the limit"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(private_control_plane: ControlPlane, helm: Path) -> Cluster:
    """A control plane of this module's own with the chart: its rights, its admission policies and its classes. The
    chart's operators have no node to run on."""
    Helm(helm, private_control_plane.kubeconfig).run(
        *("install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace"), values={"store": ONE_NODE}
    )
    found = Cluster(private_control_plane.kubeconfig, private_control_plane.kubectl)
    until(lambda: found.kubectl.items("modelendpoints") == [])
    return found


@pytest.fixture
def user(private_control_plane: ControlPlane, cluster: Cluster) -> Path:
    """The kubeconfig of the operator's service account, whose Lease is free."""
    cluster.kubectl.within(NAMESPACE)("delete", "lease", names.FIELD_MANAGER, "--ignore-not-found")
    return private_control_plane.user(ACCOUNT, "system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}")


@pytest.fixture
def space(cluster: Cluster) -> Iterator[Kubectl]:
    """kubectl in a namespace of this test's own."""
    with cluster.temporary_namespace("op") as name:
        yield cluster.kubectl.within(name)


@contextmanager
def started(*operators: Operator) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        for operator in operators:
            error.add_note(f"the end of {operator.log.name}:\n{operator.log.read_text()[-4000:]}")
        raise
    finally:
        for operator in operators:
            if operator.process.poll() is None:
                operator.kill()


def endpoint(name: str, **spec: Any) -> dict[str, Any]:
    base = {"model": "hf://org/model@main", "task": "text-classification"}
    return {"apiVersion": API_VERSION, "kind": "ModelEndpoint", "metadata": {"name": name}, "spec": {**base, **spec}}


def has_conditions(kubectl: Kubectl, name: str) -> bool:
    """Whether the operator has written conditions of this endpoint."""
    return bool((kubectl.get("modelendpoint", name).get("status") or {}).get("conditions"))


def test_a_standby_takes_over_after_a_kill_and_at_once_after_a_clean_exit(
    user: Path, space: Kubectl, tmp_path: Path
) -> None:
    first = Operator(user, tmp_path / "first.log")
    with started(first):
        until(first.leads, what="no operator leads")
        # The first operator has the lease duration of the chart.
        second = Operator(user, tmp_path / "second.log", LEASE_DURATION_SECONDS=f"{LONG_SECONDS}")
        with started(second):
            until(lambda: second.logged_message("standing by: first leads"))
            assert second.get("/readyz") == "ok\n"
            space.apply(endpoint("before"))
            until(lambda: has_conditions(space, "before"))

            first.kill()
            space.apply(endpoint("after"))
            until(lambda: has_conditions(space, "after"))

            third = Operator(user, tmp_path / "third.log")
            with started(third):
                until(lambda: third.logged_message("standing by: second leads"))
                assert second.end() == 0
                # Before the lease expires.
                until(third.leads, within=LONG_SECONDS / 2)
                assert third.end() == 0


def test_the_operator_uses_every_right_that_it_has_and_needs_no_other(
    cluster: Cluster, user: Path, space: Kubectl, tmp_path: Path
) -> None:
    # Texts of a ConfigMap, an optimisation that ends, a budget that comes and goes, an unused result.
    space.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "texts"}, "data": {"t": "one\ntwo\n"}})
    settings = {"UNUSED_GRACE_SECONDS": "0", "PROGRESS_SECONDS": "0.2", **LONG_LEASE}
    settings["EXPOSURE_HOSTS"] = '[{"hosts": ["*.example.com"], "namespaceSelector": {}}]'
    operator = Operator(user, tmp_path / "operator.log", **settings)
    with started(operator):
        until(operator.leads)
        source = {"textsFrom": {"configMapName": "texts", "key": "t"}}
        space.apply(endpoint("emotion", replicas=2, workload=source, scaling={"mode": "None"}))
        pod = kubelet.pod_of_job(space)
        kubelet.run(space, pod)
        kubelet.succeed(space, pod)
        until(lambda: space.items("deployments"), what="nothing is deployed")
        until(lambda: space.items("poddisruptionbudgets"))
        space.apply(endpoint("emotion", replicas=1, workload=source, scaling={"mode": "None"}))
        until(lambda: not space.items("poddisruptionbudgets"))
        space.apply(endpoint("emotion", replicas=1, workload=source, scaling={"mode": "HPA"}))
        until(lambda: space.items("horizontalpodautoscalers"), what="nothing scales in the mode HPA")
        space.apply(endpoint("emotion", replicas=1, workload=source, scaling={"mode": "None"}))
        until(lambda: not space.items("horizontalpodautoscalers"), what="the HPA of another mode stays")
        always = {"mode": "Always"}
        space.apply(endpoint("emotion", replicas=1, workload=source, scaling={"mode": "None"}, gateway=always))
        until(lambda: len(space.items("deployments,services,rolebindings")) == 5, what="there is no gateway")
        space.apply(endpoint("emotion", replicas=1, workload=source, scaling={"mode": "None"}))
        left = "deployments,services,networkpolicies,serviceaccounts,rolebindings,poddisruptionbudgets"
        ours = "app.kubernetes.io/name=penstock-gateway"
        until(lambda: not space.items(left, ours), what="something of a gateway stays")
        ingress = {"host": "emotion.example.com", "ingress": {"className": "nginx"}}
        space.apply(endpoint("emotion", replicas=1, workload=source, scaling={"mode": "None"}, exposure=ingress))
        until(lambda: space.items("ingresses"), what="there is no Ingress")
        space.apply(endpoint("emotion", replicas=1, workload=source, scaling={"mode": "None"}))
        until(lambda: not space.items("ingresses"), what="the Ingress stays")
        # Another key, suspended while its job is pending.
        space.apply(endpoint("paused", cores=2))
        until(lambda: len(space.items("jobs")) == 2)
        space.apply(endpoint("paused", cores=2, suspend=True))
        until(lambda: len(space.items("jobs")) == 1, what="the job of a suspended endpoint stays")
        space("delete", "modelendpoint", "emotion")
        # The suspended endpoint keeps its own.
        until(lambda: len(space.items("optimizedmodels")) == 1, what="an unused OptimizedModel stays")

        unused = {
            (grant.kind.name, grant.subresource, verb)
            for grant in (*rbac.CLUSTER, *rbac.NAMESPACED, *rbac.SCALERS, *rbac.HPA, *rbac.OWN)
            for verb in grant.verbs
            if verb
            not in used(operator.get("/metrics"), f"{grant.kind}{'/' if grant.subresource else ''}{grant.subresource}")
        }
        refused = [line["message"] for line in operator.lines() if "HTTP 403" in line["message"]]
        # Except those about namespaces of other tests, which are being deleted.
        refused = [message for message in refused if "being terminated" not in message]
        assert operator.end() == 0

    # Kopf's requests are not in these metrics: it watches Penstock's own kinds, or nothing above would have happened.
    watched_by_kopf = {(kind, "", "watch") for kind in ("ModelEndpoint", "OptimizedModel", "HardwareClass")}
    # The API server asks for it when a RoleBinding of a gateway is created.
    # A pod is deleted when its live answers differ: tests/operator/control/test_reconcile.py.
    assert unused == watched_by_kopf | {("ClusterRole", "", "bind"), ("Pod", "", "delete")}
    assert refused == []


def test_an_edit_of_the_texts_starts_a_new_optimisation(user: Path, space: Kubectl, tmp_path: Path) -> None:
    def texts(name: str, text: str) -> dict[str, Any]:
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"t": text}}

    operator = Operator(user, tmp_path / "operator.log", TEXTS_SECONDS="0.2", **LONG_LEASE)
    with started(operator):
        until(operator.leads)
        source = {"textsFrom": {"configMapName": "texts", "key": "t"}}
        space.apply(endpoint("emotion", workload=source))
        until(lambda: "TextsNotFound" in str(space.get("modelendpoint", "emotion").get("status")))

        space.apply(texts("texts", "one\ntwo\n"), texts("strange", "one"))
        until(lambda: len(space.items("optimizedmodels")) == 1, what="texts that were made later are not noticed")
        first = space.items("optimizedmodels")[0]["metadata"]["name"]
        space.apply(texts("strange", "two"))
        space.apply(texts("texts", "one\ntwo\nthree\n"))

        def is_wanted_anew() -> bool:
            return space.get("modelendpoint", "emotion")["status"].get("optimizedModel") not in {None, first}

        until(is_wanted_anew, what="an edit is not noticed")
        assert operator.end() == 0


def test_a_tenant_cannot_serve_the_artefact_of_another_namespace(
    cluster: Cluster, user: Path, space: Kubectl, tmp_path: Path
) -> None:
    operator = Operator(user, tmp_path / "operator.log", **LONG_LEASE)
    with cluster.temporary_namespace("tenant") as name, started(operator):
        tenant = cluster.kubectl.within(name)
        until(operator.leads)
        space.apply(endpoint("private"))
        kubelet.succeed(space, kubelet.pod_of_job(space))
        until(lambda: space.items("deployments"), what="the owner's model is not served")
        pins = {"mode": "Pinned", "artefact": kubelet.DIGEST}

        # The tenant also makes an OptimizedModel that claims to have the artefact.
        forged = space.items("optimizedmodels")[0]
        forged["metadata"] = {"name": "forged"}
        tenant.apply(forged)
        tenant.apply(endpoint("copied", optimization=pins))
        until(lambda: has_conditions(tenant, "copied"))

        status = tenant.get("modelendpoint", "copied")["status"]
        (accepted,) = [condition for condition in status["conditions"] if condition["type"] == "Accepted"]
        assert (accepted["status"], accepted["reason"]) == ("False", "ArtefactNotAllowed")
        assert f"No OptimizedModel of the namespace {name} has the artefact" in accepted["message"]
        assert "policy.sharedArtefacts" in accepted["message"]
        assert tenant.items("deployments,replicasets,services,networkpolicies", "app.kubernetes.io/name") == []

        # The owner may pin it in another endpoint of the same namespace.
        space.apply(endpoint("again", optimization=pins))
        until(lambda: len(space.items("deployments")) == 2, what="the owner cannot pin the artefact")
        assert operator.end() == 0


VERBS = {
    "GET": {"get"},
    "LIST": {"list"},
    "WATCH": {"watch"},
    # An apply creates or changes an object; the API server requires both rights for it.
    "APPLY": {"create", "patch"},
    "POST": {"create"},
    "PUT": {"update"},
    "DELETE": {"delete"},
}


def used(metrics: str, kind: str) -> set[str]:
    """The verbs that were used on a kind."""
    found = re.findall(rf'api_requests_total{{code="\d+",kind="{kind}",verb="(\w+)"}}', metrics)
    return {verb for name in found for verb in VERBS[name]}


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("get", "secrets"),
        ("list", "secrets"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("delete", "modelendpoints.penstock.dev"),
        ("patch", "modelendpoints.penstock.dev"),
        ("list", "configmaps"),
        ("watch", "configmaps"),
        ("create", "configmaps"),
        ("patch", "configmaps"),
        ("delete", "configmaps"),
        ("list", "endpointslices.discovery.k8s.io"),
        ("create", "roles.rbac.authorization.k8s.io"),
        ("bind", "roles.rbac.authorization.k8s.io"),
        ("bind", "clusterroles.rbac.authorization.k8s.io"),
        ("bind", "clusterroles.rbac.authorization.k8s.io/cluster-admin"),
        ("escalate", "roles.rbac.authorization.k8s.io"),
        ("create", "clusterroles.rbac.authorization.k8s.io"),
        ("patch", "nodes"),
        ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
        ("list", "customresourcedefinitions.apiextensions.k8s.io"),
        ("get", "namespaces"),
        ("get", "leases.coordination.k8s.io"),
        ("impersonate", "users"),
    ],
)
def test_rights_that_the_operator_does_not_need_are_denied(
    cluster: Cluster, user: Path, space: Kubectl, verb: str, resource: str
) -> None:
    answer = subprocess.run(
        [str(space.executable), "--kubeconfig", str(user), "auth", "can-i", verb, resource, "-n", space.namespace],
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.stdout.strip() == "no", answer.stderr


def test_the_operator_continues_after_a_restart_of_the_api_server(
    private_control_plane: ControlPlane, user: Path, space: Kubectl, tmp_path: Path
) -> None:
    operator = Operator(user, tmp_path / "operator.log", **LONG_LEASE)
    with started(operator):
        until(operator.leads)
        space.apply(endpoint("before"))
        until(lambda: has_conditions(space, "before"))

        private_control_plane.restart("kube-apiserver", grace_seconds=0)
        space.apply(endpoint("after"))
        space("delete", "service", "before")

        until(lambda: has_conditions(space, "after"))
        until(lambda: "before" in {item["metadata"]["name"] for item in space.items("services")})
        assert operator.process.poll() is None
        assert operator.get("/healthz") == "ok\n"
        assert operator.end() == 0


def test_a_leader_that_cannot_renew_ends_itself(
    private_control_plane: ControlPlane, user: Path, space: Kubectl, tmp_path: Path
) -> None:
    short = {"LEASE_DURATION_SECONDS": "3", "LEASE_DEADLINE_SECONDS": "2", "LEASE_INTERVAL_SECONDS": "0.5"}
    operator = Operator(user, tmp_path / "operator.log", **short)
    with started(operator):
        until(operator.leads)
        api_server = private_control_plane.daemon("kube-apiserver").process
        assert api_server is not None
        os.kill(api_server.pid, signal.SIGSTOP)
        try:
            assert operator.process.wait(60) == 1
        finally:
            os.kill(api_server.pid, signal.SIGCONT)
    assert operator.logged("LeaseLost")


def test_an_endpoint_can_be_deleted_without_an_operator_and_leaves_no_objects(
    user: Path, space: Kubectl, tmp_path: Path
) -> None:
    operator = Operator(user, tmp_path / "operator.log", **LONG_LEASE)
    with started(operator):
        until(operator.leads)
        space.apply(endpoint("emotion"))
        kubelet.succeed(space, kubelet.pod_of_job(space))
        until(lambda: space.items("deployments"))
        space.apply(endpoint("waiting", cores=2))
        until(lambda: len(space.items("jobs")) == 2)
        metadata = space.get("modelendpoint", "emotion")["metadata"]
        assert operator.end() == 0
    assert "finalizers" not in metadata
    assert not any("kopf" in name for name in metadata.get("annotations", {}))

    space("delete", "modelendpoint", "--all")

    kinds = "deployments,replicasets,services,networkpolicies,pods,jobs"
    # The finished optimisation stays, with its evidence, its log and its NetworkPolicy, for the grace time; the
    # unfinished one goes.
    until(
        lambda: (
            {item["kind"] for item in space.items(kinds)} <= {"Job", "Pod", "NetworkPolicy"}
            and len(space.items("jobs")) == len(space.items("networkpolicies")) == 1
        ),
        what=str([(item["kind"], item["metadata"]["name"]) for item in space.items(kinds)]),
    )
    assert len(space.items("optimizedmodels")) == 1


RESTORE_PAGE = Path(__file__).parents[2] / "docs/how-to/back-up-and-restore.md"


def commands_of(part: str) -> str:
    """The first block of kubectl commands after this heading of the page."""
    after = RESTORE_PAGE.read_text(encoding="utf-8").partition(f"# {part}\n")[2]
    (block,) = re.findall(r"^ *```\n( *kubectl .*?)^ *```$", after, re.MULTILINE | re.DOTALL)[:1]
    return textwrap.dedent(block)


def test_restored_endpoints_serve_their_old_plans_without_a_new_optimisation(
    cluster: Cluster, user: Path, space: Kubectl, tmp_path: Path
) -> None:
    def run(commands: str, *, may_fail: bool = False) -> None:
        """In the test's namespace instead of all."""
        # A multi-call binary knows by its name what to be.
        assert space.executable.name == "kubectl"
        words = f'"{space.executable}" --kubeconfig "{space.kubeconfig}" --namespace {space.namespace}'
        kubectl = f'kubectl() {{ {words} "$@"; }}'
        script = f"set -euo pipefail\n{kubectl}\n{commands.replace('--all-namespaces', '')}"
        subprocess.run(["bash", "-c", script], cwd=tmp_path, check=not may_fail, timeout=120)

    operator = Operator(user, tmp_path / "operator.log", **LONG_LEASE)
    with started(operator):
        until(operator.leads)
        space.apply(endpoint("emotion"))
        kubelet.succeed(space, kubelet.pod_of_job(space))
        until(lambda: space.items("deployments"))
        space.apply(endpoint("waiting", cores=2))
        until(lambda: len(space.items("optimizedmodels")) == 2)
        run(commands_of("1. OptimizedModels"))
        (before,) = (one for one in space.items("optimizedmodels") if "artefact" in one.get("status", {}))
        assert operator.end() == 0

    space("delete", "modelendpoint,optimizedmodel", "--all")
    until(lambda: space.items("deployments,jobs,optimizedmodels") == [])
    run(commands_of("Restore"), may_fail=True)  # as the page has it: the unfinished one may be gone already
    # The garbage collection of Kubernetes.
    until(lambda: len(space.items("optimizedmodels")) == 1, what="the unfinished optimisation stays")

    with started(again := Operator(user, tmp_path / "again.log", **LONG_LEASE)):
        until(again.leads)
        space.apply(endpoint("emotion"))
        until(lambda: space.items("deployments"), what="the restored endpoint is not served")
        assert space.items("jobs") == []
        (after,) = space.items("optimizedmodels")
        assert after["metadata"]["uid"] != before["metadata"]["uid"]
        assert after["status"]["artefact"] == before["status"]["artefact"]

        run(commands_of("Move to another store"))

        (moved,) = space.items("optimizedmodels")
        assert moved["status"]["artefact"]["uri"].startswith("s3://bucket/prefix/namespaces/")
        assert moved["status"]["result"] == before["status"]["result"]
        assert again.end() == 0


MEMORY_LIMIT_MEBIBYTES = 250
"""Of the operator's process at its peak: each stream is 600 MiB."""


def runs_at(kubectl: Kubectl, pod: str, address: str) -> None:
    """The pod's container runs and is ready."""
    container = {"name": names.CONTAINER, "image": "x", "imageID": "x", "ready": True, "restartCount": 0}
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-21T19:00:00Z"}],
        "containerStatuses": [{**container, "state": {"running": {"startedAt": "2026-11-21T19:00:00Z"}}}],
    }
    kubectl("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))


def names_of(kubectl: Kubectl, name: str) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in kubectl.items("pods", f"{names.NAME}={name}"))


def peak_mebibytes(process: int) -> int:
    """The largest resident memory of a process so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found.group(1)) // 1024


def test_the_operator_goes_on_whatever_pods_answer(
    cluster: Cluster, user: Path, space: Kubectl, tmp_path: Path
) -> None:
    stranger = ("127.9.9.1", names.INTERNAL_PORT)
    gateways = [(f"127.9.9.{number}", names.GATEWAY_STATUS_PORT) for number in (2, 3)]
    own = {(f"127.9.9.{number}", names.INTERNAL_PORT): answer for number, answer in enumerate(ATTACKS.values(), 10)}
    answers: dict[tuple[str, int], Answer] = {
        stranger: ATTACKS["an infinite number"],
        gateways[0]: ATTACKS["600 MiB"],
        gateways[1]: ATTACKS["deep nesting"],
        **own,
    }
    operator = Operator(user, tmp_path / "operator.log", **LONG_LEASE)
    with hostile_pods(answers) as pods, started(operator), cluster.temporary_namespace("other") as other:
        until(operator.leads)
        elsewhere = cluster.kubectl.within(other)
        # Anyone who may create pods can give them the operator's labels.
        labels = names.runtime_labels("x")
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "stranger", "labels": labels},
            "spec": {"containers": [{"name": names.CONTAINER, "image": "x"}]},
        }
        until(lambda: elsewhere.items("serviceaccounts"))
        elsewhere.apply(pod)
        runs_at(elsewhere, "stranger", stranger[0])

        # Pods of the operator's own Deployments, whose programs were replaced.
        count = len(own)
        scaling = {"minReplicas": count, "maxReplicas": count + 1}
        space.apply(endpoint("hostile", scaling=scaling, gateway={"mode": "Always"}))
        kubelet.succeed(space, kubelet.pod_of_job(space))
        until(lambda: len(names_of(space, names.RUNTIME)) == count, what="there are not all replicas")
        until(lambda: names_of(space, names.GATEWAY), what="the gateway has no pod")
        for (address, _), name in zip(gateways, names_of(space, names.GATEWAY), strict=False):
            runs_at(space, name, address)
        for (address, _), name in zip(own, names_of(space, names.RUNTIME), strict=True):
            runs_at(space, name, address)
        until(
            lambda: all({"/info", "/metrics"} <= set(pods[place].asked) for place in own),
            within=180,
            what=f"some pods are not read: { {place: pods[place].asked[:3] for place in own} }",
        )
        until(lambda: "/metrics" in pods[gateways[0]].asked, what="the gateway is not read")

        elsewhere.apply(endpoint("after"))
        until(lambda: has_conditions(elsewhere, "after"), what="a new endpoint is not reconciled")
        assert operator.get("/healthz") == "ok\n"
        assert operator.process.poll() is None
        assert peak_mebibytes(operator.process.pid) < MEMORY_LIMIT_MEBIBYTES
        failed = re.search(r'probes_total{outcome="failed"} (\S+)', operator.get("/metrics"))
        assert failed is not None
        assert float(failed.group(1)) >= count
        assert pods[stranger].connections == 0
        unexpected = {
            "TaskFailed",
            "TaskRestarted",
            "PodReadDefect",
            "ObjectSkipped",
            "ReconcileDefect",
            "ScalingDefect",
        }
        assert unexpected.isdisjoint(line.get("event") for line in operator.lines())
        assert operator.end() == 0
