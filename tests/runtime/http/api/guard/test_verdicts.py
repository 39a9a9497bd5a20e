"""From scores and spans to verdicts, and which policies fit a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.endpoint_parts.guard_policy import GuardPolicy
from penstock.tasks import TaskName
from penstock_runtime.http.api.guard.verdicts import (
    NOT_READ,
    RequestVerdict,
    Span,
    TextReading,
    VerdictOutcome,
    check_policy,
    judge,
    mask,
    worst,
)
from tests.examples import examples

TEXT = "write to ann@example.org, not to bob@example.org"
ANN, BOB = Span("EMAIL", 0.9, 9, 24), Span("EMAIL", 0.8, 33, 48)


def policy_of(labels: dict[str, Any], **more: Any) -> GuardPolicy:
    return GuardPolicy.model_validate_json(json.dumps({"labels": labels, **more}))


@pytest.mark.parametrize(
    ("rule", "more", "reading", "outcome", "reason"),
    [
        ({"above": 0.9}, {}, TextReading({"BAD": 0.91}), "block", "BAD"),
        ({"above": 0.9, "reason": "no"}, {}, TextReading({"BAD": 0.91}), "block", "no"),
        ({"above": 0.9}, {}, TextReading({"BAD": 0.9}), "pass", ""),
        ({}, {}, TextReading(), "pass", ""),
        ({"above": 0}, {}, TextReading({"BAD": 0.0}), "pass", ""),
        ({"above": 0.9, "unsureAbove": 0.5}, {}, TextReading({"BAD": 0.6}), "abstain", ""),
        ({"above": 0.9, "unsureAbove": 0.5}, {}, TextReading({"BAD": 0.5}), "pass", ""),
        ({"above": 0.9, "unsureAbove": 0.5}, {"abstain": "Block"}, TextReading({"BAD": 0.6}), "block", "BAD"),
        ({}, {}, TextReading({"BAD": 0.1}, complete=False), "block", NOT_READ),
        ({}, {"incomplete": "Pass"}, TextReading({"BAD": 0.1}, complete=False), "pass", ""),
        ({"reason": "no"}, {"incomplete": "Pass"}, TextReading({"BAD": 0.9}, complete=False), "block", "no"),
        ({"action": "Report"}, {}, TextReading({"BAD": 0.9}), "pass", ""),
        ({"action": "Mask"}, {}, TextReading({"BAD": 0.9}, [Span("BAD", 0.9, 0, 5)]), "mask", ""),
        (
            {"action": "Mask"},
            {},
            TextReading({"BAD": 0.9}, [Span("BAD", 0.9, 0, 5)], complete=False),
            "block",
            NOT_READ,
        ),
        ({"action": "Mask"}, {}, TextReading({"BAD": 0.4}, [Span("BAD", 0.4, 0, 5)]), "pass", ""),
    ],
)
def test_a_verdict_follows_from_scores_and_the_policy(
    rule: dict[str, Any], more: dict[str, Any], reading: TextReading, outcome: str, reason: str
) -> None:
    verdict = judge(policy_of({"BAD": rule}, **more), TEXT, reading)

    assert (verdict.outcome, verdict.reason) == (outcome, reason)
    assert verdict.text == ("<BAD> to ann@example.org, not to bob@example.org" if outcome == "mask" else None)


@pytest.mark.parametrize(
    ("spans", "masked"),
    [
        ([ANN], "write to <EMAIL>, not to bob@example.org"),
        ([BOB, ANN], "write to <EMAIL>, not to <EMAIL>"),
        ([ANN, Span("EMAIL", 0.9, 20, 30)], "write to <EMAIL>to bob@example.org"),
        ([ANN, Span("EMAIL", 0.9, 12, 15)], "write to <EMAIL>, not to bob@example.org"),
        ([Span("EMAIL", 0.5, 9, 24)], TEXT),
        ([Span("OTHER", 0.9, 9, 24)], TEXT),
        ([Span("EMAIL", 0.9, 0, len(TEXT))], "<EMAIL>"),
    ],
)
def test_spans_are_replaced(spans: list[Span], masked: str) -> None:
    assert mask(TEXT, spans, policy_of({"EMAIL": {"action": "Mask"}}).labels) == masked


@settings(max_examples=examples(200))
@given(
    st.text(max_size=40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10), st.floats(0, 1)), max_size=5),
)
def test_no_character_of_a_masked_span_is_left(text: str, drawn: list[tuple[int, int, float]]) -> None:
    labels = policy_of({"X": {"action": "Mask", "replacement": ""}}).labels
    spans = [Span("X", score, start, min(len(text), start + length)) for start, length, score in drawn]
    spans = [one for one in spans if one.start < one.end]
    covered = {at for one in spans if one.score > 0.5 for at in range(one.start, one.end)}

    assert mask(text, spans, labels) == "".join(one for at, one in enumerate(text) if at not in covered)


def test_the_verdict_about_a_request_is_its_most_severe_one() -> None:
    rising = [
        VerdictOutcome.PASS,
        VerdictOutcome.ABSTAIN,
        VerdictOutcome.MASK,
        VerdictOutcome.UNAVAILABLE,
        VerdictOutcome.BLOCK,
    ]

    for count in range(1, len(rising) + 1):
        assert worst([RequestVerdict(one) for one in rising[:count]]).outcome is rising[count - 1]
    assert worst([]).outcome is VerdictOutcome.PASS


@pytest.mark.parametrize(
    ("task", "labels", "policy", "message"),
    [
        ("text-classification", ["SAFE", "INJECTION"], {"INJECTION": {}}, ""),
        ("token-classification", ["O", "B-PER", "I-PER"], {"PER": {"action": "Mask"}}, ""),
        ("zero-shot-token-classification", [], {"anything": {"action": "Mask"}}, ""),
        ("text-classification", ["SAFE", "INJECTION"], {"INJECTON": {}}, "Did you mean 'INJECTION'?"),
        ("token-classification", ["O", "B-PER", "I-PER"], {"B-PER": {}}, "Did you mean 'PER'?"),
        ("text-classification", ["SAFE", "INJECTION"], {"INJECTION": {"action": "Mask"}}, "finds no spans"),
    ],
)
def test_a_policy_must_fit_the_model(task: str, labels: list[str], policy: dict[str, Any], message: str) -> None:
    def check() -> None:
        check_policy(policy_of(policy), TaskName(task), labels, room=62)

    if not message:
        check()
        return
    with pytest.raises(SpecError, match=message.replace("?", r"\?")):
        check()


@pytest.mark.parametrize(("more", "shares"), [({"overlapTokens": 62}, True), ({}, False)])
def test_a_policy_must_fit_the_models_windows_and_scores(more: dict[str, Any], shares: bool) -> None:
    policy = policy_of({"INJECTION": {}}, **more)
    check_policy(policy_of({"INJECTION": {}}, overlapTokens=61), TaskName.TEXT_CLASSIFICATION, ["INJECTION"], room=62)

    with pytest.raises(SpecError, match="windows of this model have 62 tokens" if more else "regression"):
        check_policy(policy, TaskName.TEXT_CLASSIFICATION, ["INJECTION"], room=62, gives_shares=shares)


@pytest.mark.parametrize(
    ("task", "policy", "message"),
    [
        ("feature-extraction", {"labels": {"X": {}}}, "serving.guardPolicy is for text-classification"),
        ("text-classification", {"labels": {}}, "serving.guardPolicy.labels"),
        ("text-classification", {"labels": {"X": {"abve": 0.5}}}, "above"),
        ("text-classification", {"labels": {"X": {"above": 2}}}, "above"),
        ("text-classification", {"labels": {"X": {"action": "block"}}}, "Block"),
        ("text-classification", {"labels": {"X": {"category": "ilicit"}}}, "illicit"),
        ("text-classification", {"labels": {"X": {"unsureAbove": 0.6}}}, "lower unsureAbove"),
        ("text-classification", {"labels": {"X": {}}, "role": ["user"]}, "roles"),
    ],
)
def test_a_wrong_policy_is_refused_with_the_field(task: str, policy: dict[str, Any], message: str) -> None:
    value: dict[str, Any] = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ModelEndpoint",
        "metadata": {"name": "guard"},
        "spec": {
            "model": "file:///m",
            "task": task,
            "hardwareClass": "any",
            "cores": 1,
            "objective": {"latency": {"p95Milliseconds": 20}},
            "serving": {"guardPolicy": policy},
        },
    }

    with pytest.raises(SpecError) as error:
        ModelEndpoint.from_object(value)
    assert message in str(error.value)
