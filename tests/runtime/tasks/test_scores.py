"""The arithmetic of the tasks, judged by plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Float, Pooling
from penstock_runtime.tasks.embeddings.embedding import normalise, pool, shorten
from penstock_runtime.tasks.extraction.spans import AnswerSpan, best_spans, merge
from penstock_runtime.tasks.scores import descending, finite, highest, sigmoid, softmax

LOGITS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.floats(-1000, 1000, width=32)
)
ROW = arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-5, 5, width=32))


@given(LOGITS)
def test_softmax_sums_to_one_and_keeps_the_order(logits: Float) -> None:
    scores = softmax(logits)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores.sum(axis=-1), 1, rtol=1e-5)
    best = np.take_along_axis(scores, logits.argmax(axis=-1, keepdims=True), axis=-1)[:, 0]
    assert (best == scores.max(axis=-1)).all()


@given(LOGITS)
def test_sigmoid_is_between_0_and_1_without_overflow(logits: Float) -> None:
    scores = sigmoid(logits)
    assert scores.dtype == np.float32
    assert ((scores >= 0) & (scores <= 1)).all()
    np.testing.assert_allclose(scores, np.exp(-np.logaddexp(0, -logits.astype(np.float64))), rtol=1e-6, atol=1e-30)


@given(ROW, st.integers(1, 50))
def test_the_top_scores_are_those_of_a_full_sort(scores: Float, count: int) -> None:
    assert scores[highest(scores, count)].tolist() == sorted(scores.tolist(), reverse=True)[:count]
    assert len(set(highest(scores, count))) == min(count, scores.size)


def test_equal_scores_stay_in_their_order() -> None:
    assert descending(np.array([1, 3, 3, 2, 3], dtype=np.float32)) == [1, 2, 4, 3, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_fail(bad: float) -> None:
    with pytest.raises(InferenceFailed):
        finite(np.array([1, bad], dtype=np.float32))
    with pytest.raises(InferenceFailed):
        finite(np.array([[1, 2], [3, bad]], dtype=np.float32).T)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,)])
def test_the_largest_finite_numbers_pass(shape: tuple[int, ...]) -> None:
    large = np.full(shape, np.finfo(np.float32).max)

    assert finite(large) is large


@given(arrays.arrays(np.float32, (4, 3), elements=st.floats(-5, 5, width=32)))
def test_pooling_is_over_tokens(vectors: Float) -> None:
    np.testing.assert_array_equal(pool(vectors, Pooling.CLS), vectors[0])
    np.testing.assert_array_equal(pool(vectors, Pooling.LAST), vectors[3])
    np.testing.assert_array_equal(pool(vectors, Pooling.MAX), vectors.max(axis=0))
    np.testing.assert_allclose(pool(vectors, Pooling.MEAN), vectors.sum(axis=0) / 4, rtol=1e-4, atol=1e-6)


@given(ROW, st.integers(1, 60))
def test_truncated_vectors_are_normalised_again(vector: Float, dimensions: int) -> None:
    short = shorten(vector, dimensions, normalised=True)
    assert short.shape == (min(dimensions, vector.size),)
    assert short.dtype == np.float32
    if np.linalg.norm(vector[:dimensions]) > 1e-6:
        assert np.linalg.norm(short) == pytest.approx(1, abs=1e-5)
    np.testing.assert_array_equal(shorten(vector, dimensions, normalised=False), vector[:dimensions])


def test_a_vector_of_zeros_stays_as_it_is() -> None:
    np.testing.assert_array_equal(normalise(np.zeros(3, dtype=np.float32)), np.zeros(3))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("normalised", [True, False])
def test_a_nan_vector_is_an_error(bad: float, *, normalised: bool) -> None:
    vector = np.array([1, 0, bad, 2], dtype=np.float32)

    with pytest.raises(InferenceFailed, match="not a number"):
        shorten(vector, None, normalised=normalised)
    np.testing.assert_array_equal(shorten(vector, 2, normalised=normalised), [1, 0])


def test_vectors_whose_squares_overflow_are_normalised() -> None:
    with np.errstate(over="ignore"):
        vector = normalise(np.array([3e30, -4e30], dtype=np.float32))

    np.testing.assert_allclose(vector, [0.6, -0.8], rtol=1e-6)
    assert vector.dtype == np.float32


@given(
    start=arrays.arrays(np.float32, 12, elements=st.floats(-8, 8, width=32)),
    end=arrays.arrays(np.float32, 12, elements=st.floats(-8, 8, width=32)),
    first=st.integers(1, 10),
    length=st.integers(0, 6),
    longest=st.integers(1, 20),
    count=st.integers(1, 30),
    with_null=st.booleans(),
)
def test_answer_spans_are_those_of_an_exhaustive_search(
    start: Float, end: Float, *, first: int, length: int, longest: int, count: int, with_null: bool
) -> None:
    context = slice(first, min(first + length, 12))
    others = np.arange(12) == 0 if with_null else None
    if not with_null and context.stop == context.start:
        return
    allowed = [0, *range(12)[context]] if with_null else list(range(12)[context])
    begins, ends = ({i: np.exp(float(logits[i])) for i in allowed} for logits in (start, end))
    whole = sum(begins.values()) * sum(ends.values())
    every = sorted(
        (begins[i] * ends[j] / whole for i in range(12)[context] for j in range(12)[context] if i <= j < i + longest),
        reverse=True,
    )
    found = best_spans(start, end, context, others, count=count, longest=longest)
    assert [score for score, _, _ in found.spans] == pytest.approx(every[:count])
    for score, i, j in found.spans:
        assert 0 <= i <= j < i + longest
        assert score == pytest.approx(begins[first + i] * ends[first + j] / whole)
    assert found.null_score == pytest.approx(begins.get(0, 0) * ends.get(0, 0) / whole)


def test_equal_answers_of_two_windows_are_added_up() -> None:
    text = "Ada and ADA"
    windows = [[AnswerSpan(0.3, 0, 3), AnswerSpan(0.1, 4, 7)], [AnswerSpan(0.25, 8, 11)]]
    assert merge(windows, text, null_score=None, count=5) == [
        {"score": 0.55, "start": 0, "end": 3, "answer": "Ada"},
        {"score": 0.1, "start": 4, "end": 7, "answer": "and"},
    ]
    assert merge(windows, text, null_score=0.6, count=1) == [{"score": 0.6, "start": 0, "end": 0, "answer": ""}]
