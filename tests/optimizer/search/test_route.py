"""Whether a second graph for short rows is worthwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.recipe import Batching, Plan
from penstock.resources.endpoint import Latency, Objective, Throughput
from penstock_optimizer.search.climb import HillClimb
from penstock_optimizer.search.goal import Goal, Pair, PlanSample, Ranking, RouteGoal
from penstock_optimizer.search.space import (
    MeasuredRecipe,
    PlanLimits,
    WideFrom,
    first_plan,
    lengths_to_compare,
    longest_short_row,
    rivals,
    short_lengths,
    with_route,
)
from tests.optimizer.search.cost_model import FP32, INT8, STATIC, CostModel

LATENCY = Goal.of(Objective(latency=Latency(p95_milliseconds=20)))
RATE = Goal.of(Objective(throughput=Throughput(requests_per_second=100)))
LIMITS = PlanLimits(2, Batching.PADDED, (8, 16, 32, 64))


def sample(short: float = 1.0, *, lone: float = 5.0, rate: float = 100.0) -> PlanSample:
    return PlanSample(
        p50_milliseconds=lone,
        p95_milliseconds=lone * 4,
        requests_per_second=rate,
        short_milliseconds={8: short, 16: short * 1.3},
    )


@pytest.mark.parametrize(
    ("workload", "lengths"),
    [
        ([8, 16, 32, 64], (8, 16)),
        ([12, 128], (16,)),
        ([33, 64, 512], ()),
        ([8] + [200] * 99, ()),
        ([8, 8] + [200] * 98, (8, 16)),
        ([], ()),
    ],
)
def test_short_lengths_are_measured_where_the_workload_has_such_rows(
    workload: Sequence[int], lengths: tuple[int, ...]
) -> None:
    assert short_lengths(workload) == lengths


@pytest.mark.parametrize(
    ("short", "lengths", "expected"),
    [
        pytest.param({8: 1.0, 64: 3.0, 256: 20.0}, (8, 16, 32, 64, 128, 256), (8, 16, 32, 64, 128), id="and one more"),
        pytest.param({8: 1.0, 64: 3.0}, (8, 64, 256), (8, 64), id="some length remains for the long rows"),
        pytest.param({8: 9.0, 64: 9.0}, (8, 64, 256), (8,), id="slower from the first on"),
        pytest.param({8: 1.0, 64: 3.0}, (8,), (), id="one length for all"),
    ],
)
def test_short_rows_are_compared_up_to_the_first_length_without_a_gain(
    short: dict[int, float], lengths: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    long = MeasuredRecipe(STATIC, {8: 2.0, 64: 4.0, 128: 7.0, 256: 14.0})

    assert lengths_to_compare(lengths, MeasuredRecipe(INT8, short), long) == expected


def test_recipes_for_a_route_are_faster_at_a_length_and_unbatchable_ones_come_last() -> None:
    chosen = MeasuredRecipe(STATIC, {8: 1.3, 64: 4.0})
    fast, faster = MeasuredRecipe(FP32, {8: 1.1, 64: 9.0}), MeasuredRecipe(INT8, {8: 1.0, 64: 5.0})

    assert rivals(chosen, [chosen, fast, faster], 8) == [INT8, FP32]
    assert rivals(chosen, [chosen, fast, faster], 8, alone={INT8}) == [FP32, INT8]
    assert rivals(chosen, [MeasuredRecipe(INT8, {8: 1.28, 64: 1.0}), MeasuredRecipe(FP32, {})], 8) == []
    assert rivals(chosen, [MeasuredRecipe(INT8, {8: 1.28, 64: 1.0}), fast], 64) == [INT8]


@pytest.mark.parametrize(
    ("chosen", "rival", "longest"),
    [
        pytest.param({8: 1.36, 16: 1.57, 32: 2.43}, {8: 1.07, 16: 1.40, 32: 2.43}, 16, id="as measured with MiniLM"),
        pytest.param({8: 1.36, 16: 1.57}, {8: 1.07, 16: 1.56}, 8, id="no gain at sixteen"),
        pytest.param({8: 1.00, 16: 1.57}, {8: 0.95, 16: 1.00}, None, id="too little at the shortest"),
        pytest.param({8: 1.0, 16: 2.0, 32: 3.0}, {8: 0.5, 16: 2.1, 32: 1.0}, 8, id="a gap ends it"),
        pytest.param({}, {}, None, id="nothing measured"),
    ],
)
def test_a_route_ends_at_the_last_length_at_which_its_recipe_is_faster(
    chosen: dict[int, float], rival: dict[int, float], longest: int | None
) -> None:
    turns = [{tokens: [ms] * 3 for tokens, ms in times.items()} for times in (chosen, rival)]

    assert longest_short_row(*turns) == longest


def test_a_gain_within_the_noise_of_the_rounds_does_not_count() -> None:
    assert longest_short_row({8: [1.0, 1.0, 1.0, 1.0]}, {8: [0.5, 0.7, 1.1, 1.4]}) is None


@given(
    times=st.dictionaries(
        st.sampled_from([8, 16, 32]), st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=1
    ),
    factor=st.floats(1.0, 3.0),
)
def test_a_recipe_that_is_never_faster_gets_no_route(times: dict[int, list[float]], factor: float) -> None:
    assert longest_short_row(times, {tokens: [ms * factor for ms in turns] for tokens, turns in times.items()}) is None


def test_a_route_has_the_batching_that_its_own_recipe_may_have() -> None:
    plan = first_plan(STATIC, LIMITS, wide_from=WideFrom(64, 64))
    found = with_route(plan, INT8, PlanLimits(2, Batching.SINGLE, (8, 16)), longest_tokens=16)

    assert found.unrouted == plan
    assert found.short is not None
    assert (found.short.recipe, found.short.longest_tokens, found.short.batching) == (INT8, 16, Batching.SINGLE)
    assert found.short.max_batch_rows == 1
    short = found.of_short_rows
    assert short is not None
    assert (short.recipe, short.streams, short.short) == (INT8, 2, None)
    assert [found.serves(tokens) for tokens in (1, 16, 17)] == [False, False, True]
    assert found.summary == f"{STATIC.name}, 2x1 threads; up to 16 tokens {INT8.name}"
    assert Plan.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("cores", "wide_from", "expected"),
    [
        (2, WideFrom(32, 32), (None, None)),  # no row of the route is this long
        (2, WideFrom(32, 16), (None, 16)),
        (2, WideFrom(16, 8), (16, 8)),
        (2, WideFrom(8, 8), (8, None)),
        (1, WideFrom(8, 8), (None, None)),
    ],
)
def test_short_rows_have_separate_wide_thresholds(
    cores: int, wide_from: WideFrom, expected: tuple[int | None, int | None]
) -> None:
    limits = PlanLimits(cores, Batching.SINGLE, (8, 16))
    short = with_route(first_plan(STATIC, limits), INT8, limits, longest_tokens=16, wide_from=wide_from).short

    assert short is not None
    assert (short.wide_from_tokens, short.wide_alone_from_tokens) == expected


@pytest.mark.parametrize(
    ("goal", "challenger", "ranking", "criterion"),
    [
        (LATENCY, sample(0.8), Ranking.BETTER, "single-request latency up to 16 tokens"),
        (LATENCY, sample(0.97), Ranking.SAME, "single-request latency up to 16 tokens"),
        (LATENCY, sample(0.8, lone=4.9, rate=80), Ranking.WORSE, "requests/s"),
        (LATENCY, sample(0.8, lone=6.0), Ranking.WORSE, "single-request latency"),
        (LATENCY, sample(0.8, rate=98), Ranking.BETTER, "single-request latency up to 16 tokens"),
        (RATE, sample(0.8), Ranking.SAME, "requests/s"),
        (RATE, sample(1.0, rate=108), Ranking.BETTER, "requests/s"),
        (RATE, sample(0.8, lone=6.0, rate=108), Ranking.WORSE, "single-request latency"),
        (RATE, sample(0.8, rate=90), Ranking.WORSE, "requests/s"),
    ],
)
def test_a_route_must_improve_the_objectives_criterion(
    goal: Goal, challenger: PlanSample, ranking: Ranking, criterion: str
) -> None:
    found = RouteGoal(goal, 16).compare([Pair(challenger, sample())] * 3)

    assert (found.ranking, found.criterion) == (ranking, criterion)


def test_without_short_rows_in_the_workload_a_route_gains_nothing() -> None:
    bare = sample().model_copy(update={"short_milliseconds": {}})

    assert RouteGoal(LATENCY, 16).compare([Pair(bare, bare)]).ranking is Ranking.SAME


def test_lengths_beyond_the_route_do_not_count() -> None:
    before, after = ({8: 1.0, 16: 1.3}, {8: 0.8, 16: 5.0})
    pair = Pair(*(sample().model_copy(update={"short_milliseconds": one}) for one in (after, before)))

    assert RouteGoal(LATENCY, 8).compare([pair] * 3).gain == pytest.approx(0.2)


def climb(model: CostModel, goal: Goal = LATENCY) -> tuple[Plan, list[tuple[bool, str]]]:
    """A search with a route offered to any winning recipe."""
    starts = [first_plan(recipe, LIMITS, wide_from=WideFrom(64, 64)) for recipe in (FP32, STATIC)]

    def routes(plan: Plan) -> list[Plan]:
        return [with_route(plan, INT8, LIMITS, longest_tokens=16)]

    result = HillClimb(goal, model).search(starts, lambda _: LIMITS, routes=routes)
    steps = [
        (step.promoted, step.reason) for step in result.steps if step.challenger.short and not step.incumbent.short
    ]
    assert result.second_graph_bytes == (40_000_000 if result.plan.short else None)
    return result.plan, steps


def model(**options: float) -> CostModel:
    return CostModel(speed={FP32: 1.0, STATIC: 2.0, INT8: 1.5}, short_speed={INT8: 2.6, STATIC: 2.0}, **options)  # type: ignore[arg-type]


def test_a_route_that_gains_is_promoted_and_kept_in_later_steps() -> None:
    plan, steps = climb(model(noise=0.02))

    assert plan.recipe == STATIC
    assert plan.short is not None
    assert plan.short.recipe == INT8
    assert steps[0][0]
    assert "better by single-request latency up to 16 tokens" in steps[0][1]


def test_a_route_that_costs_throughput_is_not_taken() -> None:
    plan, steps = climb(model(routed_rate=0.85))

    assert plan.short is None
    assert steps == [(False, "18% worse by requests/s (noise 2%)")]


def test_for_pure_throughput_only_throughput_decides() -> None:
    assert climb(model(), RATE)[0].short is None
    assert climb(model(routed_rate=1.2), RATE)[0].short is not None


def test_a_search_without_the_reference_keeps_its_route() -> None:
    start = first_plan(STATIC, LIMITS, wide_from=WideFrom(64, 64))
    result = HillClimb(LATENCY, model()).search(
        [start], lambda _: LIMITS, routes=lambda plan: [with_route(plan, INT8, LIMITS, longest_tokens=16)]
    )

    assert result.plan.recipe == STATIC
    assert result.plan.short is not None


def test_when_the_time_ends_no_further_route_is_requested() -> None:
    cost = model()
    asked: list[int] = []

    def routes(plan: Plan) -> Iterator[Plan]:
        for longest in (8, 16):
            asked.append(longest)
            yield with_route(plan, FP32, LIMITS, longest_tokens=longest)

    starts = [first_plan(STATIC, LIMITS, wide_from=WideFrom(64, 64))]
    result = HillClimb(LATENCY, cost, time_left=lambda: not cost.measured).search(
        starts, lambda _: LIMITS, routes=routes
    )

    assert asked == [8]
    assert (result.plan, result.finished) == (starts[0], False)
