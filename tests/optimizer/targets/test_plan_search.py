"""Stage 2 and the conclusions, with scripted candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import OptimizationError
from penstock.manifest import CandidateFacts, Outcome, ReasonCode
from penstock.recipe import Batching, Recipe
from penstock.resources.endpoint import Latency, Objective
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from penstock_optimizer.candidate.work_folder import WorkFolder
from penstock_optimizer.search.climb import SearchResult, SearchStep, Trials
from penstock_optimizer.search.goal import Goal
from penstock_optimizer.targets.encoder import conclude, plan_trials, speed_up
from penstock_optimizer.targets.plan_search import PlanSearch, is_exhaustive
from penstock_optimizer.targets.screening import Screening
from penstock_optimizer.targets.target import Budget
from tests.optimizer.candidate.fake_runner import FakeRunner, Script, crash
from tests.optimizer.report.sample import FP32_PLAN, latency
from tests.optimizer.search.cost_model import FP32, INT8, STATIC

LENGTHS = (8, 32, 128, 512)
SHORTER = (8, 16, 32, 128, 512)
GOAL = Goal.of(Objective(latency=Latency(p95_milliseconds=20)))


def plan_search(
    tmp_path: Path,
    scripts: dict[Recipe, Script],
    *,
    seconds: float = 1e4,
    may_serve: Callable[[Recipe], bool] = lambda _: True,
    spent_before: float = 0.0,
    left_for_plans: float | None = None,
    lengths: Sequence[int] = LENGTHS,
    expected: Sequence[int] = LENGTHS,
) -> tuple[SearchResult, Screening, FakeRunner, list[SearchStep]]:
    work = WorkFolder(tmp_path / "work")
    runner = FakeRunner(work, {FP32: Script(), **scripts})
    budget = Budget(seconds, runner.clock)
    screening = Screening(runner, work, budget, lengths=lengths)
    screening.enter(FP32, reference=True)
    for recipe in scripts:
        if recipe != FP32:
            screening.enter(recipe)
    screening.measure()
    steps: list[SearchStep] = []
    planner = PlanSearch(
        screening,
        runner,
        budget,
        GOAL,
        cores=2,
        lengths=lengths,
        expected=expected,
        may_serve=may_serve,
        on_step=steps.append,
    )
    runner.clock.now += spent_before if left_for_plans is None else budget.left_for_plans() - left_for_plans
    try:
        return planner.search(Trials(work.trials)), screening, runner, steps
    finally:
        screening.close()


def test_without_time_for_plans_the_fastest_recipe_by_its_latencies_wins(tmp_path: Path) -> None:
    late = WorkerFailed(CallFailure.TIMED_OUT, "sample did not end within 1 s")
    scripts = {FP32: Script(fails={"sample": late}), INT8: Script(speed=3.0, fails={"sample": late})}

    result, screening, _, _ = plan_search(tmp_path, scripts, seconds=1e4, spent_before=1e4)

    assert result.plan.recipe == INT8
    assert (result.sample, result.finished) == (None, False)
    assert outcome(screening, INT8)[0] is not Outcome.FAILED


@pytest.mark.parametrize("left_for_plans", [-30.0, 0.0])
def test_a_clearly_faster_recipe_wins_without_any_time_for_plans(tmp_path: Path, left_for_plans: float) -> None:
    result, screening, runner, steps = plan_search(tmp_path, {INT8: Script(speed=3.0)}, left_for_plans=left_for_plans)
    reasons = {one.recipe: one.reason for one in all_concluded(result, screening, steps)}

    assert (result.plan.recipe, result.sample, result.finished, steps) == (INT8, None, False, [])
    assert runner.count("sample") == 0
    assert "3.0 times as fast as fp32" in reasons[INT8]


@pytest.mark.parametrize(
    ("seconds", "left_for_plans", "enough"),
    [(1e4, 0.0, False), (1e4, 20.0, True), (1e4, 90.0, True), (200.0, 20.0, False)],
)
def test_a_search_is_not_exhaustive_if_it_did_not_begin_or_a_larger_budget_gives_it_more_time(
    tmp_path: Path, seconds: float, left_for_plans: float, *, enough: bool
) -> None:
    scripts = {INT8: Script(speed=3.0)}
    result, _, _, _ = plan_search(tmp_path, scripts, seconds=seconds, left_for_plans=left_for_plans)

    assert is_exhaustive(result, Budget(seconds)) is enough


@pytest.mark.parametrize("scripts", [{INT8: Script(speed=1.01)}, {FP32: Script(slow_looks=2), INT8: Script(speed=3.0)}])
def test_without_time_for_plans_fp32_stays_unless_the_gain_is_beyond_the_noise(
    tmp_path: Path, scripts: dict[Recipe, Script]
) -> None:
    result, _, _, _ = plan_search(tmp_path, scripts, left_for_plans=0.0)

    assert result.plan.recipe == FP32


def test_a_faster_recipe_without_a_tried_plan_is_skipped_and_not_slower(tmp_path: Path) -> None:
    scripts = {FP32: Script(slow_looks=2), INT8: Script(speed=3.0)}
    result, screening, _, steps = plan_search(tmp_path, scripts, left_for_plans=0.0)
    found = {one.recipe: (one.outcome, one.reason) for one in all_concluded(result, screening, steps)}

    assert found == {
        FP32: (Outcome.CHOSEN, "the best so far, as the time budget ended before all others were measured"),
        INT8: (Outcome.SKIPPED, "faster at first measurement; the plan search ended before its turn"),
    }


def test_wide_thresholds_are_measured_only_while_the_plans_keep_most_of_their_time(tmp_path: Path) -> None:
    scripts = {FP32: Script(wide_seconds=50.0), INT8: Script(speed=3.0, wide_seconds=50.0)}
    result, _, runner, steps = plan_search(tmp_path, scripts, left_for_plans=90.0)

    assert runner.count("wide_from") == 1
    assert result.plan.recipe == INT8
    assert steps[0].challenger.recipe == INT8
    assert (steps[0].challenger.wide_from_tokens, steps[0].challenger.wide_alone_from_tokens) == (64, None)


def all_concluded(
    result: SearchResult, screening: Screening, steps: Sequence[SearchStep]
) -> tuple[CandidateFacts, ...]:
    return conclude(
        [one.facts for one in screening.runs],
        chosen=result.plan,
        reference=FP32,
        expected=LENGTHS,
        steps=steps,
        search_finished=result.finished,
    )


def outcome(screening: Screening, recipe: Recipe) -> tuple[Outcome, str]:
    facts = next(one for one in screening.runs if one.recipe == recipe).facts
    return facts.outcome, facts.reason


def test_the_fastest_finalist_wins_with_a_plan_that_its_batching_allows(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2, batching=Batching.SINGLE), STATIC: Script(speed=1.9)}
    result, _, runner, steps = plan_search(tmp_path, scripts)

    assert result.plan.recipe == INT8
    assert result.plan.batching is Batching.SINGLE
    assert steps
    assert runner.open_now == 0


def test_a_finalist_that_dies_on_a_plan_is_restarted(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2), STATIC: Script(speed=1.9, fails={"sample": crash()})}
    result, _, runner, steps = plan_search(tmp_path, scripts)

    assert result.plan.recipe == INT8
    assert any(step.comparison is None for step in steps)
    assert runner.count("sample", STATIC) == 1


def test_an_incumbent_that_dies_repeatedly_fails_and_the_next_one_wins(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2.2, fails={"sample": crash(9)}, fails_after=3), STATIC: Script(speed=1.9)}
    result, screening, _, _ = plan_search(tmp_path, scripts)

    assert result.plan.recipe == STATIC
    assert outcome(screening, INT8) == (Outcome.FAILED, "killed by signal 9 while its plans were measured")


def test_a_dead_incumbent_fails_and_not_a_challenger_that_died_before_it(tmp_path: Path) -> None:
    scripts = {
        INT8: Script(speed=2.2, fails={"sample": crash(11), "lone": crash(11)}),
        STATIC: Script(speed=1.9, fails={"sample": crash(9)}, fails_after=3),
    }
    result, screening, runner, _ = plan_search(tmp_path, scripts)

    order = [recipe for method, recipe in runner.calls if method == "sample"]
    assert order.index(INT8) < order.index(STATIC)
    assert result.plan.recipe == FP32
    assert outcome(screening, STATIC) == (Outcome.FAILED, "killed by signal 9 while its plans were measured")
    assert outcome(screening, INT8) == (Outcome.SLOWER, ReasonCode.WITHIN_BUDGET.words)


def test_a_recipe_of_a_route_that_dies_fails_even_if_it_is_no_finalist(tmp_path: Path) -> None:
    scripts = {**LONG_ROWS, STATIC: Script(speed=1.6, fails={"sample": crash(9)}, fails_after=3)}
    expected = (8, 8, 16, 16, 512)
    result, screening, _, _ = plan_search(tmp_path, scripts, lengths=SHORTER, expected=expected)

    assert result.plan.recipe == INT8
    assert outcome(screening, STATIC) == (Outcome.FAILED, "killed by signal 9 while its plans were measured")
    assert outcome(screening, FP32)[0] is Outcome.REFERENCE


def test_a_wide_run_that_crashes_does_not_end_a_finalist(tmp_path: Path) -> None:
    result, _, _, _ = plan_search(tmp_path, {INT8: Script(speed=2, fails={"wide_from": crash()})})

    assert result.plan.recipe == INT8


def test_plans_start_from_where_lone_rows_were_measured_to_gain_among_others_and_alone(tmp_path: Path) -> None:
    _, _, _, steps = plan_search(tmp_path, {INT8: Script(speed=2)})

    first = next(step.challenger for step in steps if step.challenger.recipe == INT8)
    assert (first.wide_from_tokens, first.wide_alone_from_tokens) == (128, 32)


def test_no_measurable_candidate_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptimizationError, match="signal 11"):
        plan_search(tmp_path, {FP32: Script(fails={"sample": crash()})})


def test_an_fp32_graph_that_the_endpoint_excludes_is_served_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    slow = {STATIC: Script(speed=0.9)}
    excluded, _, _, _ = plan_search(tmp_path / "a", slow, may_serve=lambda recipe: recipe != FP32)
    alone, _, _, _ = plan_search(tmp_path / "b", {}, may_serve=lambda recipe: recipe != FP32)

    assert excluded.plan.recipe == STATIC
    assert alone.plan.recipe == FP32


def test_a_spent_budget_gives_the_fp32_plan_unless_another_was_measured_to_be_better(tmp_path: Path) -> None:
    result, _, runner, _ = plan_search(tmp_path, {INT8: Script(speed=2)}, seconds=30)

    assert runner.clock.now < 30
    assert result.plan.recipe in {FP32, INT8}


# Routes by length

SHORT_ROWS = {STATIC: Script(speed=2.0), INT8: Script(speed=1.2, short_speed=2.6, batching=Batching.EQUAL_LENGTH)}
"""STATIC is faster from 32 tokens on, INT8 up to 16; over the workload INT8 is too slow for the plan search."""


def test_a_recipe_that_is_fastest_at_short_lengths_serves_short_rows(tmp_path: Path) -> None:
    result, screening, runner, steps = plan_search(tmp_path, SHORT_ROWS, lengths=SHORTER, expected=SHORTER)

    plan = result.plan
    assert plan.recipe == STATIC
    assert plan.short is not None
    assert (plan.short.recipe, plan.short.longest_tokens) == (INT8, 16)
    assert plan.short.batching is Batching.EQUAL_LENGTH
    assert result.second_graph_bytes == 40_000_000
    assert runner.open_now == 0
    assert any(step.promoted and step.challenger.short for step in steps)
    found = conclude([one.facts for one in screening.runs], chosen=plan, reference=FP32, expected=SHORTER, steps=steps)
    reason = next(one.reason for one in found if one.recipe == INT8)
    assert reason.startswith(f"serves rows of up to 16 tokens next to {STATIC.name}")
    by_recipe = {one.recipe: one for one in found}
    assert speed_up(by_recipe[FP32], plan, by_recipe) == pytest.approx({8: 2.6, 16: 2.6, 32: 2, 128: 2, 512: 2})


LONG_ROWS = {STATIC: Script(speed=1.6), INT8: Script(speed=1.2, short_speed=4.0)}
"""INT8 is so much faster up to 16 tokens that it is the best over the workload; STATIC is faster from 32 on."""


def test_the_fastest_recipe_over_the_workload_leaves_long_rows_to_one_that_is_faster_there(tmp_path: Path) -> None:
    expected = (8, 8, 16, 16, 512)
    result, _, runner, steps = plan_search(tmp_path, LONG_ROWS, lengths=SHORTER, expected=expected)

    plan = result.plan
    assert plan.short is not None
    assert (plan.recipe, plan.short.recipe, plan.short.longest_tokens) == (STATIC, INT8, 16)
    (step,) = [step for step in steps if step.promoted and step.challenger.short and step.incumbent.short is None]
    assert (step.challenger.recipe, step.incumbent.recipe) == (STATIC, INT8)
    assert runner.open_now == 0


@pytest.mark.parametrize("expected", [(48, 64, 512), [8] + [128] * 99])
def test_a_workload_without_short_rows_does_not_route(tmp_path: Path, expected: Sequence[int]) -> None:
    result, _, runner, _ = plan_search(tmp_path, SHORT_ROWS, lengths=SHORTER, expected=expected)

    assert (result.plan.recipe, result.plan.short) == (STATIC, None)
    assert runner.count("lone") == runner.count("judge_plan") == 0


def test_an_fp32_plan_has_no_route(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=0.5, short_speed=9.0)}
    result, _, runner, _ = plan_search(tmp_path, scripts, lengths=SHORTER, expected=SHORTER)

    assert (result.plan.recipe, result.plan.short) == (FP32, None)
    assert runner.count("lone") == 0


def test_short_rows_are_routed_also_where_fp32_may_not_be_served(tmp_path: Path) -> None:
    result, _, _, _ = plan_search(
        tmp_path, SHORT_ROWS, lengths=SHORTER, expected=SHORTER, may_serve=lambda recipe: recipe != FP32
    )

    assert result.plan.short is not None


def test_two_recipes_that_the_guard_rejects_as_a_pair_are_not_served(tmp_path: Path) -> None:
    scripts = {**SHORT_ROWS, STATIC: Script(speed=2.0, cosine_together=0.9)}
    result, _, _, steps = plan_search(tmp_path, scripts, lengths=SHORTER, expected=SHORTER)

    assert result.plan.short is None
    assert "the two recipes together: min_cosine 0.9 together" in [step.reason for step in steps]


@pytest.mark.parametrize(("broken", "method"), [(INT8, "lone"), (STATIC, "lone"), (STATIC, "judge_plan")])
def test_a_failure_while_measuring_a_route_ends_only_the_route(tmp_path: Path, broken: Recipe, method: str) -> None:
    scripts = {**SHORT_ROWS, broken: replace(SHORT_ROWS[broken], fails={method: crash()})}
    result, screening, runner, _ = plan_search(tmp_path, scripts, lengths=SHORTER, expected=SHORTER)

    assert (result.plan.recipe, result.plan.short) == (STATIC, None)
    assert outcome(screening, STATIC)[0] is Outcome.SLOWER
    assert runner.open_now == 0


# The conclusion


def facts(
    recipe: Recipe, outcome: Outcome, reason: str = ReasonCode.WITHIN_BUDGET.words, factor: float | None = 1.0
) -> CandidateFacts:
    return CandidateFacts(
        recipe=recipe, outcome=outcome, reason=reason, latency=latency(factor) if factor is not None else ()
    )


def concluded(candidates: list[CandidateFacts], chosen: Recipe) -> dict[Recipe, tuple[Outcome, str]]:
    plan = FP32_PLAN.model_copy(update={"recipe": chosen})
    found = conclude(candidates, chosen=plan, reference=FP32, expected=[16, 64], steps=[])
    return {one.recipe: (one.outcome, one.reason) for one in found}


def test_reasons_have_the_gain_of_the_chosen_recipe_and_the_loss_of_the_others() -> None:
    candidates = [
        facts(FP32, Outcome.REFERENCE, "the judge"),
        facts(INT8, Outcome.SLOWER, factor=0.5),
        facts(STATIC, Outcome.SLOWER, factor=0.6),
    ]

    assert concluded(candidates, INT8) == {
        FP32: (Outcome.REFERENCE, "the judge"),
        INT8: (
            Outcome.CHOSEN,
            "best for the objective within the accuracy budget: 2.0 times as fast as fp32 over the workload",
        ),
        STATIC: (Outcome.SLOWER, "1.20 times the latency of the chosen recipe over the workload"),
    }


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ((Outcome.REJECTED, Outcome.SLOWER), "no candidate within the accuracy budget beats fp32 beyond the noise"),
        ((Outcome.REJECTED, Outcome.REJECTED), "no other candidate is within the accuracy budget"),
        ((Outcome.REJECTED, Outcome.SKIPPED), "no other candidate is within the accuracy budget"),
        ((Outcome.FAILED, Outcome.FAILED), "every other candidate failed"),
        ((Outcome.FAILED, Outcome.REJECTED), "every other candidate failed or is outside the accuracy budget"),
        ((Outcome.SKIPPED, Outcome.SKIPPED), "no other candidate was tried"),
        ((), "no other candidate was tried"),
    ],
)
def test_a_chosen_fp32_has_the_reason(others: tuple[Outcome, ...], reason: str) -> None:
    candidates = [facts(one, outcome, "cosine", None) for one, outcome in zip((INT8, STATIC), others, strict=False)]
    found = concluded([facts(FP32, Outcome.REFERENCE), *candidates], FP32)

    assert found[FP32] == (Outcome.CHOSEN, reason)
    assert {recipe: found[recipe][0] for recipe in found if recipe != FP32} == dict(
        zip((INT8, STATIC), others, strict=False)
    )


@pytest.mark.parametrize("reason", [code.words for code in ReasonCode if code.is_out_of_time])
def test_fp32_is_called_the_best_so_far_where_time_ran_out(reason: str) -> None:
    candidates = [
        facts(FP32, Outcome.REFERENCE),
        facts(INT8, Outcome.SKIPPED, reason, factor=0.5),
        facts(STATIC, Outcome.SLOWER, factor=1.2),
    ]

    assert concluded(candidates, FP32) == {
        FP32: (Outcome.CHOSEN, "the best so far, as the time budget ended before all others were measured"),
        INT8: (Outcome.SKIPPED, reason),
        STATIC: (Outcome.SLOWER, "1.20 times the latency of the chosen recipe over the workload"),
    }


@pytest.mark.parametrize(("factor", "gain"), [(1.0, ""), (0.99, ""), (0.5, "2.00 times ")])
def test_a_recipe_without_a_tried_plan_is_not_called_slower(factor: float, gain: str) -> None:
    candidates = [
        facts(FP32, Outcome.REFERENCE), facts(INT8, Outcome.SLOWER), facts(STATIC, Outcome.SLOWER, factor=factor)
    ]  # fmt: skip

    reason = concluded(candidates, INT8)[STATIC][1]

    assert reason == f"{gain}as fast as the chosen recipe over the workload; no plan of it was tried"


def test_a_replaced_recipe_has_the_comparison_as_reason() -> None:
    candidates = [facts(FP32, Outcome.REFERENCE), facts(INT8, Outcome.SLOWER), facts(STATIC, Outcome.SLOWER)]
    chosen, beaten = (FP32_PLAN.model_copy(update={"recipe": recipe}) for recipe in (INT8, STATIC))
    step = SearchStep(chosen, beaten, None, promoted=True, reason="12% better by requests/s (noise 3%)")

    found = conclude(candidates, chosen=chosen, reference=FP32, expected=[16, 64], steps=[step])

    reason = next(one.reason for one in found if one.recipe == STATIC)
    assert reason == f"{INT8.name} was 12% better by requests/s (noise 3%)"


def test_a_recipe_of_equal_latency_has_the_lost_comparison_as_reason(tmp_path: Path) -> None:
    result, screening, _, steps = plan_search(tmp_path, {INT8: Script(speed=2), STATIC: Script(speed=2.0)})
    found = all_concluded(result, screening, steps)
    reason = next(one.reason for one in found if one.recipe == STATIC)

    assert "no difference beyond the noise" in reason
    assert reason.endswith(f"against {INT8.name}")
    assert len(plan_trials(steps)) == len(steps)


def test_speed_up_is_given_where_both_were_measured() -> None:
    fast = facts(INT8, Outcome.CHOSEN, factor=0.5)
    fast = fast.model_copy(update={"latency": fast.latency[:2]})

    plan = FP32_PLAN.model_copy(update={"recipe": INT8})
    assert speed_up(facts(FP32, Outcome.REFERENCE), plan, {INT8: fast}) == pytest.approx({8: 2.0, 16: 2.0})
