"""The workflows of .github/ are valid, and run what a developer runs. No run of theirs is proven by this."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from testbed.build import binary
from testbed.tools import ACTIONLINT

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.skipif(shutil.which("go") is None, reason="actionlint is built from its Go module, and there is no Go")
def test_actionlint_finds_nothing() -> None:
    assert WORKFLOWS

    result = subprocess.run(
        [binary(ACTIONLINT), "-no-color", *WORKFLOWS], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert result.stdout + result.stderr == ""
    assert result.returncode == 0


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit_and_state_its_version(workflow: Path) -> None:
    uses = re.findall(r"^\s*(?:- )?uses: (.+)$", workflow.read_text(), re.MULTILINE)

    assert uses
    assert [one for one in uses if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_make_targets_of_workflows_exist(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    commands = "\n".join(step["run"] for job in jobs.values() for step in job["steps"] if "run" in step)

    used = {word for line in re.findall(r"^make (.+)$", commands, re.MULTILINE) for word in line.split()}

    assert used <= targets
