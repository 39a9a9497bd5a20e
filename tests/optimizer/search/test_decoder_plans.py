"""Recipes of text generation, and the choice among measured ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hardware import Isa
from penstock.manifest import CandidateFacts, GenerationSpeed, Outcome, ReasonCode
from penstock.recipe import EngineName, Precision, Recipe
from penstock.resources.endpoint import Latency, Objective, Optimization, Throughput, TokenTime
from penstock_optimizer.candidate.decoder import STORAGE
from penstock_optimizer.search.decoder_plans import FP32, best, candidates, concluded, time_over_limit

INT8 = Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_WEIGHTS)
INT4 = Recipe(engine=EngineName.OPENVINO, precision=Precision.INT4_WEIGHTS)


def facts(recipe: Recipe, *, first: float, following: float, rate: float) -> CandidateFacts:
    speed = GenerationSpeed(
        prompt_tokens=128,
        output_tokens=33,
        first_token_milliseconds=first,
        next_token_p50_milliseconds=following,
        next_token_p95_milliseconds=following,
        tokens_per_second=rate,
        clients=8,
    )
    blank = CandidateFacts(recipe=recipe, outcome=Outcome.SLOWER, reason="", generation=speed)
    return blank.settled(Outcome.SLOWER, ReasonCode.WITHIN_BUDGET)


def test_every_recipe_has_a_form_of_weights_and_a_name_of_its_own() -> None:
    recipes, skipped = candidates(Isa.AMX, Optimization())
    assert not skipped
    assert all(recipe.precision in STORAGE for recipe in [FP32, *recipes])
    assert len({recipe.name for recipe in [FP32, *recipes]}) == len(recipes) + 1


@pytest.mark.parametrize(
    ("isa", "absent"), [(Isa.AVX2, {"bf16", "rowwise"}), (Isa.AVX512_VNNI, {"bf16"}), (Isa.NEON, {"bf16"})]
)
def test_what_a_processor_lacks_is_left_out_with_the_reason(isa: Isa, absent: set[str]) -> None:
    recipes, skipped = candidates(isa, Optimization())
    assert not [recipe.name for recipe in recipes if any(word in recipe.name for word in absent)]
    assert all(isa.value in reason for _, reason in skipped)


def test_the_endpoint_may_leave_precisions_out() -> None:
    recipes, skipped = candidates(Isa.AMX, Optimization(precisions=(Precision.INT8_WEIGHTS,)))
    assert {recipe.precision for recipe in recipes} == {Precision.INT8_WEIGHTS}
    assert all("optimization.precisions leaves" in reason for _, reason in skipped)


SLOW_SHARED = facts(INT8, first=40, following=10, rate=100)
FAST_SHARED = facts(INT4, first=80, following=20, rate=300)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Objective(), INT8),
        (Objective(latency=Latency(p95_milliseconds=100)), INT8),
        (Objective(throughput=Throughput(requests_per_second=1)), INT4),
        (Objective(tokens_per_second=200), INT4),
        (Objective(time_to_first_token=TokenTime(p95_milliseconds=90)), INT8),
        (Objective(time_to_first_token=TokenTime(p95_milliseconds=90), tokens_per_second=200), INT4),
        (Objective(time_to_first_token=TokenTime(p95_milliseconds=60), tokens_per_second=200), INT8),
        (Objective(time_per_output_token=TokenTime(p95_milliseconds=15), tokens_per_second=200), INT8),
        (Objective(time_per_output_token=TokenTime(p95_milliseconds=5), tokens_per_second=200), INT8),
    ],
)
def test_the_objective_decides_between_one_client_and_many(objective: Objective, expected: Recipe) -> None:
    assert best([SLOW_SHARED, FAST_SHARED], objective).recipe == expected


@given(st.lists(st.tuples(*[st.floats(1, 1000)] * 3), min_size=1, max_size=8), st.floats(1, 1000), st.floats(1, 1000))
def test_a_plan_within_the_time_limits_is_preferred_to_one_that_is_not(
    speeds: list[tuple[float, float, float]], first: float, following: float
) -> None:
    limits = Objective(
        time_to_first_token=TokenTime(p95_milliseconds=first),
        time_per_output_token=TokenTime(p95_milliseconds=following),
        tokens_per_second=1,
    )
    measured = [facts(INT8, first=a, following=b, rate=c) for a, b, c in speeds]
    chosen = best(measured, limits).generation
    assert chosen is not None
    over = [time_over_limit(one.generation, limits) for one in measured if one.generation is not None]
    assert time_over_limit(chosen, limits) <= min(over) * 1.05


def test_the_second_criterion_decides_between_near_ones() -> None:
    near = facts(INT4, first=41, following=10.2, rate=300)
    assert best([SLOW_SHARED, near], Objective()).recipe == INT4


def test_outcomes_name_what_the_others_lost_by() -> None:
    reference = facts(FP32, first=200, following=50, rate=50).settled(Outcome.REFERENCE, "compared with")
    settled = concluded([reference, SLOW_SHARED, FAST_SHARED], SLOW_SHARED)
    assert [one.outcome for one in settled] == [Outcome.REFERENCE, Outcome.CHOSEN, Outcome.SLOWER]
    assert settled[2].reason == "2.00 times the time of an answer, 0.33 times the time of a shared token"
