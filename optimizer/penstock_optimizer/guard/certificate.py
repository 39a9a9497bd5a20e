"""Judges whether the queries of one model may search an index that another one wrote. Pure functions of vectors.

No labels are needed: the answers of the writer's own queries are the reference. A result of a new query counts as a
loss only if its old score is more than a tolerance below the old score of rank k: a document that the writer itself
scored nearly as high is no worse an answer. Scores are cosines, and the search is exact.

The bound of the mean is that of `penstock.evidence`: losses are rare, so that a bootstrap of few queries sees none of
them and promises too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.evidence import lower_bound, upper_bound
from penstock.resources.endpoint_parts.vector_space import (
    ERROR,
    LARGEST_EQUAL,
    IndexCertificate,
    IndexCriteria,
    IndexVerdict,
    Recalls,
)
from penstock_runtime.rows import Float

QUERIES_AT_ONCE = 128
"""Their scores of all documents are in memory: 26 MB for 50,000 documents."""
PAIRS_PER_DIMENSION = 5
"""An adapter that is fitted on fewer pairs than dimensions destroys: 0.82 of the neighbours became 0.51."""
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Of ridge, times the mean square of the values; the hold-out decides."""
HELD_OUT = 0.2
"""Share of an adapter's pairs that choose its strength."""
LEAST_ADAPTER_RECALL = 0.90
HARDEST = 20
LEAST_DOCUMENTS = 10
"""Times k: with fewer, nearly all documents are results."""


def unit(vectors: Float) -> Float:
    """Vectors of length 1; a vector of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Float = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return scaled


@dataclass(frozen=True)
class Outcomes:
    """Of each query, float [queries]."""

    tolerant: Float
    """Share of the k results that the old scores allow."""
    plain: Float
    """Share of the k old results among the new ones."""
    first: Float
    """1 where the first result is the same."""
    regret: Float
    """Mean loss of old score over the k results."""

    @cached_property
    def means(self) -> Recalls:
        """With lower bounds."""
        return Recalls(
            recall=float(self.tolerant.mean()),
            recall_low=lower_bound(self.tolerant.tolist(), ERROR),
            plain=float(self.plain.mean()),
            plain_low=lower_bound(self.plain.tolist(), ERROR),
            first=float(self.first.mean()),
            regret=float(self.regret.mean()),
        )


def compare(
    old: Float, new: Float, documents: Float, criteria: IndexCriteria, searched: Float | None = None
) -> Outcomes:
    """The results of new queries against those of the old ones. All are unit vectors: queries [n, width], documents
    [m, width]. `searched`: what the new queries search, such as an index with new documents in it, or `documents`."""
    parts = list(_parts(old, new, documents, criteria, documents if searched is None else searched))
    return Outcomes(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _parts(
    old: Float, new: Float, documents: Float, criteria: IndexCriteria, searched: Float
) -> Iterator[tuple[Float, ...]]:
    k = criteria.k
    for start in range(0, len(old), QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        scores = old[part] @ documents.T
        wanted, found = _first(scores, k), _first(new[part] @ searched.T, k)
        best, got = np.take_along_axis(scores, wanted, 1), np.take_along_axis(scores, found, 1)
        yield (
            np.mean(got >= best[:, -1:] - criteria.tolerance, axis=1),
            np.mean((found[:, :, None] == wanted[:, None, :]).any(2), axis=1),
            (found[:, 0] == wanted[:, 0]).astype(float),
            np.maximum(0, best.mean(1) - got.mean(1)).astype(float),
        )


def _first(scores: Float, k: int) -> np.ndarray[tuple[int, int], np.dtype[np.intp]]:
    """The k columns with the highest scores of each row, the highest first; of equal ones the lower number first."""
    among = np.sort(np.argpartition(-scores, k - 1, axis=1)[:, :k], axis=1)
    order = np.argsort(-np.take_along_axis(scores, among, 1), axis=1, kind="stable")
    return np.take_along_axis(among, order, 1)


@dataclass(frozen=True)
class IndexVectors:
    """The vectors that a certificate compares."""

    old: Float
    """Of the queries, by the writer of the index [n, width]."""
    new: Float
    """Of the same queries, by the model in question [n, new width]."""
    documents: Float
    """As they are stored [m, width]."""
    again: Float
    """Of the first of these documents, by the model in question [up to m, new width]."""
    sample: str
    """sha256 of the sample."""
    of_documents: bool
    """The queries are documents, too."""
    same_space: bool = False
    """Both models state the same space."""


def certify(given: IndexVectors, criteria: IndexCriteria) -> IndexCertificate:
    """The certificate of a model for an index that has `LEAST_DOCUMENTS` for each result, or more."""
    about = IndexCertificate(
        verdict=IndexVerdict.RE_EMBED,
        sample=given.sample,
        queries=len(given.old),
        documents=len(given.documents),
        of_documents=given.of_documents,
        criteria=criteria,
    )
    if given.old.shape[1] != given.new.shape[1]:
        return about.model_copy(update={"widths": (given.old.shape[1], given.new.shape[1])})
    old, new, documents, again = map(unit, (given.old, given.new, given.documents, given.again))
    apart = 1 - np.sum(old * new, axis=1, dtype=float)
    alone = compare(old, new, documents, criteria)
    # The index after a rollout: the first half of these documents is by the new model.
    count = min(len(again), len(documents) // 2)
    mixed = compare(
        old, new, documents[: 2 * count], criteria, np.concatenate([again[:count], documents[count : 2 * count]])
    )
    hardest = np.argsort(-alone.regret, kind="stable")[:HARDEST]
    return about.model_copy(
        update={
            "verdict": _verdict(alone, mixed, criteria, equal=given.same_space and apart.max() <= LARGEST_EQUAL),
            "mean_cosine": float(1 - apart.mean()),
            "lowest_cosine": float(1 - apart.max()),
            "alone": alone.means,
            "mixed": mixed.means,
            "hardest": tuple(int(number) for number in hardest if alone.regret[number] > 0),
        }
    )


def _verdict(alone: Outcomes, mixed: Outcomes, criteria: IndexCriteria, *, equal: bool) -> IndexVerdict:
    if equal:
        return IndexVerdict.SAME
    wanted = criteria.min_recall
    if min(alone.means.recall_low, mixed.means.recall_low) >= wanted:
        return IndexVerdict.COMPATIBLE
    most = min(upper_bound(outcomes.tolerant.tolist(), ERROR) for outcomes in (alone, mixed))
    return IndexVerdict.RE_EMBED if most < wanted else IndexVerdict.NOT_CERTIFIED


@dataclass(frozen=True)
class Adapter:
    """Maps a new vector into the old space: `new @ weights + offset`, then to length 1."""

    weights: Float
    """[new width, width]."""
    offset: Float
    """[width]."""

    def __call__(self, vectors: Float) -> Float:
        """Unit vectors [n, width] of new unit vectors [n, new width]."""
        return unit(vectors @ self.weights + self.offset)


def fit_adapter(new: Float, old: Float) -> Adapter | None:
    """The ridge regression from new to old vectors of the same texts; None with fewer than `PAIRS_PER_DIMENSION` pairs
    for each dimension, or where no adapter is nearer to the old vectors of held-out pairs than the new vectors are."""
    if len(new) < PAIRS_PER_DIMENSION * max(new.shape[1], old.shape[1]):
        return None
    new, old = unit(new), unit(old)
    fitted = int(len(new) * (1 - HELD_OUT))
    held_new, held_old = new[fitted:], old[fitted:]
    made = [_ridge(new[:fitted], old[:fitted], strength) for strength in STRENGTHS]
    nearness = [float(np.sum(adapter(held_new) * held_old, axis=1).mean()) for adapter in made]
    without = float(np.sum(held_new * held_old, axis=1).mean()) if new.shape == old.shape else -1.0
    best = int(np.argmax(nearness))
    return made[best] if nearness[best] > without else None


def _ridge(new: Float, old: Float, strength: float) -> Adapter:
    middle, aim = new.mean(0, dtype=np.float64), old.mean(0, dtype=np.float64)
    centred = new - middle
    square = centred.T @ centred
    weights = np.linalg.solve(
        square + strength * np.trace(square) / len(square) * np.eye(len(square)), centred.T @ (old - aim)
    )
    return Adapter(weights.astype(np.float32), (aim - middle @ weights).astype(np.float32))


def with_adapter(
    given: IndexVectors, adapter: Adapter, criteria: IndexCriteria, without: IndexCertificate
) -> IndexCertificate:
    """The certificate of queries through an adapter, for an index that keeps the old vectors only: `NeedsAdapter` if
    `LEAST_ADAPTER_RECALL` is proved and the queries lose less than `without` it; otherwise `without`."""
    old, mapped, documents = unit(given.old), adapter(unit(given.new)), unit(given.documents)
    outcomes = compare(old, mapped, documents, criteria)
    before = 0.0 if without.alone is None else without.alone.recall
    if outcomes.means.recall_low < LEAST_ADAPTER_RECALL or outcomes.means.recall <= before:
        return without
    return without.model_copy(update={"verdict": IndexVerdict.ADAPTER, "adapted": outcomes.means})


LEAST_SHARE = 0.01
"""Of the pairs: a writer of fewer is an exception, such as texts that were edited after they had been embedded."""
FARTHEST = 10


@dataclass(frozen=True)
class Writers:
    """Who wrote the vectors of an index, seen from one model."""

    equal: int
    """Pairs with the model's own vector, up to the order of sums."""
    close: int
    """With a vector of its space by another precision."""
    other: int
    own_low: float
    """Lower bound (95 %) of the share of the first two."""
    other_low: float
    farthest: tuple[tuple[int, float], ...]
    """Row and cosine of the pairs with the lowest cosines, the lowest first."""
    cosine: float
    """The mean of the pairs that are `other`, or of all without such."""
    length: float
    """The median of the stored vectors'."""

    @property
    def two(self) -> bool:
        """Another model has written a part."""
        return min(self.own_low, self.other_low) >= LEAST_SHARE

    @property
    def own(self) -> bool:
        """The model, or one of its space, has written all but exceptions."""
        return self.own_low >= LEAST_SHARE and not self.two


def who_wrote(stored: Float, new: Float, largest_close: float) -> Writers:
    """Compare stored vectors with a model's vectors of the same texts [pairs, width], of equal width. `largest_close`:
    1 - cosine between precisions of the model."""
    apart = 1 - np.sum(unit(stored) * unit(new), axis=1, dtype=float)
    equal, own = apart <= LARGEST_EQUAL, apart <= largest_close
    order = np.argsort(-apart, kind="stable")[:FARTHEST]
    return Writers(
        equal=int(equal.sum()),
        close=int((own & ~equal).sum()),
        other=int((~own).sum()),
        own_low=lower_bound(own.astype(float).tolist(), ERROR),
        other_low=lower_bound((~own).astype(float).tolist(), ERROR),
        farthest=tuple((int(row), float(1 - apart[row])) for row in order),
        cosine=float(1 - (apart if own.all() else apart[~own]).mean()),
        length=float(np.median(np.linalg.norm(stored, axis=1))),
    )
