"""Commands of `penstock` that need no model: help, version, usage errors."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from penstock import __version__
from penstock_cli.main import COMMANDS, cli
from penstock_cli.terminal import FiniteRange
from tests.cli.endpoints import invoke, run

HEAVY = {
    "jinja2", "matplotlib", "numpy", "onnx", "onnxruntime", "openvino", "safetensors", "scipy", "sympy",
    "tokenizers", "torch", "transformers",
}  # fmt: skip


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has imported after running some code."""
    program = f"import sys\n{code}\nprint('\\n' + ' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_no_command_and_no_dependency_of_one() -> None:
    loaded = modules_after(
        "from penstock_cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit as end:\n"
        "    assert end.code == 0"
    )

    assert not loaded & (HEAVY | {"penstock_runtime", "penstock_optimizer", "pydantic", "rich", "yaml"})


@pytest.mark.parametrize("command", ["serve", "host", "optimize"])
def test_a_command_imports_no_engine_and_nothing_that_optimises(command: str) -> None:
    """`penstock serve ARTEFACT` must work with `pip install penstock[runtime]` alone."""
    allowed = {"numpy", "tokenizers"} if command == "serve" else set()

    assert not modules_after(f"import penstock_cli.{command}") & (HEAVY - allowed)


def test_help_lists_every_command_with_what_it_does() -> None:
    shown = " ".join(invoke("--help").output.split())

    assert [f"{name} {summary}" in shown for name, summary in COMMANDS.items()] == [True] * len(COMMANDS)


@pytest.mark.parametrize("words", [["--help"], ["-h"]])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_describes_itself(command: str, words: list[str]) -> None:
    result = invoke(command, *words)

    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli {command} ")
    usage, _, about = result.output.partition("\n")  # a group's usage ends with [ARGS]...
    assert "..." not in about.partition("Options:")[0], usage


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_help_and_no_number_may_be_nan_or_infinite(command: str) -> None:
    """click's own types of numbers with a point take `nan`."""
    found = cli.get_command(cli.make_context("penstock", ["--help"], resilient_parsing=True), command)

    assert found is not None
    options = [parameter for parameter in found.params if isinstance(parameter, click.Option)]
    assert [option.name for option in options if not option.help] == []
    numbers = [one for one in found.params if isinstance(one.type, click.types.FloatParamType)]
    assert [one.name for one in numbers if not isinstance(one.type, FiniteRange)] == []


def test_the_version_is_that_of_the_package() -> None:
    assert invoke("--version").output == f"penstock, version {__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = invoke("srve")

    assert result.exit_code == 2
    assert "No such command 'srve'" in result.output


def test_the_module_runs_as_the_script_does() -> None:
    result = run("host", "--cores", "1")

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cpu  ")
