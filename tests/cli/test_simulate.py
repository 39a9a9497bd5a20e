"""`penstock simulate`, run as a command."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_cli import simulate
from penstock_simulator.choices import BUILT_IN_TRACES, Dispatch, PolicyKind
from penstock_simulator.policies import POLICIES
from penstock_simulator.traces import built_in
from tests.cli.endpoints import PROGRAM, SECONDS, clean_environment, invoke
from tests.cli.test_errors import assert_one_sentence


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "short.csv"
    path.write_text("seconds,requests_per_second\n0,8\n120,30\n360,0\n")
    return path


def test_the_help_lists_all_traces_policies_and_dispatch_modes() -> None:
    shown = invoke("simulate", "--help").output

    assert all(name in shown for name in (*BUILT_IN_TRACES, *PolicyKind, *Dispatch))


@pytest.mark.parametrize("name", BUILT_IN_TRACES)
def test_every_listed_trace_is_built_in(name: str) -> None:
    assert built_in(name, 1.0, seed=1).name == name


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


def test_without_a_terminal_progress_is_printed_as_lines(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "PLAIN_SECONDS", 0.0)

    result = invoke(
        "simulate", "--trace", str(trace), "--policy", "penstock", "--policy", "keda", "--seeds", "1", "--workers", "1",
        "--output", str(tmp_path / "out"),
    )  # fmt: skip

    lines = [line.split() for line in result.output.splitlines()]
    (runs,) = [words[1] for words in lines if words[:1] == ["work"]]
    shown = [words[1:] for words in lines if words[:1] == ["simulate"]]
    assert shown == [[f"{done}/{runs}", "short"] for done in range(1, int(runs) + 1)]


def test_a_long_run_prints_how_to_shorten_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MANY_REQUESTS", 1e6)
    path = tmp_path / "busy.csv"
    path.write_text("seconds,requests_per_second\n0,200\n60,0\n")

    result = invoke(
        "simulate", "--trace", str(path), "--policy", "hpa-p95", "--seeds", "1", "--output", str(tmp_path / "out")
    )

    # Ten minutes of warm-up and one of the trace, for each value of the knob.
    runs = len(POLICIES[PolicyKind.HPA_P95].values)
    assert f"{runs} runs, {runs * 0.132:.0f} million requests; --trace, --policy and --seeds" in result.output


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


def test_a_read_only_folder_is_an_error_before_the_work(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for output, why in ((tmp_path / "file" / "out", "Not a directory"), (Path("/proc/penstock"), "No such file")):
        result = invoke("simulate", "--trace", str(trace), "--output", str(output))

        assert result.exit_code == 1
        assert result.stdout == ""
        assert_one_sentence(result.stderr, f"the folder {output} cannot be written ({why}", "with --output")


def test_a_write_error_after_the_work_is_an_error_too(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "figures.csv").mkdir()

    result = invoke("simulate", "--trace", trace, "--policy", "keda", "--seeds", 1, "--output", tmp_path)

    assert result.exit_code == 1
    assert_one_sentence(
        result.stderr, f"the folder {tmp_path} cannot be used ({tmp_path}/figures.csv: Is a directory)", "Delete that"
    )


@pytest.mark.parametrize(
    ("workers", "line"),
    [
        (1, "work "),
        # The first progress, after ten seconds: the workers run by then.
        pytest.param(2, "simulate ", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_the_command_and_its_workers_with_130(workers: int, line: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", *PROGRAM, "simulate", "--trace", "step", "--seeds", "50", "--output", tmp_path]
    with subprocess.Popen(
        [*map(str, words), "--workers", str(workers)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert any(printed.startswith(line) for printed in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)

    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
