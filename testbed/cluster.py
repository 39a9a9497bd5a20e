"""A cluster as a test sees it, whoever started it."""

from __future__ import annotations

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
from testbed.tools import KUBE

VARIABLES = ("PENSTOCK_TEST_KUBECONFIG", "KUBECONFIG")
"""The first that is set names a cluster to use instead of one of our own."""


@dataclass(frozen=True)
class Cluster:
    """Where it is, and an administrator's kubectl for it."""

    kubeconfig: Path
    kubectl: Kubectl

    @contextmanager
    def temporary_namespace(
        self, prefix: str = "test", *, labels: Mapping[str, str] | None = None, wait_for_end: bool = False
    ) -> Iterator[str]:
        """A new namespace for the block; its end is waited for only where asked."""
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
            self.kubectl("delete", "namespace", name, "--ignore-not-found", f"--wait={str(wait_for_end).lower()}")


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
