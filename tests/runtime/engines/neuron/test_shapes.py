"""Division of batches into compiled shapes, and padding."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hardware import NeuronGeneration
from penstock.neuron_artefact import CompiledModel, NeuronBucket, NeuronFence
from penstock_runtime.engines.neuron.shapes import (
    CONSTANT_TOKENS,
    BatchPart,
    bucket_grid,
    divide,
    padded_inputs,
    real_tokens,
)
from penstock_runtime.rows import Row, collate


def compiled(*shapes: tuple[int, int], target: NeuronGeneration = NeuronGeneration.INF2, pad: int = 0) -> CompiledModel:
    return CompiledModel(
        target=target,
        sdk="2.31.1",
        packages={},
        flags=(),
        model_digest="0" * 64,
        inputs=("input_ids", "attention_mask", "token_type_ids"),
        outputs=("logits",),
        pad_token=pad,
        weights_bytes=1,
        buckets=tuple(
            NeuronBucket(file=f"b{batch}-t{tokens}.pt", batch=batch, tokens=tokens) for batch, tokens in shapes
        ),
        fence=NeuronFence(max_relative_error=0.05),
    )


BUCKETS = ((1, 32), (8, 32), (1, 128), (4, 128))


@pytest.mark.parametrize(
    ("rows", "tokens", "runs"),
    [
        (1, 5, [(1, 32)]),
        (1, 33, [(1, 128)]),
        (8, 32, [(8, 32)]),
        (2, 32, [(1, 32), (1, 32)]),
        (7, 20, [(8, 32)]),
        (9, 20, [(8, 32), (1, 32)]),
        (4, 100, [(4, 128)]),
        (6, 128, [(4, 128), (1, 128), (1, 128)]),
        (8, 33, [(4, 128), (4, 128)]),
    ],
)
def test_a_batch_runs_in_the_cheapest_shapes(rows: int, tokens: int, runs: list[tuple[int, int]]) -> None:
    parts = divide(compiled(*BUCKETS), rows, tokens)

    assert [BUCKETS[part.bucket] for part in parts] == runs
    assert [part.start for part in parts] == [sum(part.rows for part in parts[:index]) for index in range(len(parts))]


def test_on_inf1_the_constant_time_of_a_run_makes_one_larger_run_cheaper() -> None:
    inf1 = divide(compiled((1, 32), (8, 32), target=NeuronGeneration.INF1), 2, 32)

    assert [part.rows for part in inf1] == [2]
    assert CONSTANT_TOKENS[NeuronGeneration.INF1] > 10 * CONSTANT_TOKENS[NeuronGeneration.INF2]


def test_rows_longer_than_every_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="129 tokens are more than the 128 that the model was compiled for"):
        divide(compiled(*BUCKETS), 1, 129)


shapes = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 6, 8]), st.sampled_from([16, 32, 64])), min_size=1, max_size=6, unique=True
)


@given(shapes=shapes, rows=st.integers(1, 12), tokens=st.integers(1, 64))
def test_every_row_runs_once_in_a_shape_that_holds_it(shapes: list[tuple[int, int]], rows: int, tokens: int) -> None:
    model = compiled(*shapes)
    if tokens > model.longest:
        with pytest.raises(ValueError, match="more than"):
            divide(model, rows, tokens)
        return
    parts = divide(model, rows, tokens)

    assert [row for part in parts for row in range(part.start, part.end)] == list(range(rows))
    for part in parts:
        bucket = model.buckets[part.bucket]
        assert 1 <= part.rows <= bucket.batch
        assert tokens <= bucket.tokens


@given(shapes=shapes, rows=st.integers(1, 6), tokens=st.integers(1, 16))
def test_no_division_into_up_to_three_runs_is_cheaper(shapes: list[tuple[int, int]], rows: int, tokens: int) -> None:
    model = compiled(*shapes)
    constant = CONSTANT_TOKENS[model.target]

    found = sum(model.buckets[part.bucket].size + constant for part in divide(model, rows, tokens))

    others = [
        sum(bucket.size + constant for bucket in chosen)
        for count in (1, 2, 3)
        for chosen in product([one for one in model.buckets if one.tokens >= tokens], repeat=count)
        if sum(bucket.batch for bucket in chosen) >= rows
    ]
    assert all(found <= other + 1e-9 for other in others)


def test_padding_has_the_padding_token_and_no_attention_and_empty_rows_have_one_token() -> None:
    model = compiled((3, 6), pad=9)
    batch = collate([Row([1, 2, 3], [0, 0, 1]), Row([4])])

    ids, mask, types = padded_inputs(model, batch, BatchPart(0, 2, 0))

    assert ids.dtype == mask.dtype == types.dtype == np.int32
    assert ids.tolist() == [[1, 2, 3, 9, 9, 9], [4, 9, 9, 9, 9, 9], [9] * 6]
    assert mask.tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert types.tolist() == [[0, 0, 1, 0, 0, 0], [0] * 6, [0] * 6]


@given(
    rows=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=16), min_size=1, max_size=8),
    pad=st.integers(0, 5),
)
def test_the_real_tokens_of_a_batch_are_in_its_runs_in_order(rows: list[list[int]], pad: int) -> None:
    model = compiled((1, 16), (4, 16), pad=pad)
    batch = collate([Row(ids) for ids in rows])
    parts = divide(model, len(rows), batch.input_ids.shape[1])

    found = []
    for part in parts:
        ids, mask, _ = padded_inputs(model, batch, part)
        assert (ids[mask == 0] == pad).all()
        found += [ids[row][mask[row] == 1].tolist() for row in range(part.rows)]

    assert found == rows
    assert real_tokens(batch, parts, model) == (
        sum(map(len, rows)),
        sum(model.buckets[part.bucket].size for part in parts),
    )


def test_the_grid_has_the_compiled_lengths() -> None:
    grid = bucket_grid(compiled(*BUCKETS))

    assert [grid.length(tokens) for tokens in (1, 32, 33, 128, 200)] == [32, 32, 128, 128, 200]
    assert grid.lengths(100) == (32, 100)
    assert grid.rows(5) == 5
