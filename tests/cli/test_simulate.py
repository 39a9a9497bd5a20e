"""`penstock simulate`, from the outside."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from penstock.cli import simulate
from penstock_operator.simulator.fleet import Dispatch
from penstock_operator.simulator.policies import PolicyKind
from penstock_operator.simulator.traces import BUILT_IN
from tests.cli.endpoints import invoke


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "short.csv"
    path.write_text("seconds,requests_per_second\n0,8\n120,30\n360,0\n")
    return path


def test_the_help_names_what_there_is() -> None:
    """Written out in the command, which loads no simulator for its help."""
    assert simulate.TRACES == BUILT_IN
    assert tuple(kind.value for kind in PolicyKind) == simulate.POLICIES
    assert simulate.DISPATCHES[0] == Dispatch.LEAST_OUTSTANDING.value
    assert set(simulate.DISPATCHES) == {dispatch.value for dispatch in Dispatch}


def test_a_trace_becomes_a_table_figures_and_a_page(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"

    result = invoke(
        "simulate", "--trace", str(trace), "--policy", "penstock", "--policy", "keda", "--seeds", "1", "--price", "0.2",
        "--output", str(output),
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert "KEDA on the request rate" in result.output
    assert "late at equal hours" in result.output
    assert "1 comparisons" in result.output
    assert (output / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    rows = list(csv.DictReader((output / "figures.csv").read_text(encoding="utf-8").splitlines()))
    assert {row["policy"] for row in rows} == {"penstock", "keda"}
    assert {row["trace"] for row in rows} == {"short"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--trace", "weekly"],
            "error: weekly: No such file or directory. Give a readable CSV file, or one of the built-in traces: step",
        ),
        (["--min-replicas", "5", "--max-replicas", "2"], "error: --min-replicas 5 is over --max-replicas 2"),
    ],
)
def test_mistakes_are_one_sentence(flags: list[str], message: str, tmp_path: Path) -> None:
    result = invoke("simulate", *flags, "--output", str(tmp_path / "out"))

    assert result.exit_code == 1
    assert message in result.output
    assert not (tmp_path / "out").exists()
