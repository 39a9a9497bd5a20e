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
        """What an installation with these values would apply."""
        output = self.run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *words, values=values).stdout
        return [document for document in yaml.safe_load_all(output) if document]


def of_kind(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one object of that kind."""
    (found,) = [one for one in manifests if one["kind"] == kind and (name is None or one["metadata"]["name"] == name)]
    return found
