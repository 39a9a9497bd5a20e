"""Upgrades with helm, and rollbacks, on real nodes and under load: no request is lost, no stream breaks, and one model
is optimised and one endpoint replaces its pods at a time.

The previous release is the state before the version was raised last: its chart and its images come from there. It has
no text generation, so that streams run during an upgrade from this release to one with other tags of its images.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from images.target import ROOT, project_version
from testbed.kubectl import Kubectl
from testbed.layout import Node
from testbed.machine import Machine
from testbed.node import RunningNode
from tests.charts.helm import CHART, NAMESPACE, RELEASE, Helm
from tests.endtoend_cluster.chat import NO_END, TOKENS, until_streamed
from tests.endtoend_cluster.chat import SPEC as CHAT
from tests.endtoend_cluster.conftest import IMAGES, VALUES
from tests.endtoend_cluster.installation import Endpoint, Installation, Json, remove_endpoints
from tests.endtoend_cluster.load import Load, constant_load, until_answered
from tests.gateway.streams import streams

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(5400)]

DEFINITIONS = CHART.parent / "penstock-crds"
RUNTIME = "localhost/penstock-runtime"
OPTIMIZER = "localhost/penstock-optimizer-demo"
NEXT = "next"
"""A tag for this release's images, as those of a later release would have."""
WHERE = ("--namespace", NAMESPACE)
WAIT = (*WHERE, "--wait", "--timeout", "900s")
HELM_SECONDS = 1000
STEP_SECONDS = 2400
"""For a step on a busy machine; each ends by itself."""
POLL_SECONDS = 0.2
COMMON: Json = {
    "images": {"optimizer": {"repository": OPTIMIZER}, "pullPolicy": "Never"},
    "jobs": VALUES["jobs"],
    "operator": VALUES["operator"],
}
"""Values that both releases have; the tags of the images are those of the charts."""
SPEC: Json = {
    "optimization": {"budgetSeconds": 60, "mode": "Disabled"},
    "objective": {"latency": {"p95Milliseconds": 2000}},
}
LENGTHS = {"first": [16], "second": [32]}
"""Tokens of the requests of two endpoints: each has a result of its own."""


def git(*words: str) -> str:
    run = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.fail(f"the previous release cannot be read from git: {run.stderr.strip()}", pytrace=False)
    return run.stdout.strip()


@dataclass(frozen=True)
class Previous:
    """The previous release."""

    root: Path
    version: str
    archives: tuple[Path, ...]


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    """Its sources, and its images."""
    raised = git("log", "-1", "--format=%H", "-G^version = ", "--", "pyproject.toml")
    root = tmp_path_factory.mktemp("previous")
    git("archive", "--output", str(root / "sources.tar"), f"{raised}^")
    with tarfile.open(root / "sources.tar") as sources:
        sources.extractall(root, filter="data")
    words = [sys.executable, "-m", "images", "build", *IMAGES]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'dev'}"}
    run = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    version = project_version(root)
    assert version != project_version()
    return Previous(root, version, tuple(map(Path, run.stdout.split())))


@pytest.fixture(scope="module")
def machine(installation: Installation, archives: list[Path], shared_kubectl: Kubectl) -> Iterator[Machine]:
    """The test bed, with a third node: two endpoints, a job and the next pod of a rollout take more than two cores."""
    found = installation.cluster.machine
    if found is None:
        pytest.skip("the images of another release can be loaded into the test bed's nodes only")
    remove_endpoints(shared_kubectl, "prepared")
    with found.additional_node(*archives) as node:
        yield Machine((*found.nodes, node.node))


@pytest.fixture
def with_previous(
    installation: Installation, previous: Previous, machine: Machine, shared_kubectl: Kubectl
) -> Iterator[Helm]:
    """The previous release in place of the present one, which is back at the end."""
    helm, cluster = installation.helm, installation.cluster
    before: Json = json.loads(helm.run("get", "values", RELEASE, *WHERE, "--output", "json").stdout)
    helm.run("uninstall", RELEASE, *WHERE, "--wait", timeout_seconds=600)
    cluster.kubectl("delete", "--filename", str(CHART / "crds"), timeout_seconds=600)
    for archive in previous.archives:
        machine.import_image(archive)
    values = {**COMMON, "store": {"hostPath": before["store"]["hostPath"]}}
    helm.run(
        "install", RELEASE, str(previous.root / "charts/penstock"), *WAIT, values=values, timeout_seconds=HELM_SECONDS
    )
    yield helm
    remove_endpoints(shared_kubectl, *LENGTHS)
    helm.run("upgrade", RELEASE, str(CHART), *WAIT, "--reset-values", values=before, timeout_seconds=HELM_SECONDS)


def images(one: Endpoint) -> set[str]:
    """The images of its pods."""
    return {pod["spec"]["containers"][0]["image"] for pod in one.pods()}


def digest(one: Endpoint) -> str:
    """The artefact of its plan."""
    return str(one.read()["status"]["plan"]["digest"])


def serves(one: Endpoint, version: str) -> Callable[[Json], bool]:
    """Whether it is Ready on a measured plan, and all its pods are of this version."""

    def check(body: Json) -> bool:
        status = body.get("status", {})
        plan = status.get("plan") or {}
        ready = one.condition("Ready", body).get("status") == "True" and not plan.get("baseline")
        return bool(ready and plan.get("digest")) and images(one) == {f"{RUNTIME}:{version}"}

    return check


@dataclass
class AtOnce:
    """The largest numbers of optimisations and rollouts that were seen at the same time, and all that were seen."""

    kubectl: Kubectl
    most_jobs: int = 0
    most_rollouts: int = 0
    jobs: set[str] = field(default_factory=set)
    rollouts: set[str] = field(default_factory=set)
    looks: int = 0

    def look(self) -> None:
        """Each kind is read in one request, which gives the state at one moment."""
        jobs = {job["metadata"]["name"] for job in self.kubectl.items("jobs") if not _has_ended(job)}
        templates: dict[str, int] = {}
        for one in self.kubectl.items("replicasets", "app.kubernetes.io/name=penstock-runtime"):
            if one["spec"]["replicas"]:
                name = one["metadata"]["labels"]["penstock.dev/endpoint"]
                templates[name] = templates.get(name, 0) + 1
        rollouts = {name for name, count in templates.items() if count > 1}
        self.most_jobs, self.jobs = max(self.most_jobs, len(jobs)), self.jobs | jobs
        self.most_rollouts, self.rollouts = max(self.most_rollouts, len(rollouts)), self.rollouts | rollouts
        self.looks += 1


def _has_ended(job: Json) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(one["type"] in ("Complete", "Failed") and one["status"] == "True" for one in conditions)


@contextmanager
def looking(kubectl: Kubectl) -> Iterator[AtOnce]:
    """Look several times a second while the block runs."""
    found, over = AtOnce(kubectl), threading.Event()

    def look() -> None:
        while not over.wait(POLL_SECONDS):
            found.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@dataclass
class Report:
    """Prints the table of docs/how-to/upgrade.md."""

    loads: list[Load] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __call__(self, what: str) -> None:
        answered, lost = sum(one.answered for one in self.loads), sum(len(one.failures) for one in self.loads)
        print(f"{time.monotonic() - self.began:7.1f} s  {what}: {answered} requests answered, {lost} lost", flush=True)


def test_an_upgrade_from_the_previous_release_and_a_rollback_lose_no_request(
    with_previous: Helm, previous: Previous, installation: Installation, shared_kubectl: Kubectl
) -> None:
    endpoints = [Endpoint(installation, shared_kubectl, name) for name in LENGTHS]
    report = Report()

    def until_all(version: str) -> None:
        for one in endpoints:
            one.until(serves(one, version), f"Ready on {version}", seconds=STEP_SECONDS)

    for one in endpoints:
        one.apply(**SPEC, workload={"sequenceLengths": LENGTHS[one.name]})
    until_all(previous.version)
    for one in endpoints:
        until_answered(one.address(), seconds=300)
    report(f"serve with {previous.version}")

    with ExitStack() as loads:
        report.loads = [loads.enter_context(constant_load(one.address(), per_second=5)) for one in endpoints]
        for load in report.loads:
            load.more(20)
        before = {one.name: digest(one) for one in endpoints}
        with_previous.run("upgrade", "--install", "penstock-crds", str(DEFINITIONS), *WHERE, "--take-ownership")
        with looking(shared_kubectl) as seen:
            with_previous.run(
                "upgrade", RELEASE, str(CHART), *WAIT, "--reset-then-reuse-values", timeout_seconds=HELM_SECONDS
            )
            report("helm upgrade has ended")
            until_all(project_version())
        report(f"serve with {project_version()}")
        optimised = {one.read()["status"]["optimizedModel"] for one in endpoints}
        with_previous.run("rollback", RELEASE, *WAIT, timeout_seconds=HELM_SECONDS)
        report("helm rollback has ended")
        until_all(previous.version)
        report(f"serve with {previous.version} again")
        after = {one.name: digest(one) for one in endpoints}
        for load in report.loads:
            load.more(20)

    assert [load.failures for load in report.loads] == [[], []]
    # The results of the previous release: its pods cannot read the others.
    assert after == before
    assert len(optimised) == 2
    assert optimised <= {model["metadata"]["name"] for model in shared_kubectl.items("optimizedmodels")}
    check_one_at_a_time(seen, rollouts=set(LENGTHS), jobs=2)


def check_one_at_a_time(seen: AtOnce, *, rollouts: set[str], jobs: int) -> None:
    """All of these were seen, and no two at once: the chart's defaults."""
    print(f"{seen.looks} looks: {len(seen.jobs)} jobs, and rollouts of {', '.join(sorted(seen.rollouts))}")
    assert seen.rollouts == rollouts
    assert len(seen.jobs) == jobs
    assert (seen.most_jobs, seen.most_rollouts) == (min(jobs, 1), 1)


@pytest.fixture
def next_release(installation: Installation, machine: Machine, shared_kubectl: Kubectl) -> Iterator[None]:
    """A second tag for this release's images; the installation is as before at the end."""
    for node in machine.nodes:
        _tag(node)
    values = installation.helm.run("get", "values", RELEASE, *WHERE, "--output", "json").stdout
    yield
    remove_endpoints(shared_kubectl, "chat", "first")
    installation.helm.run(
        "upgrade", RELEASE, str(CHART), *WAIT, "--reset-values", values=json.loads(values), timeout_seconds=HELM_SECONDS
    )


def _tag(node: Node) -> None:
    for image in (RUNTIME, OPTIMIZER):
        RunningNode(node).ctr("images", "tag", "--force", f"{image}:{project_version()}", f"{image}:{NEXT}")


@pytest.mark.usefixtures("next_release")
def test_an_upgrade_to_other_images_and_a_rollback_break_no_stream(
    chat_model: str, installation: Installation, shared_kubectl: Kubectl
) -> None:
    helm, version = installation.helm, project_version()
    chat, first = (Endpoint(installation, shared_kubectl, name) for name in ("chat", "first"))
    report = Report()

    def until_both(tag: str) -> None:
        for one in (first, chat):
            one.until(serves(one, tag), f"Ready on {tag}", seconds=STEP_SECONDS)

    chat.apply(**CHAT, model=chat_model)
    first.apply(**SPEC)
    until_both(version)
    until_answered(first.address(), seconds=300)
    until_streamed(chat.address(), chat)
    report(f"serve with {version}")

    # Each stream on a connection of its own: the Service chooses a pod for each.
    with (
        constant_load(first.address(), per_second=5) as load,
        streams(
            f"http://{chat.address()}", tokens=TOKENS, clients=2, new_connections=True, logit_bias=NO_END
        ) as answers,
        looking(shared_kubectl) as seen,
    ):
        report.loads = [load]
        load.more(20)
        answers.more(2, seconds=STEP_SECONDS)
        tags = [f"images.{image}.tag={NEXT}" for image in ("runtime", "optimizer")]
        limits = ["maxConcurrentOptimizations=1", "maxConcurrentRollouts=1"]
        changes = [word for value in (*tags, *limits) for word in ("--set", value)]
        helm.run(
            "upgrade", RELEASE, str(CHART), *WAIT, "--reset-then-reuse-values", *changes, timeout_seconds=HELM_SECONDS
        )
        report("helm upgrade has ended")
        until_both(NEXT)
        report(f"serve with {NEXT}")
        answers.more(2, seconds=STEP_SECONDS)
        # The results of the other images stay: only the serving pods are replaced.
        check_one_at_a_time(seen, rollouts={"chat", "first"}, jobs=0)
        helm.run("rollback", RELEASE, *WAIT, timeout_seconds=HELM_SECONDS)
        report("helm rollback has ended")
        until_both(version)
        report(f"serve with {version} again")
        answers.more(2, seconds=STEP_SECONDS)

    assert load.failures == []
    assert answers.failures == []
    print(f"{answers.answered} streams of {TOKENS} tokens, none broken")
