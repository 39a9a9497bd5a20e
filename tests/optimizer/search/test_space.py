"""The plans on some cores, and the steps between them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.recipe import Batching
from penstock_optimizer.search.space import PlanLimits, WideFrom, first_plan, neighbours, splits
from tests.optimizer.search.cost_model import FP32

LENGTHS = (8, 16, 32, 64, 128)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (1, ((1, 1),)),
        (2, ((2, 1), (1, 2))),
        (3, ((3, 1), (1, 3))),
        (4, ((4, 1), (2, 2), (1, 4))),
        (5, ((5, 1), (4, 1), (2, 2), (1, 5), (1, 4))),
        (6, ((6, 1), (3, 2), (2, 3), (1, 6))),
    ],
)
def test_splits_use_all_the_cores(cores: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert splits(cores) == expected


@given(
    cores=st.integers(1, 64),
    batching=st.sampled_from(Batching),
    wide_from=st.sampled_from([WideFrom(64, 64), WideFrom(64, 32), WideFrom(None, 128), WideFrom(None, None)]),
)
def test_every_plan_within_reach_keeps_its_limits(cores: int, batching: Batching, wide_from: WideFrom) -> None:
    limits = PlanLimits(cores, batching, LENGTHS)
    order = list(Batching)
    reached = {first_plan(FP32, limits, wide_from=wide_from)}
    for _ in range(2):
        reached |= {near for plan in reached for near in neighbours(plan, limits)}

    for plan in reached:
        assert plan.streams * plan.threads_per_stream <= cores
        assert order.index(plan.batching) <= order.index(batching)
        assert (plan.batching is Batching.PADDED) == (plan.max_padding_share > 0)
        assert (plan.batching is Batching.SINGLE) == (plan.max_batch_rows == 1)
        assert not plan.may_run_wide or plan.streams > 1
        assert plan.wide_from_tokens is None or (plan.alone_wide_from or math.inf) <= plan.wide_from_tokens
        assert plan.wide_alone_from_tokens is None or plan.wide_alone_from_tokens != plan.wide_from_tokens


def test_a_recipe_whose_answers_depend_on_the_batch_is_never_batched() -> None:
    limits = PlanLimits(2, Batching.SINGLE, LENGTHS)
    plan = first_plan(FP32, limits)

    assert all(near.max_batch_rows == 1 for near in [plan, *neighbours(plan, limits)])


def test_neighbours_differ_and_exclude_the_plan_itself() -> None:
    limits = PlanLimits(4, Batching.PADDED, LENGTHS)
    plan = first_plan(FP32, limits, wide_from=WideFrom(32, 32))
    near = list(neighbours(plan, limits))

    assert plan not in near
    assert len(near) == len(set(near))
    assert {(p.streams, p.threads_per_stream) for p in near} == {(4, 1), (2, 2)}
    assert {(p.wide_from_tokens, p.alone_wide_from) for p in near} == {(32, 16), (32, 32), (64, 64)}


@pytest.mark.parametrize(
    ("wide_from", "steps"),
    [
        (WideFrom(64, 64), [(128, None), (64, 32)]),
        (WideFrom(64, 32), [(64, None), (64, 16)]),
        (WideFrom(64, 8), [(64, 16)]),
        (WideFrom(128, 128), [(None, None), (128, 64)]),
        (WideFrom(None, 8), [(None, 16)]),
        (WideFrom(None, 128), [(None, None), (None, 64)]),
        (WideFrom(None, None), [(None, 128)]),
    ],
)
def test_a_step_moves_the_wide_threshold_of_a_single_client_and_the_other_one_if_needed(
    wide_from: WideFrom, steps: list[tuple[int | None, int | None]]
) -> None:
    limits = PlanLimits(2, Batching.SINGLE, LENGTHS)
    plan = first_plan(FP32, limits, wide_from=wide_from)

    near = [other for other in neighbours(plan, limits) if other.streams == 2]
    assert [(other.wide_from_tokens, other.wide_alone_from_tokens) for other in near] == steps


def test_another_number_of_streams_keeps_both_wide_lengths_and_one_stream_has_none() -> None:
    limits = PlanLimits(4, Batching.SINGLE, LENGTHS)
    four = first_plan(FP32, limits, wide_from=WideFrom(64, 16))
    (two,) = (plan for plan in neighbours(four, limits) if plan.streams == 2)
    (one,) = (plan for plan in neighbours(two, limits) if plan.streams == 1)

    assert (two.wide_from_tokens, two.wide_alone_from_tokens) == (64, 16)
    assert (one.wide_from_tokens, one.wide_alone_from_tokens) == (None, None)


def test_several_streams_after_a_single_one_still_run_a_single_row_on_all_cores() -> None:
    limits = PlanLimits(2, Batching.PADDED, LENGTHS)
    one = first_plan(FP32, limits, wide_from=WideFrom(32, 32)).model_copy(
        update={"streams": 1, "threads_per_stream": 2, "wide_from_tokens": None}
    )

    (two,) = (plan for plan in neighbours(one, limits) if plan.streams == 2)
    assert two.wide_from_tokens == two.alone_wide_from == min(LENGTHS)


def test_wide_runs_of_a_lone_row_are_tried_before_fewer_streams() -> None:
    limits = PlanLimits(2, Batching.PADDED, LENGTHS)
    plan = first_plan(FP32, limits, wide_from=WideFrom(16, 16))
    near = list(neighbours(plan, limits))

    (one_stream,) = (place for place, other in enumerate(near) if other.streams == 1)
    assert {other.alone_wide_from for other in near[:one_stream]} == {8, 32}


def test_one_core_has_no_wide_runs() -> None:
    assert not first_plan(FP32, PlanLimits(1, Batching.PADDED, LENGTHS), wide_from=WideFrom(32, 16)).may_run_wide
