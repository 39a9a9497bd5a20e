"""The certificate of an index: what it measures, and that it certifies wrongly in at most one of twenty cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.resources.endpoint_parts.vector_space import IndexCriteria, IndexVerdict
from penstock_optimizer.guard.certificate import (
    IndexVectors,
    Outcomes,
    certify,
    compare,
    fit_adapter,
    unit,
    who_wrote,
    with_adapter,
)
from tests.examples import THOROUGH, examples

WIDTH = 24
CRITERIA = IndexCriteria()


def cloud(count: int, seed: int, width: int = WIDTH) -> Any:
    """Unit vectors in groups, as texts of subjects are."""
    random = np.random.default_rng(seed)
    groups = random.normal(size=(40, width))
    near: Any = groups[random.integers(0, 40, count)]
    return unit(near + 0.5 * random.normal(size=(count, width)))


def moved(vectors: Any, noise: float, seed: int) -> Any:
    return unit(vectors + noise * np.random.default_rng(seed).normal(size=vectors.shape))


def rotated(vectors: Any, width: int = WIDTH) -> Any:
    return (vectors @ np.linalg.qr(np.random.default_rng(9).normal(size=(vectors.shape[1], width)))[0]).astype(
        np.float32
    )


def vectors(change: Any, *, queries: int = 600, documents: int = 2_000, same_space: bool = False) -> IndexVectors:
    asked, stored = cloud(queries + documents, 1)[:queries], cloud(queries + documents, 1)[queries:]
    return IndexVectors(
        asked, change(asked), stored, change(stored), "sample", of_documents=True, same_space=same_space
    )


@pytest.mark.parametrize(
    ("change", "same_space", "queries", "verdict"),
    [
        (lambda it: it, True, 600, IndexVerdict.SAME),
        (lambda it: it * 3, True, 20, IndexVerdict.SAME),
        (lambda it: it, False, 600, IndexVerdict.COMPATIBLE),
        (lambda it: moved(it, 1e-3, 2), True, 600, IndexVerdict.COMPATIBLE),
        (lambda it: moved(it, 1e-3, 2), True, 354, IndexVerdict.NOT_CERTIFIED),
        (lambda it: moved(it, 0.05, 2), True, 600, IndexVerdict.RE_EMBED),
        (rotated, False, 600, IndexVerdict.RE_EMBED),
        (rotated, True, 600, IndexVerdict.RE_EMBED),
        (lambda it: it[:, : WIDTH // 2], False, 600, IndexVerdict.RE_EMBED),
    ],
)
def test_the_verdict_follows_the_damage(change: Any, same_space: bool, queries: int, verdict: IndexVerdict) -> None:
    found = certify(vectors(change, queries=queries, same_space=same_space), CRITERIA)

    assert found.verdict is verdict
    assert (found.widths is None) == (found.alone is not None)
    assert found.summary
    if found.alone is not None and found.mixed is not None:
        assert found.alone.recall >= found.alone.plain
        assert found.verdict.fits or min(found.alone.recall_low, found.mixed.recall_low) < CRITERIA.min_recall


def test_a_model_that_only_new_documents_harm_is_not_compatible() -> None:
    """Its queries still fit the old vectors: only the index that both have written shows the damage."""
    good = vectors(lambda it: it)
    found = certify(
        IndexVectors(good.old, good.new, good.documents, rotated(good.documents), "", of_documents=True), CRITERIA
    )

    assert found.alone is not None
    assert found.mixed is not None
    assert found.alone.recall_low >= CRITERIA.min_recall
    assert found.mixed.recall < 0.9
    assert found.verdict is IndexVerdict.RE_EMBED


def slow(old: Any, new: Any, documents: Any, criteria: IndexCriteria) -> Outcomes:
    """The definition, one query at a time."""
    rows = []
    for one, other in zip(old, new, strict=True):
        scores = documents @ one
        wanted = sorted(range(len(documents)), key=lambda row: -scores[row])[: criteria.k]
        got = sorted(range(len(documents)), key=lambda row: -(documents[row] @ other))[: criteria.k]
        rows.append(
            (
                np.mean([scores[row] >= scores[wanted[-1]] - criteria.tolerance for row in got]),
                len(set(got) & set(wanted)) / criteria.k,
                got[0] == wanted[0],
                max(0.0, float(np.mean(scores[wanted]) - np.mean(scores[got]))),
            )
        )
    return Outcomes(*np.array(rows, float).T)


@given(st.integers(0, 10_000), st.sampled_from([1, 3, 10]), st.sampled_from([0.0, 0.01, 0.2]))
@settings(max_examples=examples(60), deadline=None)
def test_the_measures_are_those_of_their_definition(seed: int, k: int, noise: float) -> None:
    documents, old = cloud(60, seed), cloud(12, seed + 1)
    new, criteria = moved(old, noise, seed), IndexCriteria(k=k)
    fast, plain = compare(old, new, documents, criteria), slow(old, new, documents, criteria)

    for one, other in zip(vars(fast).values(), vars(plain).values(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert (fast.tolerant >= fast.plain - 1e-9).all()
    if noise == 0:
        assert fast.plain.min() == fast.tolerant.min() == 1


@pytest.mark.parametrize("queries", [400, 1_000])
def test_false_certificates_are_rarer_than_one_in_twenty(queries: int) -> None:
    """Losses are rare and large, and their mean is exactly at the limit: the case that a bootstrap gets wrong."""
    random = np.random.default_rng(queries)
    false = 0
    for _ in range(trials := 2_000 if THOROUGH else 300):
        tolerant = 1 - 0.4 * (random.random(queries) < 0.025)
        false += Outcomes(tolerant, tolerant, tolerant, 1 - tolerant).means.recall_low >= CRITERIA.min_recall
    assert false / trials <= 0.05


def test_an_adapter_undoes_a_linear_change_and_is_refused_where_it_would_harm() -> None:
    bent = vectors(lambda it: rotated(it * np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)))
    plain = certify(bent, CRITERIA)
    adapter = fit_adapter(bent.again, bent.documents)
    assert adapter is not None
    adapted = with_adapter(bent, adapter, CRITERIA, plain)
    assert adapted.verdict is IndexVerdict.ADAPTER
    assert adapted.adapted is not None
    assert plain.alone is not None
    assert adapted.adapted.recall > 0.95 > plain.alone.recall

    few = 5 * WIDTH - 1
    assert fit_adapter(bent.again[:few], bent.documents[:few]) is None
    # Vectors of other texts each: no map is better than the mean, and queries through it find nothing.
    foreign = fit_adapter(cloud(1_000, 5), cloud(1_000, 6))
    assert foreign is not None
    assert with_adapter(bent, foreign, CRITERIA, plain) == plain
    # The new vectors are nearer to the old ones than any map of so few noisy pairs.
    noisy = cloud(few + 1, 7)
    assert fit_adapter(moved(noisy, 0.3, 1), noisy) is None


def test_an_adapter_to_another_width_is_fitted() -> None:
    narrow = vectors(lambda it: rotated(it)[:, : WIDTH - 1])
    adapter = fit_adapter(narrow.again, narrow.documents)

    assert adapter is not None
    assert adapter(narrow.new).shape == narrow.old.shape


@pytest.mark.parametrize(
    ("equal", "close", "other", "own", "two"),
    [(200, 0, 0, True, False), (0, 200, 0, True, False), (198, 0, 2, True, False), (0, 0, 200, False, False),
     (100, 0, 100, False, True), (90, 90, 20, False, True), (20, 0, 180, False, True)],
)  # fmt: skip
def test_the_writers_of_an_index_are_distinguished(equal: int, close: int, other: int, own: bool, two: bool) -> None:
    new = cloud(200, 1)
    stored = (
        np.concatenate([new[:equal], moved(new[equal : equal + close], 5e-3, 1), rotated(new[equal + close :])]) * 2
    )
    found = who_wrote(stored, new, 5e-3)

    assert (found.equal, found.close, found.other) == (equal, close, other)
    assert (found.own, found.two) == (own, two)
    assert found.length == pytest.approx(2)
    assert [row >= equal + close for row, _ in found.farthest[:other]] == [True] * min(other, 10)
