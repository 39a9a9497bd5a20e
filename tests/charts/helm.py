"""A real helm for tests, and the chart that they install."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts/penstock"
RELEASE = "penstock"
NAMESPACE = "penstock-system"

Manifest = dict[str, Any]
ONE_NODE: Manifest = {"hostPath": {"enabled": True}}
"""The store of a cluster with one node. The chart has no default."""


@dataclass(frozen=True)
class Helm:
    """The helm of the test bed."""

    executable: Path
    kubeconfig: Path | None = None
    """The kubeconfig of its cluster, for calls that need one."""

    def run(
        self, *words: str, values: Manifest | None = None, check: bool = True, timeout_seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """One call; `values` go in as a file of values. AssertionError with its output when it fails."""
        text = yaml.safe_dump(values) if values is not None else None
        files = ["--values", "-"] if values is not None else []
        cluster = ["--kubeconfig", str(self.kubeconfig)] if self.kubeconfig else []
        run = subprocess.run(
            [self.executable, *words, *files, *cluster],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )
        if check and run.returncode != 0:
            raise AssertionError(f"helm {' '.join(words)}: {run.stderr.strip()}")
        return run

    def template(self, values: Manifest | None = None, *words: str) -> list[Manifest]:
        """What an installation with these values would apply; with a folder of the nodes if they choose no store."""
        store = (values or {}).get("store", {})
        chosen = any(part.get("enabled") for part in store.values() if isinstance(part, dict))
        values = {**(values or {}), "store": store if chosen else merged(ONE_NODE, store)}
        output = self.run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *words, values=values).stdout
        return [document for document in yaml.safe_load_all(output) if document]


def merged(first: Manifest, second: Manifest) -> Manifest:
    """Both values; where both have one, that of the second counts."""
    both = {
        name: merged(first[name], second[name])
        for name in first.keys() & second.keys()
        if isinstance(first[name], dict) and isinstance(second[name], dict)
    }
    return {**first, **second, **both}


def of_kind(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one object of that kind."""
    (found,) = [one for one in manifests if one["kind"] == kind and (name is None or one["metadata"]["name"] == name)]
    return found
