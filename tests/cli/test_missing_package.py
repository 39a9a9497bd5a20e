"""Commands whose packages are not installed: one sentence that names the package and the extra to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.endpoints import clean_environment, write_endpoint

ROOT = Path(__file__).parents[2]
SECONDS = 120

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
from penstock_cli.entry import main
sys.argv = ["penstock", *sys.argv[1:]]
main()
"""
"""Runs the command with one package made impossible to import, as in an installation without it."""


def run_without(package: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED.format(package=package), *words],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def assert_names(done: subprocess.CompletedProcess[str], package: str, command: str) -> None:
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith(f"error: {package} "), done.stderr
    assert command in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_the_extra_of_the_command_line_the_error_names_it(package: str) -> None:
    done = run_without(package, "host")

    assert_names(done, package, "pip install 'penstock[cli]'")


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("serve", "penstock[cli,optimizer]"),
        ("bench", "penstock[cli,optimizer]"),
        ("optimize", "penstock[cli,optimizer]"),
        ("simulate", "penstock[cli,simulator]"),
    ],
)
def test_without_numpy_the_error_names_the_command_and_its_extra(command: str, extra: str) -> None:
    done = run_without("numpy", command, *(() if command == "simulate" else ("endpoint.yaml",)))

    assert_names(done, "numpy", f"penstock {command} needs it")
    assert f"pip install '{extra}'" in done.stderr


@pytest.mark.parametrize("command", [["optimize"], ["serve", "--port", "0"]])
def test_where_only_the_runtime_is_installed_an_optimisation_is_an_error(command: list[str], tmp_path: Path) -> None:
    endpoint = write_endpoint(tmp_path / "endpoint.yaml", f"file://{tmp_path}/model")

    done = run_without("onnx", *command, str(endpoint))

    assert done.returncode == 1
    assert "error: onnx not installed here: artefacts can be served" in done.stderr
    assert "penstock[optimizer]" in done.stderr
    assert "penstock-optimizer" in done.stderr
    assert "Traceback" not in done.stderr
