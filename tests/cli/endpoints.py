"""Endpoint files and small models for the tests of the command line, and ways to run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from penstock.tasks import TaskName
from penstock_cli.main import cli
from tests.golden.models import BERT, Sizes, write_model
from tests.process_state import ProcessState

ROOT = Path(__file__).parents[2]
PROGRAM = ("penstock_cli.main",)
SHORTENED = ("tests.shortened", *PROGRAM)
"""The same, for optimisations that must end soon."""
TINY = Sizes(width=128, layers=2, heads=4, inner=256, positions=128)
SECONDS = 400.0
"""No command of these tests takes longer, even on a busy machine."""


def write_tiny(path: Path) -> Path:
    """A sentence model, just large enough that its products are worth quantising."""
    return write_model(path, TaskName.FEATURE_EXTRACTION, BERT, TINY, pooled=True)


def write_endpoint(path: Path, model: Path | str, **spec: Any) -> Path:
    """A ModelEndpoint file for one core; `spec` adds fields or replaces them (None takes one out)."""
    source = model if isinstance(model, str) else f"file://{model}"
    fields = {"model": source, "task": "feature-extraction", "cores": 1} | spec
    body = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ModelEndpoint",
        "metadata": {"name": "tiny"},
        "spec": {name: value for name, value in fields.items() if value is not None},
    }
    path.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return path


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without settings of Penstock, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return kept | {"PYTHONUNBUFFERED": "1"} | variables


def invoke(*words: object, environment: Mapping[str, str] | None = None) -> Result:
    """Run a command in this process. Exceptions other than PenstockError are raised."""
    cleared = {name: None for name in os.environ if name.startswith("PENSTOCK_")}
    runner = CliRunner()
    before = ProcessState.now()
    try:
        return runner.invoke(
            cli, [str(word) for word in words], env={**cleared, **(environment or {})}, catch_exceptions=False
        )
    finally:
        # A command configures its process: logging, environment, CPU affinity.
        before.restore()


def run(
    *words: object, environment: Mapping[str, str] | None = None, program: tuple[str, ...] = PROGRAM
) -> subprocess.CompletedProcess[str]:
    """Run a command in a separate process until it ends."""
    return subprocess.run(
        [sys.executable, "-m", *program, *map(str, words)],
        cwd=ROOT,
        env=clean_environment(**(environment or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
