"""How an optimisation looks: the same facts in a terminal of any width and in a log."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from penstock.cli import progress, screen
from penstock.cli.progress import OptimizationView, candidates_table, event_from_json, show_result
from penstock_optimizer.progress import Progress, Stage
from tests.optimizer.report.sample import sample_manifest


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is printed into a pipe."""
    written = io.StringIO()
    console = Console(file=written, soft_wrap=True, width=200, highlight=False)
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr(screen, "console", console)
    return written


def table(width: int) -> str:
    """The candidates as a screen of that width has them."""
    written = io.StringIO()
    Console(file=written, soft_wrap=True, width=width).print(candidates_table(sample_manifest().candidates))
    return written.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_width_loses_a_column_or_an_outcome(width: int) -> None:
    shown = "".join(table(width).split())
    outcomes = [candidate.outcome.value for candidate in sample_manifest().candidates]

    assert all(heading in shown for heading in ("recipe", "agrees", "verdict"))
    assert [outcome for outcome in outcomes if f"{outcome}:" not in shown] == []


def test_a_log_has_every_reason_in_one_piece() -> None:
    shown = table(200)

    assert [
        one.reason for one in sample_manifest().candidates if len(one.reason) < 60 and one.reason not in shown
    ] == []


def test_the_chosen_one_stands_first() -> None:
    assert "chosen:" in table(200).splitlines()[1]


def test_the_result_has_plan_speed_and_accuracy(shown: io.StringIO) -> None:
    manifest = sample_manifest()
    show_result(manifest, p95_objective_milliseconds=50)
    names = [line.split()[0] for line in shown.getvalue().splitlines() if line and not line.startswith(" ")]

    assert names[:4] == ["plan", "speed-up", "accuracy", "capacity"]
    assert manifest.chosen.plan.summary in shown.getvalue()
    assert [finding in shown.getvalue() for finding in manifest.findings] == [True] * len(manifest.findings)


def test_an_event_survives_the_way_through_a_line() -> None:
    event = Progress(Stage.PLANS, 3, 7, "2x1 threads", {"promoted": True}, 12, 30)

    assert event_from_json(json.loads(event.to_json_line())) == event


def test_an_event_of_a_newer_optimiser_is_understood() -> None:
    line = {"stage": "export", "done": 1, "total": 1, "message": "m", "colour": "blue"}

    assert event_from_json(line) == Progress(Stage.EXPORT, 1, 1, "m")


def test_a_log_gets_a_line_now_and_then_and_the_last_one_always(shown: io.StringIO) -> None:
    with OptimizationView() as view:
        for step in range(50):
            view(Progress(Stage.MEASURE, step, 50, f"round {step}", {}, step, 50))
        view(Progress(Stage.DONE, 1, 1, "onnxruntime fp32", {}, 50, 50))
    lines = shown.getvalue().splitlines()

    assert len(lines) < 10
    assert lines[-1].split() == ["done", "50/50", "onnxruntime", "fp32"]
