"""kubectl for tests and for the test bed itself: the real program; its errors are raised with its output."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from testbed.api import Api, NotAnswered, api_of
from testbed.errors import BedError
from testbed.programs import SPARING

T = TypeVar("T")
Manifest = Mapping[str, Any]


class KubectlError(BedError):
    """kubectl ended with an error; `message` is its output."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with one kubeconfig, in one namespace.

    kubectl("get", "pods", "-o", "wide")              its output
    kubectl.apply({...}, {...})                       manifests as values
    kubectl.get("deployment", "web")["status"]        an object as a value
    kubectl.within("other")("get", "pods")            another namespace
    kubectl.wait("condition=Ready", "pod/web")
    """

    executable: Path
    kubeconfig: Path
    namespace: str = "default"

    def __call__(self, *arguments: str, text: str | None = None, timeout_seconds: float = 120) -> str:
        """Run it and return its standard output; `text` is its standard input.

        Raises KubectlError with its standard error when it fails, or takes longer than the time-out.
        """
        # By its name: the executable may be a multi-call binary's other name, or plain kubectl.
        command = [str(self.executable), "--kubeconfig", str(self.kubeconfig), "--namespace", self.namespace]
        try:
            result = subprocess.run(
                [*command, *arguments],
                input=text,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
                env={**os.environ, **SPARING},
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {' '.join(arguments)}: no answer within {timeout_seconds:g} s") from error
        if result.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def within(self, namespace: str) -> Kubectl:
        """The same in another namespace."""
        return Kubectl(self.executable, self.kubeconfig, namespace)

    def using(self, kubeconfig: Path) -> Kubectl:
        """The same as another user."""
        return Kubectl(self.executable, kubeconfig, self.namespace)

    def apply(self, *manifests: Manifest, server_side: bool = True) -> None:
        """Apply objects; those without a namespace go to this one's."""
        if (
            server_side
            and self._directly(lambda api: [api.apply(one, self.namespace) for one in manifests]) is not None
        ):
            return
        mode = ["--server-side", "--force-conflicts"] if server_side else []
        self("apply", *mode, "--filename", "-", text=as_list(manifests))

    def delete(self, *manifests: Manifest, wait: bool = True) -> None:
        """Delete objects; it is no error if they are gone already."""
        self("delete", "--ignore-not-found", f"--wait={str(wait).lower()}", "--filename", "-", text=as_list(manifests))

    def get(self, kind: str, name: str) -> Any:
        """One object as a value. Raises KubectlError when there is none."""
        found = self._directly(lambda api: api.get(kind, name, self.namespace))
        return json.loads(self("get", kind, name, "--output", "json")) if found is None else found

    def items(self, kind: str, selector: str = "") -> list[Any]:
        """All objects of a kind that a label selector chooses."""
        found = self._directly(lambda api: api.items(kind, self.namespace, selector))
        if found is None:
            found = json.loads(self("get", kind, "--selector", selector, "--output", "json"))["items"]
        return list(found)

    def wait(self, condition: str, *objects: str, timeout_seconds: float = 60) -> None:
        """Wait until `condition`, such as `condition=Ready` or `delete`, holds for the objects (`pod/web`)."""
        self(
            "wait",
            f"--for={condition}",
            f"--timeout={timeout_seconds:g}s",
            *objects,
            timeout_seconds=timeout_seconds + 30,
        )

    def _directly(self, ask: Callable[[Api], T]) -> T | None:
        """Without a process; None where kubectl has to do it, or to say why it cannot be done."""
        try:
            api = api_of(self.kubeconfig)
            return None if api is None else ask(api)
        except (NotAnswered, OSError):
            return None


def as_list(manifests: Iterable[Manifest]) -> str:
    """Objects as one List, in JSON, which kubectl reads as it reads YAML."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
