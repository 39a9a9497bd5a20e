"""`kubectl penstock`, the plugin, with a real kubectl and a real API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from testbed.cluster import Cluster
from testbed.kubectl import Kubectl

STATUS = {
    "observedGeneration": 1,
    "reason": "ModelNotFound",
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "ModelNotFound",
            "message": "hf://org/missing was not found. Correct spec.model.",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-11-21T10:00:00Z",
        }
    ],
}


def test_the_plugin_shows_and_explains_a_broken_endpoint(crds: Cluster, kubectl: Kubectl) -> None:
    assert crds.kubeconfig == kubectl.kubeconfig
    spec = {"model": "hf://org/missing", "task": "fill-mask"}
    kubectl.apply(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": "broken"},
            "spec": spec,
        }
    )
    words = ("patch", "modelendpoint", "broken", "--subresource=status", "--type=merge")
    kubectl(*words, "--patch", json.dumps({"status": STATUS}))
    # kubectl finds plugins, and the plugin finds kubectl, in the PATH.
    folders = (str(Path(sys.executable).parent), str(kubectl.executable.parent), os.environ["PATH"])
    environment = {**os.environ, "PATH": os.pathsep.join(folders), "KUBECONFIG": str(kubectl.kubeconfig)}

    def plugin(*arguments: str) -> str:
        command = [str(kubectl.executable), "penstock", *arguments, "--namespace", kubectl.namespace]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert run.returncode == 0, run.stderr
        return run.stdout

    table = plugin("status")
    assert "broken" in table
    assert "0 of 1 endpoints are ready, 1 ModelNotFound." in table
    explained = plugin("why", "broken")
    assert "False: ModelNotFound. hf://org/missing was not found. Correct spec.model." in explained
    assert "docs/reference/conditions.md explains the reason ModelNotFound" in explained
