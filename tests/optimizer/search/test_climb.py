"""Hill-climbing over plans, on simulated machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.recipe import Batching, Plan
from penstock.resources.endpoint import Latency, Objective, Throughput
from penstock_optimizer.search.climb import HillClimb, PlanFailed, SearchResult, Trials
from penstock_optimizer.search.goal import Comparison, Goal, Pair, PlanSample
from penstock_optimizer.search.space import PlanLimits, WideFrom, first_plan
from tests.examples import examples
from tests.optimizer.search.cost_model import FP32, INT8, STATIC, CostModel

LENGTHS = (8, 16, 32, 64, 128, 256)
LATENCY = Goal.of(Objective(latency=Latency(p95_milliseconds=20)))
THROUGHPUT = Goal.of(Objective(throughput=Throughput(requests_per_second=100)))


def limits(plan: Plan, cores: int = 4) -> PlanLimits:
    return PlanLimits(cores, Batching.SINGLE if plan.recipe == INT8 else Batching.PADDED, LENGTHS)


def start(cores: int = 4) -> list[Plan]:
    plans = []
    for recipe in (FP32, INT8, STATIC):
        batching = Batching.SINGLE if recipe == INT8 else Batching.PADDED
        plans.append(first_plan(recipe, PlanLimits(cores, batching, LENGTHS), wide_from=WideFrom(64, 64)))
    return plans


def test_the_fastest_recipe_wins() -> None:
    result = HillClimb(LATENCY, CostModel()).search(start(), limits)

    assert result.plan.recipe == INT8
    assert result.finished


def test_throughput_prefers_the_recipe_that_may_be_batched() -> None:
    result = HillClimb(THROUGHPUT, CostModel()).search(start(), limits)

    assert result.plan.recipe == STATIC
    assert result.plan.batching is Batching.PADDED
    assert (result.plan.streams, result.plan.threads_per_stream) == (4, 1)


def test_a_gain_within_the_noise_promotes_nothing() -> None:
    model = CostModel(speed={FP32: 1.0, INT8: 1.03, STATIC: 1.02}, noise=0.05)
    result = HillClimb(LATENCY, model).search(start(), limits)

    assert result.plan.recipe == FP32


def test_a_drifting_machine_does_not_mislead_paired_measurements() -> None:
    """Every measurement is 2 % slower than the one before it: unpaired, the later plan would always be worse."""
    result = HillClimb(LATENCY, CostModel(drift=0.02)).search(start(), limits)

    assert result.plan.recipe == INT8


def test_a_plan_that_crashes_is_skipped() -> None:
    plans = start()
    result = HillClimb(LATENCY, CostModel(broken=frozenset({plans[1]}))).search(plans, limits)

    assert result.plan.recipe == STATIC
    assert any(step.comparison is None and not step.promoted for step in result.steps)


def test_a_first_plan_that_cannot_run_is_an_error() -> None:
    plan = start()[0]
    with pytest.raises(PlanFailed, match="killed by signal 11"):
        HillClimb(LATENCY, CostModel(broken=frozenset({plan}))).climb(
            plan, lambda _: PlanLimits(1, Batching.SINGLE, (8,))
        )


def test_an_incumbent_that_stops_working_ends_the_climb() -> None:
    plans = start()
    model = CostModel()

    def measure(plan: Plan) -> PlanSample:
        if plan == plans[0] and len(model.measured) > 2:
            raise PlanFailed("killed by signal 9", plan)
        return model(plan)

    with pytest.raises(PlanFailed, match="signal 9"):
        HillClimb(LATENCY, measure).search(plans, limits)


def test_without_time_the_reference_is_the_result() -> None:
    result = HillClimb(LATENCY, CostModel(), time_left=lambda: False).search(start(), limits)

    assert result.plan.recipe == FP32
    assert not result.finished


def test_when_the_time_is_up_the_best_so_far_wins() -> None:
    model = CostModel()
    result = HillClimb(LATENCY, model, time_left=lambda: len(model.measured) < 8).search(start(), limits)

    assert result.plan.recipe == INT8
    assert not result.finished
    assert len(model.measured) < 16


def test_a_plan_that_is_no_faster_than_fp32_when_it_is_compared_once_more_is_not_chosen() -> None:
    model, plans = CostModel(), start()

    class Climb(HillClimb):
        def challenge(self, challenger: Plan, incumbent: Plan, **more: Any) -> Comparison | None:
            if self.has_climbed:  # what made it faster is gone
                return LATENCY.compare([Pair(model.true_sample(incumbent), model.true_sample(incumbent))])
            return super().challenge(challenger, incumbent, **more)

        has_climbed = False

        def climb(self, *given: Any) -> SearchResult:
            found = super().climb(*given)
            self.has_climbed = True
            return found

    result = Climb(LATENCY, model).search(plans, limits)

    assert result.plan.recipe == FP32
    assert "against the fp32 plan" in result.steps[-1].reason


def test_a_small_gain_measured_once_promotes_nothing() -> None:
    """The time ends after the first pair of INT8, which is 8 % faster."""
    model = CostModel(speed={FP32: 1.0, INT8: 1.08, STATIC: 1.0})
    result = HillClimb(LATENCY, model, time_left=lambda: len(model.measured) < 1).search(start(), limits)

    assert result.plan.recipe == FP32
    assert result.steps[0].reason == "7% better by single-request latency (measured once): too little to be sure"


def test_an_interrupted_search_continues_from_its_trials(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    whole = CostModel()
    expected = HillClimb(LATENCY, whole).search(start(), limits)

    first = CostModel()
    HillClimb(LATENCY, first, trials=Trials(path), time_left=lambda: len(first.measured) < 12).search(start(), limits)
    second = CostModel()
    resumed = HillClimb(LATENCY, second, trials=Trials(path)).search(start(), limits)

    assert resumed.plan == expected.plan
    assert len(second.measured) < len(whole.measured)


def test_gains_on_the_second_criterion_do_not_add_up_to_a_loss_on_the_first() -> None:
    """Each step costs 4 % latency (within the tolerance) and gains throughput: one may pass, a second may not."""
    plans = start()
    costs: dict[Plan, tuple[float, float]] = {}

    def measure(plan: Plan) -> PlanSample:
        steps = abs(plan.max_batch_rows.bit_length() - plans[0].max_batch_rows.bit_length())
        costs[plan] = (10 * 1.04**steps, 100 * 1.2**steps)
        latency, rows = costs[plan]
        return PlanSample(p50_milliseconds=latency, p95_milliseconds=latency, requests_per_second=rows)

    result = HillClimb(LATENCY, measure).climb(plans[0], limits)

    assert costs[result.plan][0] <= costs[plans[0]][0] * 1.06
    assert any("slower than an earlier plan" in step.reason for step in result.steps)


@settings(max_examples=examples(60), deadline=None)
@given(
    speeds=st.tuples(*[st.floats(0.3, 5.0)] * 2),
    noise=st.floats(0.0, 0.08),
    seed=st.integers(0, 1000),
    cores=st.sampled_from([1, 2, 4, 6]),
    goal=st.sampled_from([LATENCY, THROUGHPUT, Goal.of(Objective())]),
    cut=st.integers(0, 60),
)
def test_the_chosen_plan_is_never_truly_slower_than_fp32_beyond_the_noise(
    *, speeds: tuple[float, float], noise: float, seed: int, cores: int, goal: Goal, cut: int
) -> None:
    model = CostModel(speed={FP32: 1.0, INT8: speeds[0], STATIC: speeds[1]}, noise=noise, seed=seed)
    plans = start(cores=cores)
    climber = HillClimb(goal, model, time_left=lambda: len(model.measured) < cut + 1)
    result = climber.search(plans, lambda plan: limits(plan, cores))

    first = goal.criteria[0]
    ours, fp32_cost = (first.cost(model.true_sample(plan), goal) for plan in (result.plan, plans[0]))
    assert ours <= fp32_cost * (1.06 + 3 * noise)


@settings(max_examples=examples(30), deadline=None)
@given(broken=st.sets(st.sampled_from([1, 2])), seed=st.integers(0, 100))
def test_a_failed_plan_is_never_chosen(broken: set[int], seed: int) -> None:
    plans = start()
    model = CostModel(broken=frozenset(plans[index] for index in broken), seed=seed, noise=0.02)
    result = HillClimb(LATENCY, model).search(plans, limits)

    assert result.plan not in model.broken


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    path = tmp_path / "trials.jsonl"
    HillClimb(LATENCY, CostModel(), trials=Trials(path)).search(start(), limits)
    return path


@pytest.mark.parametrize("end", [b'{"challenger": {"rec', b"\0\0\xff"])
def test_a_torn_last_line_is_dropped_and_the_rest_is_kept(end: bytes, torn: Path) -> None:
    complete = len(Trials(torn))
    torn.write_bytes(torn.read_bytes() + end)

    assert len(Trials(torn)) == complete
    assert torn.read_text().endswith("}\n")


@pytest.mark.parametrize("line", [b'{"plan": 1}\n', b"\xff\xfe\0\n"])
def test_a_line_that_is_not_a_trial_is_an_error_with_a_remedy(line: bytes, torn: Path) -> None:
    torn.write_bytes(line + torn.read_bytes())

    with pytest.raises(Exception, match=r"line 1 is not a trial.*Delete"):
        Trials(torn)
