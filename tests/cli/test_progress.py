"""The output of an optimisation: the same facts on a terminal of any width and in a log."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
from rich.console import Console

from penstock_cli import optimize as progress
from penstock_cli import terminal as shared
from penstock_cli.optimize import OptimizationView, candidates_table, event_from_json, show_result
from penstock_optimizer.job.progress import ProgressEvent, Stage
from tests.optimizer.report.sample import sample_manifest


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The output into a pipe."""
    written = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=written, soft_wrap=True, width=200, highlight=False)
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr(shared, "console", console)
    return written


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The output to a terminal of 100 columns."""
    written = io.StringIO()
    # The tests' own TERM is `dumb`, where rich shows no bar.
    able = {"TERM": "xterm"}
    console = Console(file=written, soft_wrap=True, width=100, highlight=False, force_terminal=True, _environ=able)
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr(shared, "console", console)
    return written


def plain(sent: str) -> str:
    """The text without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)


def table(width: int) -> str:
    """The table of candidates on a screen of that width."""
    written = io.StringIO()
    Console(file=written, soft_wrap=True, width=width).print(candidates_table(sample_manifest().candidates))
    return written.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_table_has_all_columns_and_outcomes_at_any_width(width: int) -> None:
    shown = "".join(table(width).split())
    outcomes = [candidate.outcome.value for candidate in sample_manifest().candidates]

    assert all(heading in shown for heading in ("recipe", "agrees", "verdict"))
    assert [outcome for outcome in outcomes if f"{outcome}:" not in shown] == []
    assert "chosen:" in table(width).splitlines()[1]


def test_in_a_log_no_reason_is_broken_across_lines() -> None:
    reasons = [one.reason for one in sample_manifest().candidates if len(one.reason) < 60]

    assert [reason for reason in reasons if reason not in table(200)] == []


def test_a_second_start_repeats_the_plan_and_not_the_candidates(shown: io.StringIO) -> None:
    show_result(sample_manifest(), p95_objective_milliseconds=50, table=False)

    assert "verdict" not in shown.getvalue()
    assert sample_manifest().chosen.plan.summary in shown.getvalue()


def test_the_result_has_plan_speed_and_accuracy(shown: io.StringIO) -> None:
    manifest = sample_manifest()
    show_result(manifest, p95_objective_milliseconds=50)
    names = [line.split()[0] for line in shown.getvalue().splitlines() if line and not line.startswith(" ")]

    assert names[:4] == ["plan", "speed-up", "accuracy", "capacity"]
    assert manifest.chosen.plan.summary in shown.getvalue()
    assert [finding in shown.getvalue() for finding in manifest.findings] == [True] * len(manifest.findings)


def test_an_event_is_the_same_after_writing_and_parsing() -> None:
    event = ProgressEvent(Stage.PLANS, 3, 7, "2x1 threads", {"promoted": True}, 12, 30)

    assert event_from_json(json.loads(event.to_json_line())) == event
    # Of a newer optimiser.
    assert event_from_json(json.loads(event.to_json_line()) | {"colour": "blue"}) == event


def test_a_log_gets_progress_lines_at_intervals_and_always_the_last_one(shown: io.StringIO) -> None:
    with OptimizationView() as view:
        for step in range(50):
            view(ProgressEvent(Stage.MEASURE, step, 50, f"round {step}", {}, step, 50))
        view(ProgressEvent(Stage.DONE, 1, 1, "onnxruntime-fp32", {}, 50, 50))
    lines = shown.getvalue().splitlines()

    assert len(lines) < 10
    assert lines[-1].split() == ["done", "50/50", "onnxruntime-fp32"]


def test_a_log_has_the_lines_of_a_download_and_notes_by_their_name(shown: io.StringIO) -> None:
    with OptimizationView() as view:
        view(ProgressEvent(Stage.DOWNLOAD, 34_000_000, 91_000_000, "fetching model.safetensors: 34 of 91 MB"))
        view(ProgressEvent(Stage.DOWNLOAD, 0, 0, "using the cached revision", {"note": "using the cached revision"}))

    assert shown.getvalue().splitlines() == [
        "download   fetching model.safetensors: 34 of 91 MB",
        "note       using the cached revision",
    ]


def test_a_terminal_has_a_download_in_its_bar(terminal: io.StringIO) -> None:
    with OptimizationView() as view:
        view(ProgressEvent(Stage.DOWNLOAD, 34_000_000, 91_000_000, "fetching model.safetensors: 34 of 91 MB"))
        view.refresh()
    bars = [line for line in plain(terminal.getvalue()).splitlines() if line.startswith("download")]

    assert "34/91" in bars[-1]
    assert "fetching model.safetensors" in bars[-1]


def settled(message: str) -> ProgressEvent:
    return ProgressEvent(Stage.CANDIDATES, 2, 9, message, {"candidate": {}}, 3, 30)


def test_a_log_has_a_line_for_each_finished_candidate(shown: io.StringIO) -> None:
    with OptimizationView() as view:
        for number in range(5):
            view(settled(f"recipe {number}: passed"))

    assert [line.split("  ")[-1] for line in shown.getvalue().splitlines()] == [f"recipe {n}: passed" for n in range(5)]


def test_the_progress_bar_does_not_overwrite_the_lines_above_it(terminal: io.StringIO) -> None:
    with OptimizationView() as view:
        view(ProgressEvent(Stage.EXPORT, 0, 1, "writing", {"budget_seconds": 600}, 0, 30))
        view(ProgressEvent(Stage.EXPORT, 1, 1, "fused ONNX graph", {}, 1, 30))
        view(settled("openvino-bf16: passed"))
    lines = plain(terminal.getvalue()).splitlines()

    assert "export     fused ONNX graph" in lines
    assert "2/9        openvino-bf16: passed" in lines
    assert any(line.startswith("search     takes 0:10:00 at most") for line in lines)


def test_a_long_message_is_cut_and_the_count_of_the_bar_stays(terminal: io.StringIO) -> None:
    with OptimizationView() as view:
        view(ProgressEvent(Stage.PLANS, 3, 12, "a plan and what became of it " * 9, {}, 20, 38))
        view.refresh()
    bars = [line for line in plain(terminal.getvalue()).splitlines() if line.startswith("plans")]

    assert "20/38" in bars[-1]
    assert bars[-1].rstrip().endswith("…")


def test_a_terminal_wraps_lines_between_words_with_an_indent(terminal: io.StringIO) -> None:
    shared.fact("note", "one two three four five six seven " * 5 + "/a/path/that-is-never-cut" * 5)
    first, *rest = plain(terminal.getvalue()).splitlines()

    assert first.startswith("note       one two")
    assert all(line.startswith(" " * shared.NAME_WIDTH) for line in rest)
    assert rest[-1].strip() == "/a/path/that-is-never-cut" * 5


def test_a_log_line_on_a_terminal_has_time_and_message(terminal: io.StringIO) -> None:
    record = logging.LogRecord("penstock", logging.INFO, __file__, 1, "ready: %s", ("requests are answered",), None)
    shared.ScreenLog().emit(record)

    assert re.fullmatch(r"\d\d:\d\d:\d\d   ready: requests are answered\n", plain(terminal.getvalue()))
