"""An upgrade from the previous release with helm, and a rollback, on real nodes and under load: no request is lost.

The previous release is the state before the version was raised last: its chart and its images come from there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from images.target import ROOT, project_version
from testbed.kubectl import Kubectl
from tests.charts.helm import CHART, NAMESPACE, RELEASE, Helm
from tests.endtoend_cluster.conftest import IMAGES, VALUES
from tests.endtoend_cluster.installation import Endpoint, Installation, Json, remove_endpoints
from tests.endtoend_cluster.load import Load, constant_load, until_answered

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(5400)]

DEFINITIONS = CHART.parent / "penstock-crds"
STEP_SECONDS = 2400
"""For a step on a busy machine; each ends by itself."""
COMMON: Json = {
    "images": {"optimizer": {"repository": "localhost/penstock-optimizer-demo"}, "pullPolicy": "Never"},
    "jobs": VALUES["jobs"],
    "operator": VALUES["operator"],
}
"""Values that both releases have; the tags of the images are those of the charts."""
SPEC: Json = {
    "optimization": {"budgetSeconds": 60, "mode": "Disabled"},
    "objective": {"latency": {"p95Milliseconds": 2000}},
}


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


@pytest.fixture
def upgradable(installation: Installation, previous: Previous, shared_kubectl: Kubectl) -> Iterator[Helm]:
    """The previous release in place of the present one, which is back at the end."""
    helm, cluster = installation.helm, installation.cluster
    if cluster.machine is None:
        pytest.skip("the images of the previous release can be loaded into the test bed's nodes only")
    store = helm.run("get", "values", RELEASE, "--namespace", NAMESPACE, "--output", "json").stdout
    remove_endpoints(shared_kubectl, "prepared")
    helm.run("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", timeout_seconds=600)
    cluster.kubectl("delete", "--filename", str(CHART / "crds"), timeout_seconds=600)
    for archive in previous.archives:
        cluster.load_image(archive)
    values = {**COMMON, "store": {"hostPath": _host_path(store)}}
    chart = str(previous.root / "charts/penstock")
    where = ("--namespace", NAMESPACE, "--wait", "--timeout", "900s")
    helm.run("install", RELEASE, chart, *where, values=values, timeout_seconds=1000)
    yield helm
    remove_endpoints(shared_kubectl, "upgraded")
    kept = {**VALUES, "store": {"hostPath": _host_path(store)}}
    helm.run("upgrade", RELEASE, str(CHART), *where, "--reset-values", values=kept, timeout_seconds=1000)


def _host_path(values: str) -> Json:
    found: Json = json.loads(values)["store"]["hostPath"]
    return found


def images(one: Endpoint) -> set[str]:
    """The images of its pods."""
    return {pod["spec"]["containers"][0]["image"] for pod in one.pods()}


def serves(one: Endpoint, version: str) -> Callable[[Json], bool]:
    """Whether it is Ready on a measured plan, and all its pods are of this version."""

    def check(body: Json) -> bool:
        status = body.get("status", {})
        plan = status.get("plan") or {}
        ready = one.condition("Ready", body).get("status") == "True" and not plan.get("baseline")
        return bool(ready and plan.get("digest")) and images(one) == {f"localhost/penstock-runtime:{version}"}

    return check


def test_an_upgrade_and_a_rollback_under_load_lose_no_request(
    upgradable: Helm, previous: Previous, installation: Installation, shared_kubectl: Kubectl
) -> None:
    one = Endpoint(installation, shared_kubectl, "upgraded")
    where = ("--namespace", NAMESPACE)
    began = time.monotonic()

    def report(what: str, load: Load | None = None) -> None:
        answered = "" if load is None else f", {load.answered} requests answered, {len(load.failures)} lost"
        print(f"{time.monotonic() - began:7.1f} s  {what}{answered}", flush=True)

    one.apply(**SPEC)
    one.until(serves(one, previous.version), f"Ready on {previous.version}", seconds=STEP_SECONDS)
    until_answered(one.address(), seconds=300)
    report(f"serves with {previous.version}")

    with constant_load(one.address()) as load:
        load.more(20)
        upgradable.run("upgrade", "--install", "penstock-crds", str(DEFINITIONS), *where, "--take-ownership")
        wait = ("--wait", "--timeout", "900s")
        upgradable.run("upgrade", RELEASE, str(CHART), *where, "--reset-then-reuse-values", *wait, timeout_seconds=1000)
        report("helm upgrade has ended", load)
        one.until(serves(one, project_version()), f"Ready on {project_version()}", seconds=STEP_SECONDS)
        report(f"serves with {project_version()}", load)
        optimised = one.read()["status"]["optimizedModel"]
        upgradable.run("rollback", RELEASE, *where, *wait, timeout_seconds=1000)
        report("helm rollback has ended", load)
        one.until(serves(one, previous.version), f"Ready on {previous.version}", seconds=STEP_SECONDS)
        report(f"serves with {previous.version} again", load)
        load.more(20)

    assert load.failures == []
    assert optimised in {model["metadata"]["name"] for model in shared_kubectl.items("optimizedmodels")}
