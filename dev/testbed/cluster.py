"""A cluster as tests use it: started here, or given by KUBECONFIG."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed.build import binary
from testbed.errors import BedError
from testbed.kubectl import Kubectl
from testbed.machine import Machine
from testbed.tools import KUBE

VARIABLES = ("PENSTOCK_TEST_KUBECONFIG", "KUBECONFIG")
"""The first that is set names a cluster to use instead of one of our own."""

OPERATOR = "app.kubernetes.io/name=penstock-operator"
"""Label selector of the operator's Deployment, as the chart makes it."""
INSTANCE = "app.kubernetes.io/instance"
OF_TESTS = "penstock.dev/of-tests"
"""Annotation of the operator's pods where a test installed it: one that was killed may have left it."""

POD_END_SECONDS = 120
"""Measured: two to three seconds for pods that do not listen to SIGTERM."""


@dataclass(frozen=True)
class Cluster:
    """Where it is, and an administrator's kubectl for it."""

    kubeconfig: Path
    kubectl: Kubectl

    machine: Machine | None = None
    """The cluster of this machine, where it is that one: to import images into its nodes, and to look at or end them.
    None for a control plane alone, and for a cluster that the environment names."""

    def load_image(self, archive: Path) -> None:
        """Give every node the images of an OCI archive. Raises BedError on a cluster that was not started here."""
        if self.machine is None:
            raise BedError(
                f"{archive} cannot be loaded into the cluster of {self.kubeconfig}",
                remedy="load it into its nodes yourself (kind load image-archive), or push it to its registry",
            )
        self.machine.import_image(archive)

    def require_free_of_penstock(self) -> None:
        """Raise BedError where another Penstock is installed: its operator would act instead of the one that a test
        means, and its definitions and endpoints would go with the test's."""
        found = json.loads(
            self.kubectl("get", "deployments", "--all-namespaces", f"--selector={OPERATOR}", "--output=json")
        )
        for one in found["items"]:
            annotations = one["spec"]["template"]["metadata"].get("annotations") or {}
            if OF_TESTS not in annotations:
                namespace, release = one["metadata"]["namespace"], one["metadata"]["labels"].get(INSTANCE, "penstock")
                raise BedError(
                    f"Penstock is installed in namespace {namespace} of this cluster, and these tests bring their own",
                    remedy=f"take it away (helm uninstall {release} --namespace {namespace}), or name another cluster",
                )

    @contextmanager
    def temporary_namespace(
        self, prefix: str = "test", *, labels: Mapping[str, str] | None = None, wait_for_pods: bool = False
    ) -> Iterator[str]:
        """A new namespace for the block. `wait_for_pods` waits for the end of its pods, which hold cores."""
        name = f"{prefix}-{secrets.token_hex(4)}"
        manifest = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": dict(labels or {})},
        }
        self.kubectl.apply(manifest)
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")
            if wait_for_pods:
                # By hand: the namespace controller waits 5 seconds before it begins. No new ones can come by now.
                inside = self.kubectl.within(name)
                inside("delete", "pods", "--all", "--grace-period=1", timeout_seconds=POD_END_SECONDS)


def given_cluster() -> Cluster | None:
    """The cluster that the environment names; None when none is named.

    Raises BedError when the file is not there, or its server does not answer.
    """
    variable = next((name for name in VARIABLES if os.environ.get(name)), None)
    if variable is None:
        return None
    kubeconfig = Path(os.environ[variable]).expanduser()
    if not kubeconfig.is_file():
        raise BedError(
            f"{variable} names {kubeconfig}, and there is no such file",
            remedy=f"unset {variable} to have the tests start a cluster of their own",
        )
    installed = shutil.which("kubectl")
    kubectl = Kubectl(Path(installed) if installed else binary(KUBE).with_name("kubectl"), kubeconfig)
    try:
        kubectl("get", "--raw", "/readyz", "--request-timeout=10s")
    except BedError as error:
        raise BedError(f"the cluster of {variable}={kubeconfig} does not answer: {error.message}") from error
    return Cluster(kubeconfig, kubectl)
