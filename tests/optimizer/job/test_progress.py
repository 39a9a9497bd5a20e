"""Events count up to their totals and are written as JSON lines."""

from __future__ import annotations

import json

import pytest

from penstock.manifest import CandidateFacts, Outcome, ReasonCode, Verdict
from penstock.recipe import EngineName, Precision, Recipe
from penstock_optimizer.job.progress import ProgressEvent, ProgressReporter, Stage, settled_message


def test_events_count_the_stage_and_the_whole() -> None:
    events: list[ProgressEvent] = []
    reporter = ProgressReporter(events.append, {Stage.EXPORT: 1, Stage.CANDIDATES: 3, Stage.PLANS: 10})
    reporter.advance(Stage.EXPORT, "exported")
    reporter.advance(Stage.CANDIDATES, "one")
    reporter.advance(Stage.CANDIDATES, "still one", by=0)
    reporter.advance(Stage.CANDIDATES, "three", by=2)

    assert [(event.done, event.total, event.step, event.steps) for event in events] == [
        (1, 1, 1, 14),
        (1, 3, 2, 14),
        (1, 3, 2, 14),
        (3, 3, 4, 14),
    ]
    assert events[-1].short == "Optimizing 4/14"


def test_a_stage_that_ends_early_lowers_the_total() -> None:
    events: list[ProgressEvent] = []
    reporter = ProgressReporter(events.append, {Stage.PLANS: 10, Stage.REPORT: 1})
    reporter.advance(Stage.PLANS, "one")
    reporter.finish(Stage.PLANS)
    reporter.advance(Stage.REPORT, "written")

    assert events[-1].short == "Optimizing 2/2"


def test_more_steps_than_expected_raise_the_total() -> None:
    events: list[ProgressEvent] = []
    reporter = ProgressReporter(events.append, {Stage.CAPACITY: 1})
    reporter.advance(Stage.CAPACITY, "first")
    reporter.advance(Stage.CAPACITY, "second")
    reporter.advance(Stage.CAPACITY, "third")

    assert [(event.done, event.total) for event in events] == [(1, 1), (2, 2), (3, 3)]


def test_an_event_is_one_line_of_json() -> None:
    event = ProgressEvent(Stage.CANDIDATES, 7, 9, "two\nlines", {"candidate": {"name": "é"}}, step=8, steps=23)
    line = event.to_json_line()

    assert "\n" not in line
    assert json.loads(line) == {
        "stage": "candidates",
        "done": 7,
        "total": 9,
        "message": "two\nlines",
        "facts": {"candidate": {"name": "é"}},
        "step": 8,
        "steps": 23,
        "short": "Optimizing 8/23",
    }


PASSED = Verdict(passed=True, reason="mean_cosine 0.999")


@pytest.mark.parametrize(
    ("outcome", "reason", "verdict", "expected"),
    [
        (
            Outcome.SLOWER,
            ReasonCode.WITHIN_BUDGET.words,
            PASSED,
            "passed (mean_cosine 0.999), to be measured with the others that pass",
        ),
        (Outcome.SLOWER, "at first sight 3 times as slow", PASSED, "slower, at first sight 3 times as slow"),
        (Outcome.REJECTED, "mean_cosine 0.9", None, "rejected, mean_cosine 0.9"),
    ],
)
def test_a_candidate_is_not_called_slower_before_it_was_compared(
    outcome: Outcome, reason: str, verdict: Verdict | None, expected: str
) -> None:
    recipe = Recipe(engine=EngineName.OPENVINO, precision=Precision.BF16)
    facts = CandidateFacts(recipe=recipe, outcome=outcome, reason=reason, verdict=verdict)

    assert settled_message(facts) == f"openvino-bf16: {expected}"
