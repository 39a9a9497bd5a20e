"""Processes that use the stand-in for the Neuron SDK, and those that use a real one where `STANDIN=0` is set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_standin.install import install
from neuron_standin.machine import FAULTS_VARIABLE, MACHINE_VARIABLE, write_machine

SMALL_MODEL = """
import torch

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, 32)
        self.layer = torch.nn.Linear(32, 8)

    def forward(self, ids, mask):
        return (torch.tanh(self.layer(self.table(ids) * mask.unsqueeze(-1).float())),)

torch.manual_seed(7)
model = Small().eval()
ids = torch.arange(32, dtype=torch.int32).reshape(2, 16)
mask = torch.ones((2, 16), dtype=torch.int32)
"""
"""The beginning of a program: a model and its inputs."""
SECONDS = 540.0
"""Ends a test that hangs."""


@dataclass(frozen=True)
class StandIn:
    """An installed stand-in of one generation, with or without a machine that has devices."""

    folder: Path
    generation: str

    @classmethod
    def make(cls, folder: Path, generation: str, **versions: str) -> StandIn:
        """Install it into `folder`. `versions`: of distributions, with `_` for `-`."""
        named = {name.replace("_", "-"): version for name, version in versions.items()}
        return cls(install(folder / f"standin-{generation}", generation, named), generation)

    def machine(self, **fields: Any) -> Path:
        """Describe a machine with devices, or describe it anew."""
        return write_machine(self.folder / "machine.json", self.folder / "state", self.generation, **fields)

    def environment(
        self, more: Mapping[str, str] | None = None, *, devices: bool = False, faults: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Variables that processes need; `more`: further ones. `devices`: they see those of `machine`."""
        found = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            # Its programs are small: several threads of torch would only compete with other tests.
            "OMP_NUM_THREADS": "1",
            **(more or {}),
        }
        if devices:
            found[MACHINE_VARIABLE] = str(self.folder / "machine.json")
        if faults:
            found[FAULTS_VARIABLE] = json.dumps(dict(faults))
        return found


def run_program(text: str, environment: dict[str, str], *arguments: str) -> Any:
    """Run a Python program; returns what its last line of output is as JSON. AssertionError when it fails."""
    # The compiler writes its log into the current folder.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", text, *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
