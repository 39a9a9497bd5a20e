"""Findings: each doubt about a result is a sentence, and a result without doubts has none."""

from __future__ import annotations

import pytest

from penstock.capacity import CapacityCurve
from penstock.manifest import CandidateFacts, Outcome, ReasonCode
from penstock.recipe import Precision, Recipe, ShortRoute
from penstock_optimizer.targets.encoder import of_missed_rate, of_plan, of_repeated_texts
from penstock_optimizer.targets.target import of_company, of_late_candidates, sentences
from tests.optimizer.report.sample import FP32, FP32_PLAN, INT8, sample_manifest

STATIC = INT8.model_copy(update={"precision": Precision.INT8_STATIC})


def facts(recipe: Recipe, outcome: Outcome, *, fused: int = 6, size: int = 0) -> CandidateFacts:
    blank = CandidateFacts(recipe=recipe, outcome=outcome, reason="", size_bytes=size)
    return blank.model_copy(update={"fused_nodes": {"Attention": fused} if fused else {}})


def curve(limit: float) -> CapacityCurve:
    """A curve with this limit of p95, milliseconds."""
    return sample_manifest().capacity.model_copy(update={"p95_objective_milliseconds": limit})


def test_a_plan_without_doubts_has_no_finding() -> None:
    assert not list(of_plan(FP32_PLAN, [facts(FP32, Outcome.CHOSEN)], FP32, noise=0.03))


def test_findings_about_a_plan_name_all_doubts() -> None:
    tried = [facts(FP32, Outcome.CHOSEN, fused=0), facts(INT8, Outcome.REJECTED)]
    found = list(of_plan(FP32_PLAN, tried, FP32, noise=0.3, search_finished=False))

    for word, sentence in zip(["plan search", "30%", "fused", "rejected"], found, strict=True):
        assert word in sentence


@pytest.mark.parametrize(
    ("noise", "contention", "words"),
    [
        (0.03, 0.04, []),
        (0.03, 0.23, ["not quiet: what was measured waited 23% of its time for a CPU"]),
        (0.3, 0.04, ["differed by 30%: something else ran on this machine"]),
        (0.3, 0.23, ["not quiet", "differed by 30%. Differences"]),
    ],
)
def test_a_busy_machine_and_noise_are_findings(noise: float, contention: float, words: list[str]) -> None:
    for word, sentence in zip(words, of_company(noise, contention), strict=True):
        assert word in sentence


def test_a_finding_has_the_memory_of_the_second_graph() -> None:
    plan = FP32_PLAN.model_copy(update={"recipe": STATIC, "short": ShortRoute(longest_tokens=16, recipe=INT8)})
    tried = [facts(STATIC, Outcome.CHOSEN), facts(INT8, Outcome.SLOWER, size=23_100_000)]

    def found(weighed: int | None) -> list[str]:
        return list(of_plan(plan, tried, FP32, noise=0.03, second_graph_bytes=weighed))

    assert found(40_000_000) == [
        f"Rows of up to 16 tokens have a graph of their own ({INT8.name}): 40 MB of memory, 23 MB of the artefact."
    ]
    assert "its memory was not measured" in found(None)[0]


@pytest.mark.parametrize(
    ("wanted", "limit", "finding"),
    [
        (None, 50, None),
        (60, 50, None),
        (4000, 50, "The 4,000 requests/s within a p95 of 50 ms are not reached: one replica takes 84.89 of them."),
        (60, 5, "The 60 requests/s within a p95 of 5 ms are not reached: one replica is over that p95 at any rate"),
    ],
)
def test_a_requested_rate_that_is_not_reached_is_a_finding(
    wanted: float | None, limit: float, finding: str | None
) -> None:
    found = list(of_missed_rate(curve(limit), wanted))

    assert len(found) == (0 if finding is None else 1)
    assert finding is None or found[0].startswith(finding)


@pytest.mark.parametrize(
    ("texts", "share"), [((), ""), (("a", "b"), ""), (("a", "a", "b", "a"), "50%"), (tuple("abcdefghijj"), "")]
)
def test_repeated_texts_of_the_workload_recommend_the_cache(texts: tuple[str, ...], share: str) -> None:
    found = list(of_repeated_texts(texts))

    assert len(found) == bool(share)
    assert not share or found[0].startswith(f"{share} of the workload's texts repeat an earlier one: serving.caches")


def test_candidates_for_which_a_larger_budget_has_time_are_counted() -> None:
    codes = [ReasonCode.NO_TURN, ReasonCode.TIMED_OUT, ReasonCode.NO_PLAN_TRIED, ReasonCode.OTHER]
    tried = [facts(INT8, Outcome.SKIPPED).settled(Outcome.SKIPPED, "", code) for code in codes]

    (found,) = of_late_candidates(tried)
    assert found == "The time budget ended before 2 candidates had a turn: a larger one goes on from here."
    assert not list(of_late_candidates(tried[2:]))


def test_clauses_become_sentences() -> None:
    assert list(sentences(["the cores are shared", "Done."])) == ["The cores are shared.", "Done."]
