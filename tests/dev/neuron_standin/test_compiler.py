"""The stand-in's compilers take the documented arguments, and refuse others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from neuron_standin import LABEL
from neuron_standin.compiler import NEURON_CC, NEURONX_CC, parse
from tests.neuron_standin_env import SECONDS, StandIn


@pytest.mark.parametrize(
    ("arguments", "of_inf2", "error"),
    [
        (["--neuroncore-pipeline-cores", "4"], True, "unrecognized arguments: --neuroncore-pipeline-cores"),
        (["--auto-cast", "some"], True, "argument --auto-cast: invalid choice: 'some'"),
        (["-lnc", "2", "--target", "inf2"], True, "argument -lnc: only for trn2"),
        (["--target", "inf2"], False, "unrecognized arguments: --target"),
        (["--neuroncore-pipeline-cores"], False, "argument --neuroncore-pipeline-cores: invalid choice: ''"),
    ],
)
def test_names_the_first_wrong_argument(arguments: list[str], of_inf2: bool, error: str) -> None:
    assert parse(arguments, NEURONX_CC if of_inf2 else NEURON_CC).error == error


def _compile(standin: StandIn, *options: str, **faults: object) -> subprocess.CompletedProcess[str]:
    source = standin.folder / "graph"
    source.write_text("graph", encoding="utf-8")
    command = ["neuron-cc", "compile", str(source), "--output", str(standin.folder / "neff"), *options]
    return subprocess.run(
        command, cwd=standin.folder, env=standin.environment(faults=faults), capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip


def test_the_executable_compiles_refuses_pipelines_and_is_killed_as_asked(tmp_path: Path) -> None:
    standin = StandIn.make(tmp_path, "inf1")

    assert LABEL in _compile(standin, "--fast-math", "all").stdout
    assert (standin.folder / "neff").read_text("utf-8") == "graph"
    refused = _compile(standin, "--neuroncore-pipeline-cores", "8", refuse_pipeline_cores=[8])
    assert refused.returncode == 1
    assert "neuroncore-pipeline-cores (8) may not be suitable for this network" in refused.stderr
    assert _compile(standin, "--neuroncore-pipeline-cores", "4", refuse_pipeline_cores=[8]).returncode == 0
    assert _compile(standin, compiler_killed=True).returncode == -9


def test_the_executable_fails_without_a_library_or_a_folder_for_its_log(tmp_path: Path) -> None:
    standin = StandIn.make(tmp_path, "inf1")

    linked = _compile(standin, missing_library="libxml2.so.2")
    assert linked.returncode == 1
    assert "libxml2.so.2: cannot open shared object file" in linked.stderr
    assert "libxml2.so.2" in (standin.folder / "log-neuron-cc.txt").read_text("utf-8")
    (standin.folder / "log-neuron-cc.txt").unlink()
    (standin.folder / "log-neuron-cc.txt").mkdir()  # no user can write to it
    refused = _compile(standin)
    assert refused.returncode == 1
    assert "log-neuron-cc.txt" in refused.stderr
