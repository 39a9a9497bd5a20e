"""Which batches of rows are allowed: forward passes that depend on the batch in known ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hardware import Isa
from penstock.recipe import BF16_REST, Batching, EngineName, Precision, Recipe
from penstock_optimizer.guard.gate import (
    BF16_TOLERANCE,
    LONG_ROWS,
    LONG_TOKENS,
    ROWS_PER_BATCH,
    TOLERANCE,
    Arithmetic,
    SingleRowForward,
    arithmetic_of,
    equal_groups,
    measure_invariance,
    padded_groups,
    relative_difference,
)
from penstock_optimizer.search.recipes import candidate_recipes
from penstock_optimizer.search.space import PADDING_SHARES
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.rows import Outputs, Row

GRID = ShapeGrid()


def rows(lengths: Sequence[int]) -> list[Row]:
    return [Row([index % 90 + 1, *range(1, length)]) for index, length in enumerate(lengths)]


LENGTHS = [3, 3, 3, 5, 5, 6, 8, 8, 8, 9, 12, 12, 15, 40, 40, 41, 44]


def alone(some: Sequence[Row]) -> list[Outputs]:
    """Every row alone."""
    return [{"y": np.array([row.ids], np.float32)} for row in some]


def scaled_by_the_batch(some: Sequence[Row]) -> list[Outputs]:
    """Like dynamic int8: a grid over the whole batch."""
    step = np.float32(max(max(row.ids) for row in some) / 15)
    return [{"y": np.round(np.array([row.ids], np.float32) / step) * step} for row in some]


def leaking_padding(some: Sequence[Row]) -> list[Outputs]:
    """Like a forgotten mask: the width of the batch is in the outputs."""
    width = max(row.length for row in some)
    return [{"y": np.array([row.ids], np.float32) + 0.5 * (width - row.length)} for row in some]


def summed_in_another_order(some: Sequence[Row]) -> list[Outputs]:
    """Like an engine whose kernels depend on the shape, on a grid: other last bits at another point of it, which
    rounding to int8 sometimes turns into a step."""
    step = GRID.length(max(row.length for row in some)) / 1000 * 0.02
    return [{"y": np.array([row.ids], np.float32) * (1 + step * (row.ids[0] % 5 == 0))} for row in some]


def broken_in_company(some: Sequence[Row]) -> list[Outputs]:
    return [{"y": np.full((1, row.length), np.nan if len(some) > 1 else 1, np.float32)} for row in some]


@pytest.mark.parametrize(
    ("forward", "widest"),
    [
        (alone, Batching.PADDED),
        (leaking_padding, Batching.EQUAL_LENGTH),
        (scaled_by_the_batch, Batching.SINGLE),
        (broken_in_company, Batching.SINGLE),
    ],
)
def test_the_widest_batching_is_the_one_that_changes_nothing(forward: object, widest: Batching) -> None:
    found = measure_invariance(forward, rows(LENGTHS))  # type: ignore[arg-type]  # parametrised

    assert found.batching is widest


def test_the_evidence_is_kept() -> None:
    found = measure_invariance(leaking_padding, rows(LENGTHS))

    assert [(one.name, one.passed) for one in found.metrics] == [
        ("batch_invariance_equal-length", True),
        ("batch_invariance_padded", False),
    ]


def test_batching_without_suitable_rows_is_not_allowed() -> None:
    assert measure_invariance(alone, rows([3, 9, 27])).batching is Batching.SINGLE
    assert measure_invariance(alone, rows([7, 7, 7, 7])).batching is Batching.EQUAL_LENGTH
    assert measure_invariance(alone, []).batching is Batching.SINGLE


@pytest.mark.parametrize(
    ("size", "tolerance", "widest"),
    [
        (1e-6, TOLERANCE, Batching.PADDED),
        (1e-3, TOLERANCE, Batching.SINGLE),
        (1e-3, BF16_TOLERANCE, Batching.PADDED),
        (5e-3, BF16_TOLERANCE, Batching.SINGLE),
    ],
)
def test_differences_in_the_last_bits_are_allowed_and_no_more(size: float, tolerance: float, widest: Batching) -> None:
    def slightly(some: Sequence[Row]) -> list[Outputs]:
        return [{"y": np.array([row.ids], np.float32) * (1 + size * (len(some) > 1))} for row in some]

    assert measure_invariance(slightly, rows(LENGTHS), arithmetic=Arithmetic(tolerance)).batching is widest


def test_rows_at_one_point_of_an_engine_s_grid_are_of_equal_length() -> None:
    """Without the grid, the guard would prove less than the batcher does; or nothing, as rows differ in length."""
    found = measure_invariance(summed_in_another_order, rows(range(9, 60)), grid=GRID)

    assert found.batching is Batching.EQUAL_LENGTH
    assert [(one.passed, one.value > 0) for one in found.metrics] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("rounds", "grid", "widest"),
    [
        (False, None, Batching.PADDED),
        (False, GRID, Batching.PADDED),
        (True, None, Batching.PADDED),
        (True, GRID, Batching.EQUAL_LENGTH),
    ],
)
def test_engines_that_round_are_never_padded_to_another_grid_length(
    rounds: bool, grid: ShapeGrid | None, widest: Batching
) -> None:
    """Even if no sample shows a difference: it is too rare for samples."""
    found = measure_invariance(alone, rows(range(2, 60)) * 2, arithmetic=Arithmetic(rounds=rounds), grid=grid)

    assert found.batching is widest


@pytest.mark.parametrize("isa", Isa)
def test_only_bf16_is_allowed_what_bf16_does(isa: Isa) -> None:
    for recipe in candidate_recipes(isa, tuple(EngineName), tuple(Precision)).recipes:
        is_bf16 = "bf16" in recipe.name
        assert arithmetic_of(recipe).tolerance == (BF16_TOLERANCE if is_bf16 else TOLERANCE)


def test_int8_with_bf16_counts_as_bf16() -> None:
    recipe = Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC, options=(BF16_REST,))

    assert arithmetic_of(recipe) == Arithmetic(BF16_TOLERANCE, rounds=True)
    assert TOLERANCE < BF16_TOLERANCE


lengths = st.lists(st.integers(1, 200), max_size=80)
grids = st.sampled_from([None, GRID])


def point(row: Row, grid: ShapeGrid | None) -> int:
    return row.length if grid is None else grid.length(row.length)


@given(lengths, grids)
def test_equal_groups_hold_rows_of_one_length(some: list[int], grid: ShapeGrid | None) -> None:
    groups = equal_groups(rows(some), grid)

    assert all(len({point(row, grid) for row in group}) == 1 for group in groups)
    assert all(2 <= len(group) <= ROWS_PER_BATCH for group in groups)


@given(lengths, grids)
def test_padded_groups_hold_rows_of_different_lengths_within_the_widest_padding(
    some: list[int], grid: ShapeGrid | None
) -> None:
    for group in padded_groups(rows(some), grid):
        found = [point(row, grid) for row in group]
        assert len(set(found)) > 1
        assert len(group) <= ROWS_PER_BATCH
        assert 1 - sum(found) / (max(found) * len(found)) <= PADDING_SHARES[-1]


@given(lengths)
def test_every_short_row_with_another_of_its_length_is_compared(some: list[int]) -> None:
    made = rows([length for length in some if length <= LONG_TOKENS])

    seen = [id(row) for group in equal_groups(made) for row in group]

    alone = sum(count % ROWS_PER_BATCH == 1 for count in Counter(row.length for row in made).values())
    assert len(set(seen)) == len(seen) == len(made) - alone


def test_few_long_rows_are_compared() -> None:
    made = rows([LONG_TOKENS + 1] * 50)

    assert sum(map(len, equal_groups(made))) == LONG_ROWS


def test_rows_are_run_alone_once() -> None:
    runs: list[int] = []

    def forward(some: Sequence[Row]) -> list[Outputs]:
        runs.append(len(some))
        return alone(some)

    one_by_one, some = SingleRowForward(forward), rows([3, 3, LONG_TOKENS + 1])
    first, second = one_by_one(some), one_by_one(some)

    assert runs == [1] * 4  # long rows are not cached
    assert all(np.array_equal(a["y"], b["y"]) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [([3, 4], [3, 4], 0), ([3, 4], [3, 9], 1), ([3, 4], [3, float("nan")], float("inf")), ([3, 4], [3], float("inf"))],
)
def test_differences_are_relative_to_the_row_alone(one: list[float], other: list[float], difference: float) -> None:
    found = relative_difference({"y": np.array(one, np.float32)}, {"y": np.array(other, np.float32)})

    assert found == pytest.approx(difference)


def test_all_outputs_of_a_row_count() -> None:
    before = {"start": np.array([3.0], np.float32), "end": np.array([4.0], np.float32)}
    after = {"start": np.array([3.0], np.float32), "end": np.array([9.0], np.float32)}

    assert relative_difference(before, after) == pytest.approx(1)
