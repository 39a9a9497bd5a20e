"""The console script, without a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock_operator.main import command
from penstock_operator.settings import SETTINGS

PATH = os.environ["PATH"]


def test_every_setting_is_a_flag_with_its_variable() -> None:
    page = CliRunner().invoke(command, ["--help"], terminal_width=200).output

    assert [one.flag for one in SETTINGS if one.flag not in page or one.variable not in page.replace("\n", "")] == []


def test_help_does_not_wait_for_kopf_and_the_client() -> None:
    code = (
        "import sys; from penstock_operator.main import command\n"
        "try: command(['--help'])\n"
        "except SystemExit: print(sorted({'kopf', 'kubernetes', 'aiohttp'} & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PENSTOCK_OPERATOR_WORKRES": "1"}, "Did you mean PENSTOCK_OPERATOR_WORKERS?"),
        ({"PENSTOCK_OPERATOR_KUBECONFIG": "/nowhere"}, "no way into a cluster"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_one(environment: dict[str, str], message: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "penstock_operator"],
        env={"PATH": PATH, "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
