"""What can be built: the Dockerfile's targets that become images."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from images.errors import ImageError

ROOT = Path(__file__).parents[2]
"""The checkout."""

SOURCE_DATE_EPOCH = 1_795_219_200
"""Seconds: the one moment that all files of an image carry. The Dockerfile has the same."""


@dataclass(frozen=True)
class Target:
    """An image. `name` is the Dockerfile's target; `groups` of sources decide its content."""

    name: str
    purpose: str

    def reference(self, version: str) -> str:
        """The name under which a cluster finds it: `localhost/penstock-runtime:0.2.0`."""
        return f"localhost/penstock-{self.name}:{version}"


TARGETS = {
    target.name: target
    for target in (
        Target("operator", "watches ModelEndpoints"),
        Target("runtime", "serves an artefact"),
        Target("gateway", "holds and spreads the requests of an endpoint"),
        Target("optimizer", "optimises a model; serves one outside Kubernetes"),
        Target("optimizer-demo", "optimizer with the model of examples/sentence-embedding.yaml"),
        Target("optimizer-torch", "optimizer with PyTorch for CPUs"),
        Target("runtime-neuron", "runtime with AWS's packages for Inferentia (Inf2)"),
        Target("optimizer-neuron", "optimizer with AWS's compiler for Inferentia (Inf2)"),
        Target("runtime-neuron-legacy", "runtime with AWS's packages for Inferentia (Inf1)"),
        Target("optimizer-neuron-legacy", "optimizer with AWS's compiler for Inferentia (Inf1)"),
    )
}

USUAL = ("operator", "runtime", "gateway", "optimizer", "optimizer-demo")
"""What `make images` builds: all that the tests use. PyTorch's variant takes two more minutes and a gigabyte; those for
Inferentia need the package indexes of AWS and of PyTorch (build arguments of the Dockerfile)."""


def target_named(name: str) -> Target:
    """The target of that name. ImageError names those that there are."""
    if name not in TARGETS:
        raise ImageError(f"there is no image {name!r}: choose of {', '.join(TARGETS)}")
    return TARGETS[name]


def project_version(root: Path = ROOT) -> str:
    """The version that pyproject.toml states."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
