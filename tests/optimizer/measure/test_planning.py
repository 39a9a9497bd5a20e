"""Stage 2 and the conclusion, with candidates that follow a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.endpoint import Latency, Objective
from penstock.errors import OptimizationError
from penstock.manifest import CandidateFacts, Outcome
from penstock.recipe import Batching, Recipe
from penstock_optimizer.budget import Budget
from penstock_optimizer.conclusion import conclude, findings, plan_trials, speed_up
from penstock_optimizer.isolation import Failure, WorkerFailed
from penstock_optimizer.planning import Planner
from penstock_optimizer.search.climb import Climbed, Step
from penstock_optimizer.search.goal import Goal
from penstock_optimizer.search.survivors import WITHIN_BUDGET
from penstock_optimizer.search.trials import Trials
from penstock_optimizer.tryout import TryOut
from penstock_optimizer.workfolder import WorkFolder
from tests.optimizer.measure.fake_lab import FakeLab, Script, crash
from tests.optimizer.report.sample import FP32_PLAN, latency
from tests.optimizer.search.cost_model import FP32, INT8, STATIC

LENGTHS = (8, 32, 128, 512)
GOAL = Goal.of(Objective(latency=Latency(p95_milliseconds=20)))


def plan_search(
    tmp_path: Path,
    scripts: dict[Recipe, Script],
    *,
    seconds: float = 1e4,
    may_serve: Callable[[Recipe], bool] = lambda _: True,
    spent_before: float = 0.0,
) -> tuple[Climbed, TryOut, FakeLab, list[Step]]:
    work = WorkFolder(tmp_path / "work")
    lab = FakeLab(work.candidate, {FP32: Script(), **scripts})
    budget = Budget(seconds, lab.clock)
    tryout = TryOut(lab, work, budget, lengths=LENGTHS)
    tryout.enter(FP32, teacher=True)
    for recipe in scripts:
        if recipe != FP32:
            tryout.enter(recipe)
    tryout.measure()
    steps: list[Step] = []
    planner = Planner(
        tryout, lab, budget, GOAL, cores=2, lengths=LENGTHS, expected=LENGTHS, may_serve=may_serve, on_step=steps.append
    )
    lab.clock.now += spent_before
    try:
        return planner.search(Trials(work.trials)), tryout, lab, steps
    finally:
        tryout.close()


def test_without_time_for_plans_the_fastest_recipe_by_its_latencies_wins(tmp_path: Path) -> None:
    late = WorkerFailed(Failure.TIMED_OUT, "sample did not end within 1 s")
    scripts = {FP32: Script(fails={"sample": late}), INT8: Script(speed=3.0, fails={"sample": late})}

    climbed, tryout, _, _ = plan_search(tmp_path, scripts, seconds=1e4, spent_before=1e4)

    assert climbed.plan.recipe == INT8
    assert (climbed.sample, climbed.finished) == (None, False)
    assert outcome(tryout, INT8)[0] is not Outcome.FAILED


def outcome(tryout: TryOut, recipe: Recipe) -> tuple[Outcome, str]:
    facts = next(one for one in tryout.entrants if one.recipe == recipe).facts
    return facts.outcome, facts.reason


def test_the_fastest_finalist_wins_with_a_plan_that_its_batching_allows(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2, batching=Batching.SINGLE), STATIC: Script(speed=1.9)}
    climbed, _, lab, steps = plan_search(tmp_path, scripts)

    assert climbed.plan.recipe == INT8
    assert climbed.plan.batching is Batching.SINGLE
    assert steps
    assert lab.open_now == 0


def test_a_finalist_that_dies_on_a_plan_is_started_again(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2), STATIC: Script(speed=1.9, fails={"sample": crash()})}
    climbed, _, lab, steps = plan_search(tmp_path, scripts)

    assert climbed.plan.recipe == INT8
    assert any(step.comparison is None for step in steps)
    assert lab.count("sample", STATIC) == 1


def test_an_incumbent_that_dies_again_and_again_has_failed_and_the_next_one_wins(tmp_path: Path) -> None:
    scripts = {
        INT8: Script(speed=2.2, fails={"sample": crash(9)}, fails_after=3),
        STATIC: Script(speed=1.9),
    }
    climbed, tryout, _, _ = plan_search(tmp_path, scripts)

    assert climbed.plan.recipe == STATIC
    assert outcome(tryout, INT8) == (Outcome.FAILED, "killed by signal 9 while its plans were measured")


def test_a_wide_run_that_crashes_does_not_end_a_finalist(tmp_path: Path) -> None:
    climbed, _, _, _ = plan_search(tmp_path, {INT8: Script(speed=2, fails={"wide_from": crash()})})

    assert climbed.plan.recipe == INT8


def test_nothing_that_can_be_measured_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptimizationError, match="signal 11"):
        plan_search(tmp_path, {FP32: Script(fails={"sample": crash()})})


def test_an_fp32_graph_that_the_endpoint_excludes_is_served_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    slow = {STATIC: Script(speed=0.9)}
    excluded, _, _, _ = plan_search(tmp_path / "a", slow, may_serve=lambda recipe: recipe != FP32)
    alone, _, _, _ = plan_search(tmp_path / "b", {}, may_serve=lambda recipe: recipe != FP32)

    assert excluded.plan.recipe == STATIC
    assert alone.plan.recipe == FP32


def test_a_budget_that_is_spent_gives_the_fp32_plan_unless_something_was_seen_to_be_better(tmp_path: Path) -> None:
    climbed, _, lab, _ = plan_search(tmp_path, {INT8: Script(speed=2)}, seconds=30)

    assert lab.clock.now < 30
    assert climbed.plan.recipe in {FP32, INT8}


# The conclusion


def facts(recipe: Recipe, outcome: Outcome, reason: str = WITHIN_BUDGET, factor: float | None = 1.0) -> CandidateFacts:
    return CandidateFacts(
        recipe=recipe, outcome=outcome, reason=reason, latency=latency(factor) if factor is not None else ()
    )


def concluded(candidates: list[CandidateFacts], chosen: Recipe) -> dict[Recipe, tuple[Outcome, str]]:
    found = conclude(candidates, chosen=chosen, teacher=FP32, expected=[16, 64], steps=[])
    return {one.recipe: (one.outcome, one.reason) for one in found}


def test_the_chosen_one_says_how_much_faster_and_the_others_how_much_slower() -> None:
    candidates = [
        facts(FP32, Outcome.TEACHER, "the judge"),
        facts(INT8, Outcome.SLOWER, factor=0.5),
        facts(STATIC, Outcome.SLOWER, factor=0.6),
    ]

    assert concluded(candidates, INT8) == {
        FP32: (Outcome.TEACHER, "the judge"),
        INT8: (
            Outcome.CHOSEN,
            "best for the objective within the accuracy budget: 2.0 times as fast as fp32 over the workload",
        ),
        STATIC: (Outcome.SLOWER, "1.20 times the latency of the chosen recipe over the workload"),
    }


def test_fp32_itself_may_be_chosen() -> None:
    found = concluded([facts(FP32, Outcome.TEACHER), facts(INT8, Outcome.REJECTED, "cosine", None)], FP32)

    assert found[FP32] == (Outcome.CHOSEN, "no candidate within the accuracy budget beats fp32 beyond the noise")
    assert found[INT8] == (Outcome.REJECTED, "cosine")


def test_a_recipe_of_equal_latency_says_what_it_lost_by(tmp_path: Path) -> None:
    climbed, tryout, _, steps = plan_search(tmp_path, {INT8: Script(speed=2), STATIC: Script(speed=2.0)})
    found = conclude(
        [one.facts for one in tryout.entrants], chosen=climbed.plan.recipe, teacher=FP32, expected=LENGTHS, steps=steps
    )
    reason = next(one.reason for one in found if one.recipe == STATIC)

    assert "no difference beyond the noise" in reason
    assert reason.endswith(f"against {INT8.name}")
    assert len(plan_trials(steps)) == len(steps)


def test_speed_up_is_given_where_both_were_measured() -> None:
    fast = facts(INT8, Outcome.CHOSEN, factor=0.5)
    fast = fast.model_copy(update={"latency": fast.latency[:2]})

    assert speed_up(facts(FP32, Outcome.TEACHER), fast) == pytest.approx({8: 2.0, 16: 2.0})


def test_findings_name_all_doubts() -> None:
    fused = facts(FP32, Outcome.CHOSEN).model_copy(update={"fused_nodes": {"Attention": 6}})
    quiet = findings(
        candidates=[fused], teacher=FP32, plan=FP32_PLAN, noise=0.03, skipped_for_time=0, search_finished=True,
        shared_cpus=False, host=(),
    )  # fmt: skip
    doubtful = findings(
        candidates=[facts(FP32, Outcome.CHOSEN), facts(INT8, Outcome.REJECTED)],
        teacher=FP32, plan=FP32_PLAN, noise=0.3, skipped_for_time=2, search_finished=False, shared_cpus=True,
        host=("the cores are not this process's alone",),
    )  # fmt: skip

    assert quiet == ()
    words = [
        "2 candidates had a turn",
        "plan search",
        "30%",
        "fused",
        "rejected",
        "load generator",
        "The cores are not this process's alone.",
    ]
    assert len(doubtful) == len(words)
    for word, sentence in zip(words, doubtful, strict=True):
        assert word in sentence
