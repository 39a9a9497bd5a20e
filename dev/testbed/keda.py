"""KEDA on a control plane: its definitions, its operator and its server of external metrics, as processes here.

Both run as the administrator: what KEDA's own roles allow is KEDA's business.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from testbed import modules, state
from testbed.aggregated import NAMESPACE, Server, running_aggregated
from testbed.build import Say, binary, say
from testbed.control_plane import ControlPlane
from testbed.daemon import Daemon
from testbed.kubectl import Kubectl, KubectlError
from testbed.ports import some_free_ports
from testbed.programs import LOOPBACK
from testbed.readiness import await_ready
from testbed.tools import KEDA, KEDA_ADAPTER

START_SECONDS = 120.0
DEFINITION = "crd/scaledobjects.keda.sh"
REMOVE_SECONDS = 400.0
"""Where an object was made anew meanwhile, the API server begins again after a minute."""
LOOK_AGAIN_SECONDS = 15.0
"""It looks every 5 s whether all objects of a definition are gone."""


def install_definitions(kubectl: Kubectl) -> None:
    """Apply KEDA's CustomResourceDefinitions and wait until the API server serves them."""
    folder = str(modules.files(modules.KEDA) / "config" / "crd")
    kubectl("apply", "--server-side", "--force-conflicts", "--kustomize", folder)
    # Its conditions are null until its names are accepted, which kubectl does not wait through.
    kubectl.wait("jsonpath={.status.acceptedNames.kind}=ScaledObject", DEFINITION)
    kubectl.wait("condition=Established", DEFINITION)


def remove_definitions(kubectl: Kubectl) -> None:
    """Take them away, with all objects of theirs; returns when the API server no longer serves them.

    A definition that is deleted while something else writes it is handled again only with the API server's next round,
    five minutes after the last, unless something of it changes (`crd_finalizer.go`): so something does.
    """
    folder = str(modules.files(modules.KEDA) / "config" / "crd")
    kubectl("delete", "--ignore-not-found", "--wait=false", "--kustomize", folder)
    end = time.monotonic() + REMOVE_SECONDS
    while left := [name for name in kubectl("get", "crd", "--output", "name").split() if name.endswith(".keda.sh")]:
        if time.monotonic() > end:
            raise KubectlError(f"{', '.join(left)}: still there {REMOVE_SECONDS:g} s after they were deleted")
        try:
            kubectl.wait("delete", *left, timeout_seconds=LOOK_AGAIN_SECONDS)
        except KubectlError:
            with suppress(KubectlError):  # some of them may be gone by now
                kubectl("annotate", "--overwrite", *left, f"penstock.dev/asked-again-at={time.time():.0f}")


@contextmanager
def running_keda(plane: ControlPlane, *, report: Say = say) -> Iterator[None]:
    """KEDA at work, until the block ends. Its definitions must be there; its objects are the caller's to remove."""
    folder = state.owned_folder()
    operator = Daemon("keda-operator", folder)
    service, probes = some_free_ports(2)
    environment = {
        "KUBECONFIG": str(plane.kubeconfig),
        "WATCH_NAMESPACE": "",
        "POD_NAMESPACE": NAMESPACE,
        "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
    }

    def arguments(_: Server) -> Sequence[str]:
        # Its keys are in the folder from here on: KEDA's two halves trust each other by them.
        operator.start(
            executable,
            [
                "keda-operator",
                "--metrics-bind-address=0",
                f"--health-probe-bind-address={LOOPBACK}:{probes}",
                f"--metrics-service-bind-address={LOOPBACK}:{service}",
                f"--cert-dir={folder}",
                "--enable-cert-rotation=false",
                "--enable-prometheus-metrics=false",
            ],
            environment,
        )
        return [
            f"--lister-kubeconfig={plane.kubeconfig}",
            f"--metrics-service-address=localhost:{service}",
            f"--cert-dir={folder}",
            f"--port={some_free_ports(1)[0]}",
        ]

    try:
        executable = binary(KEDA, report=report)
        with running_aggregated(plane, KEDA_ADAPTER, folder, arguments, environment=environment, report=report):
            await_ready(operator, f"http://{LOOPBACK}:{probes}/readyz", seconds=START_SECONDS)
            yield
    finally:
        state.remove(folder)
