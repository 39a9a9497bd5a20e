from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.manifest import Axes, GraphIO
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import POOLED, Pooling, Row, collate, run_rows, split
from tests.runtime.batching.echo import IO, EchoEngine

tokens = st.lists(st.integers(1, 500), min_size=1, max_size=12)


@dataclass(frozen=True, slots=True, eq=False)
class RowWithMasks(Row):
    masks: tuple[int, ...] = ()


def test_rows_are_padded_on_the_right_and_masked() -> None:
    batch = collate([Row([5, 6, 7], [0, 1, 1]), Row([8])])

    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.token_type_ids.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert {array.dtype for array in (batch.input_ids, batch.attention_mask, batch.token_type_ids)} == {np.dtype("i8")}


def test_one_row_has_no_padding() -> None:
    batch = collate([Row([5, 6], [0, 1])])

    assert batch.input_ids.tolist() == [[5, 6]]
    assert batch.attention_mask.tolist() == [[1, 1]]
    assert batch.token_type_ids.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("of_rows", "of_batch"),
    [
        ([Pooling.MEAN], Pooling.MEAN),
        ([Pooling.CLS, Pooling.CLS], Pooling.CLS),
        ([Pooling.MEAN, Pooling.CLS], None),
        ([Pooling.MEAN, None], None),
        ([None, None], None),
        ([None], None),
    ],
)
def test_a_batch_has_a_pooling_if_all_its_rows_have_the_same(
    of_rows: list[Pooling | None], of_batch: Pooling | None
) -> None:
    assert collate([Row([5, 6], pooling=pooling) for pooling in of_rows]).pooling is of_batch


def test_pooled_outputs_are_split_into_the_vector_of_each_row() -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)

    parts = split({POOLED: vectors}, [Row([1]), Row([1, 2])], IO)

    assert [part[POOLED].tolist() for part in parts] == vectors.tolist()
    with pytest.raises(InferenceFailed, match="output pooled has shape"):
        split({POOLED: vectors}, [Row([1])], IO)


@given(rows=st.lists(tokens, min_size=1, max_size=6))
def test_outputs_are_split_into_those_of_each_row(rows: list[list[int]]) -> None:
    outputs = run_rows(EchoEngine(poison=False).run, IO, [Row(ids) for ids in rows])

    assert [own["ids"][:, 0].tolist() for own in outputs] == rows
    assert [float(own["sum"]) for own in outputs] == [sum(ids) for ids in rows]


@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_outputs_of_masks_are_split_by_the_number_of_masks_of_each_row(counts: list[int]) -> None:
    rows = [RowWithMasks([1, 2, 3, 4], masks=tuple(range(count))) for count in counts]
    logits = np.arange(sum(counts) * 2, dtype=np.float32).reshape(-1, 2)
    io = GraphIO(inputs=("input_ids",), outputs={"logits": Axes.MASKS})

    parts = [own["logits"] for own in split({"logits": logits}, rows, io)]

    assert [len(part) for part in parts] == counts
    assert np.array_equal(np.concatenate(parts), logits)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [(Axes.ROW, (3, 4)), (Axes.ROW, ()), (Axes.TOKENS, (2, 4)), (Axes.TOKENS, (2,)), (Axes.MASKS, (1, 9))],
)
def test_outputs_of_another_shape_than_promised_are_an_error(axes: Axes, shape: tuple[int, ...]) -> None:
    io = GraphIO(inputs=("input_ids",), outputs={"logits": axes})

    with pytest.raises(InferenceFailed, match="output logits has shape"):
        split({"logits": np.zeros(shape, dtype=np.float32)}, [Row([1, 2, 3]), Row([1])], io)
