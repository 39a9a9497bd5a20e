"""docs/reference/benchmarks.md names commands that exist, and all of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import pytest

from penstock_bench.cell import FOREIGN_SHARE
from penstock_bench.grid import BenchOptions
from penstock_bench.judge import FLOOR_ALLOWANCE, QUIET_ENOUGH, published_table

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reference" / "benchmarks.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"python -m (benchmarks[\w.]*)", TEXT)))
PROGRAMS = sorted(
    path.relative_to(ROOT / "dev").with_suffix("").as_posix().replace("/", ".").removesuffix(".__main__")
    for path in (ROOT / "dev" / "benchmarks").rglob("*.py")
    if re.search(r"^(@click\.command|main = experiment)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
)


def test_every_program_is_described() -> None:
    assert COMMANDS == PROGRAMS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_described_program_exists_and_has_help(name: str) -> None:
    module = importlib.import_module(f"{name}.__main__" if name == "benchmarks.peers" else name)

    assert isinstance(module.main, click.Command)
    assert module.main.help


def test_flags_of_the_examples_exist() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("penstock bench")]
    flags = {flag.replace("-", "_") for line in lines for flag in re.findall(r"--([\w-]+)", line)}

    assert flags
    assert flags <= set(BenchOptions.model_fields)


def test_figures_of_the_rules_are_those_of_the_code() -> None:
    stated = re.search(r"published ratio .*?\(([\d., \n]+) at 8 to 512 tokens\)", TEXT, flags=re.DOTALL)
    assert stated is not None

    assert [float(value) for value in stated[1].replace("\n", " ").split(",")] == [
        round(row.ratio, 2) for row in published_table().values()
    ]
    assert f"within {FLOOR_ALLOWANCE - 1:.0%}".replace("%", " %") in TEXT
    assert f"over {FOREIGN_SHARE:.0%}".replace("%", " %") in TEXT
    assert f"Over {QUIET_ENOUGH:.0%}".replace("%", " %") in TEXT
