"""The files that `penstock optimize` executes are those that docs/explanation/architecture.md lists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_runtime.engines.native.library import library_path
from tests.docs.executed import ROOT, compare
from tests.optimizer.end_to_end.optimising import endpoint
from tests.optimizer.end_to_end.small_model import write_small_bert

BUDGET_SECONDS = 3000
"""Not reached: an optimisation that runs out of time leaves files out."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not library_path().is_file(), reason="the native engine was not compiled")
def test_an_optimisation_executes_just_the_files_of_the_page(tmp_path: Path) -> None:
    wanted = endpoint(write_small_bert(tmp_path / "model"), {"engines": ["native"]})
    (tmp_path / "endpoint.json").write_text(
        json.dumps(wanted.model_dump(mode="json", by_alias=True, exclude={"status"}))
    )
    (tmp_path / "executed").mkdir()
    words = ["optimize", tmp_path / "endpoint.json", "--store", tmp_path / "store", "--budget", str(BUDGET_SECONDS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.traced", "penstock_cli.entry", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "EXECUTED": str(tmp_path / "executed")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    executed = {line for file in (tmp_path / "executed").iterdir() for line in file.read_text().splitlines()}
    compare("optimisation", {name for name in executed if name.startswith(("cli/", "optimizer/"))})
