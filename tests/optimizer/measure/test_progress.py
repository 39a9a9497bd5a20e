"""Events count up to their totals and travel as JSON lines."""

from __future__ import annotations

import json

from penstock_optimizer.progress import Progress, Reporter, Stage


def test_events_count_the_stage_and_the_whole() -> None:
    events: list[Progress] = []
    reporter = Reporter(events.append, {Stage.EXPORT: 1, Stage.CANDIDATES: 3, Stage.PLANS: 10})
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


def test_a_stage_that_ends_early_gives_its_steps_back() -> None:
    events: list[Progress] = []
    reporter = Reporter(events.append, {Stage.PLANS: 10, Stage.REPORT: 1})
    reporter.advance(Stage.PLANS, "one")
    reporter.finish(Stage.PLANS)
    reporter.advance(Stage.REPORT, "written")

    assert events[-1].short == "Optimizing 2/2"


def test_more_steps_than_promised_raise_the_promise() -> None:
    events: list[Progress] = []
    reporter = Reporter(events.append, {Stage.CAPACITY: 1})
    reporter.advance(Stage.CAPACITY, "first")
    reporter.advance(Stage.CAPACITY, "second")
    reporter.expect(Stage.CAPACITY, 1)
    reporter.advance(Stage.CAPACITY, "third")

    assert [(event.done, event.total) for event in events] == [(1, 1), (2, 2), (3, 3)]


def test_an_event_is_one_line_of_json() -> None:
    event = Progress(Stage.CANDIDATES, 7, 9, "two\nlines", {"candidate": {"name": "é"}}, step=8, steps=23)
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
