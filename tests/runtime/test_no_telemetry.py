"""No library that we use sends telemetry or writes an identifier for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_runtime.no_telemetry import REFUSALS

DECIDED = {*REFUSALS, "CI", "TF_BUILD", "JENKINS_URL"}
"""What would silence some of them without us; continuous integration sets such variables."""


@pytest.mark.parametrize(
    "module",
    [
        "penstock_runtime.engines.openvino",
        "penstock_runtime.engines.onnxruntime",
        "penstock_optimizer.export.reader",
        "penstock_optimizer.quantise.openvino",
    ],
)
def test_no_library_writes_a_machine_id_to_the_home_folder(module: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in DECIDED}
    process = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(bool(sys.modules.get('openvino_telemetry')))"],
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert (process.stdout.strip(), list(tmp_path.rglob("*"))) == ("False", [])
