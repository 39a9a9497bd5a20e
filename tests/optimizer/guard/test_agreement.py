"""Metrics of the agreement of two answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock_optimizer.guard import agreement
from penstock_runtime.rows import Float

vectors = hnp.arrays(np.float32, (12, 4), elements=st.floats(-5, 5, width=32))
scores = st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=12)
labels = st.lists(st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC"]), max_size=20)
shares = st.lists(st.floats(0.01, 1), min_size=2, max_size=6).map(
    lambda some: {f"L{index}": share / sum(some) for index, share in enumerate(some)}
)


@given(vectors)
def test_the_cosine_of_equal_vectors_is_one(some: Float) -> None:
    assert agreement.cosines(list(some), list(some * 3)) == pytest.approx(np.ones(12), abs=1e-6)


@given(vectors, vectors)
def test_cosines_are_symmetric_and_bounded(some: Float, others: Float) -> None:
    forth, back = agreement.cosines(list(some), list(others)), agreement.cosines(list(others), list(some))

    np.testing.assert_allclose(forth, back)
    assert np.all(np.abs(forth) <= 1)


@pytest.mark.parametrize(
    ("one", "other", "cosine"),
    [
        ([1, 0], [0, 1], 0),
        ([1, 0], [-1, 0], -1),
        ([1, 0], [1, 1], math.sqrt(0.5)),
        ([0, 0], [0, 0], 1),
        ([0, 0], [1, 0], 0),
    ],
)
def test_cosines_of_known_vectors(one: list[float], other: list[float], cosine: float) -> None:
    found = agreement.cosines([np.array(one, np.float32)], [np.array(other, np.float32)])

    assert found[0] == pytest.approx(cosine)


@given(vectors, st.integers(1, 20))
def test_the_neighbours_of_equal_sets_are_the_same(some: Float, count: int) -> None:
    assert np.all(agreement.neighbour_overlap(list(some), list(some), count) == 1)


def test_neighbours_that_change_are_counted() -> None:
    before = [np.array(v, np.float32) for v in ([1, 0], [0.9, 0.1], [0, 1], [0.1, 0.9])]
    after = [before[0], before[2], before[1], before[3]]

    assert agreement.neighbour_overlap(before, after, 1).tolist() == [0, 0, 0, 0]
    assert agreement.neighbour_overlap(before, after, 3).tolist() == [1, 1, 1, 1]


def test_noise_lowers_the_overlap_of_neighbours() -> None:
    generator = np.random.default_rng(0)
    before = generator.standard_normal((200, 16)).astype(np.float32)
    noise = generator.standard_normal(before.shape).astype(np.float32)
    kept = [
        agreement.neighbour_overlap(list(before), list(before + size * noise), 10).mean() for size in (0, 0.1, 0.4, 2)
    ]

    assert kept == sorted(kept, reverse=True)
    assert kept[0] == 1
    assert kept[-1] < 0.5


@given(shares)
def test_a_distribution_diverges_from_itself_by_nothing(some: dict[str, float]) -> None:
    assert agreement.divergence(some, some) == 0


@given(shares, shares)
def test_divergence_is_never_negative_nor_infinite(some: dict[str, float], others: dict[str, float]) -> None:
    assert 0 <= agreement.divergence(some, others) < 50


def test_divergence_of_known_distributions() -> None:
    assert agreement.divergence({"a": 0.5, "b": 0.5}, {"a": 0.25, "b": 0.75}) == pytest.approx(0.1438, abs=1e-4)
    assert agreement.divergence({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}) == 0


@pytest.mark.parametrize(
    ("given_", "best"),
    [({"a": 0.2, "b": 0.8}, ("b", 0.6)), ({"b": 0.5, "a": 0.5}, ("a", 0.0)), ({"only": 0.3}, ("only", 1.0))],
)
def test_the_best_label_and_its_lead(given_: dict[str, float], best: tuple[str, float]) -> None:
    label, margin = agreement.best_and_margin(given_)

    assert label == best[0]
    assert margin == pytest.approx(best[1])


@given(scores)
def test_an_order_agrees_with_itself_and_opposes_its_reverse(some: list[float]) -> None:
    assert agreement.kendall_tau(some, some) == pytest.approx(1)
    if len(set(some)) > 1:
        assert agreement.kendall_tau(some, [-one for one in some]) == pytest.approx(-1)


@given(scores, st.data())
def test_tau_is_symmetric(some: list[float], data: st.DataObject) -> None:
    others = data.draw(st.lists(st.integers(-4, 4).map(float), min_size=len(some), max_size=len(some)))

    assert agreement.kendall_tau(some, others) == pytest.approx(agreement.kendall_tau(others, some))


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [([1, 2, 3], [1, 3, 2], 1 / 3), ([1], [5], 1), ([], [], 1), ([2, 2], [3, 3], 1), ([1, 2], [3, 3], 0)],
)
def test_tau_of_known_orders(one: list[float], other: list[float], tau: float) -> None:
    assert agreement.kendall_tau(one, other) == pytest.approx(tau)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], set()),
        (["O", "O"], set()),
        (["B-PER", "I-PER", "O", "LOC"], {(0, 2, "PER"), (3, 4, "LOC")}),
        (["I-PER", "I-PER"], {(0, 2, "PER")}),
        (["B-PER", "B-PER"], {(0, 1, "PER"), (1, 2, "PER")}),
        (["I-PER", "I-LOC"], {(0, 1, "PER"), (1, 2, "LOC")}),
        (["O", "MISC"], {(1, 2, "MISC")}),
    ],
)
def test_entities_are_runs_of_one_label(tokens: list[str], found: set[agreement.Span]) -> None:
    assert agreement.entities(tokens) == found


@given(labels, labels)
def test_f1_is_symmetric_and_bounded(some: list[str], others: list[str]) -> None:
    one, other = agreement.entities(some), agreement.entities(others)

    assert agreement.f1(one, other) == agreement.f1(other, one)
    twice, sizes = agreement.f1(one, other)
    assert 0 <= twice <= sizes
    assert agreement.f1(one, one) == (2 * len(one), 2 * len(one))


@pytest.mark.parametrize(
    ("one", "other", "share"), [([1, 2], [2, 1], 1), ([1, 2], [2, 3], 0.5), ([], [1], 1), ([1], [], 0)]
)
def test_overlap_is_the_share_that_stays(one: list[int], other: list[int], share: float) -> None:
    assert agreement.overlap(one, other) == share


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [((0, 4), (0, 4), 1), ((0, 4), (2, 6), 0.5), ((0, 4), (4, 8), 0), ((0, 4), (9, 9), 0), ((3, 3), (3, 3), 1)],
)
def test_spans_overlap_by_characters(one: tuple[int, int], other: tuple[int, int], share: float) -> None:
    assert agreement.character_f1(one, other) == share
    assert agreement.character_f1(other, one) == share
