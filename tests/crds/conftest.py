"""Ways to ask the real API server whether it accepts an object, and the real scheduler where it places a pod."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from testbed.cluster import Cluster
from testbed.kubectl import Kubectl

PLURALS = {"ModelEndpoint": "modelendpoints", "OptimizedModel": "optimizedmodels", "HardwareClass": "hardwareclasses"}


@dataclass
class ApiServer:
    """Dry runs, through `kubectl proxy`, which signs in with the kubeconfig."""

    port: int
    connection: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of a request; PATCH is a JSON merge patch."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        text = None if body is None else json.dumps(_as_kubectl(body))
        self.connection.request(method, path, text, {"Content-Type": kind})
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def verdict(self, resource: dict[str, Any], *, kind: str) -> tuple[dict[str, Any] | None, str]:
        """The object as the API server would store it, or None and the message."""
        namespaced = "" if kind == "HardwareClass" else "/namespaces/default"
        path = f"/apis/penstock.dev/v1alpha1{namespaced}/{PLURALS[kind]}?dryRun=All&fieldValidation=Strict"
        status, body = self.call("POST", path, resource)
        return (body, "") if status == http.HTTPStatus.CREATED else (None, str(body.get("message", body)))


def _as_kubectl(value: Any) -> Any:
    """As kubectl turns YAML into JSON: `1.0` becomes `1`."""
    if isinstance(value, dict):
        return {key: _as_kubectl(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_kubectl(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@contextmanager
def proxied(kubectl: Kubectl) -> Iterator[ApiServer]:
    """The API server behind this kubectl."""
    command = [str(kubectl.executable), "--kubeconfig", str(kubectl.kubeconfig), "proxy", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            line = proxy.stdout.readline()
            found = re.search(r":(\d+)$", line.strip())
            assert found is not None, f"kubectl proxy printed {line!r}"
            server = ApiServer(int(found[1]))
            yield server
            server.connection.close()
        finally:
            proxy.terminate()


@pytest.fixture(scope="session")
def api_server(crds: Cluster) -> Iterator[ApiServer]:
    """The API server of the test cluster, with our CRDs."""
    with proxied(crds.kubectl) as server:
        yield server
