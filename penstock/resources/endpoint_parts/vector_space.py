"""The index that the vectors of an endpoint must fit, and the certificate of a model for an index: may the queries of
this model search the vectors that another one wrote?

`penstock_optimizer.guard.certificate` makes it; the manifest and the status of an OptimizedModel hold it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from penstock.resources.base import Facts, Spec
from penstock.resources.core import ModelSource
from penstock.resources.fields.rules import TextRule

ERROR = 0.05
"""Probability of a lower bound above the true mean."""
LARGEST_EQUAL = 1e-6
"""Of 1 - cosine: sums in another order stay below it (the guard's 1e-4 of a relative difference is 5e-9)."""


class IndexCriteria(Spec):
    """What makes a model compatible with an index. The defaults were fixed before they were measured on a second model
    (docs/lab/index-certificate.md)."""

    k: int = Field(default=10, ge=1, le=100, description="Results of a query that are compared.")
    tolerance: float = Field(
        default=0.005,
        ge=0,
        le=0.5,
        description="A result of a new query counts as a loss only if its old cosine is lower than that of the last "
        "old result by more than this.",
    )
    min_recall: float = Field(
        default=0.99,
        gt=0,
        lt=1,
        description="The least mean of the results that are no loss, which the lower bound (95 %) must reach. To prove "
        "0.99 takes at least 355 queries.",
    )


SampleUrl = Annotated[
    str,
    Field(max_length=512),
    TextRule(
        r"((s3|gs|az)://[A-Za-z0-9_.-]+|pvc://[a-z0-9][-a-z0-9.]*|file://)/.+\.(parquet|jsonl)",
        "{self} is not a sample of an index",
        "Write s3://bucket/sample.parquet, gs://, az://, pvc://claim/sample.parquet or file:///path, with .parquet or "
        ".jsonl at the end",
        also=r"!self.matches('/\\.\\.(/|$)')",
        holds=lambda text: ".." not in text.split("/"),
    ),
]


class IndexGate(IndexCriteria):
    """The index that queries search. An artefact with vectors that do not fit it does not serve."""

    sample: SampleUrl = Field(
        description="Rows of a text and its stored vector, as Parquet or JSON lines. A new sample needs a new name, "
        "which is part of the optimisation's key."
    )

    @property
    def source(self) -> ModelSource:
        """The place of the sample."""
        return ModelSource.parse(self.sample)


class VectorSpaceGate(Spec):
    """What vectors must fit."""

    index: IndexGate


class IndexVerdict(StrEnum):
    """Of a certificate. The values are reasons of the condition IndexCompatible."""

    SAME = "Same"
    COMPATIBLE = "Compatible"
    ADAPTER = "NeedsAdapter"
    RE_EMBED = "NeedsReembedding"
    NOT_CERTIFIED = "NotCertified"

    @property
    def fits(self) -> bool:
        """Queries may search the index as it is, and new documents may be added."""
        return self in {IndexVerdict.SAME, IndexVerdict.COMPATIBLE}


class Recalls(Facts):
    """Means over all queries."""

    recall: float = Field(ge=0, le=1, description="Results that are no loss within the tolerance.")
    recall_low: float = Field(ge=0, le=1, description="Lower bound (95 %) of its mean.")
    plain: float = Field(ge=0, le=1, description="Old results that are among the new ones.")
    plain_low: float = Field(ge=0, le=1, description="Lower bound (95 %) of its mean.")
    first: float = Field(ge=0, le=1, description="Queries with the same first result.")
    regret: float = Field(ge=0, description="Mean loss of old cosine of a result.")


class IndexCertificate(Facts):
    """How the queries of a model fare in an index that another one wrote."""

    verdict: IndexVerdict
    sample: str = Field(max_length=80, description="sha256 of the sample's texts and vectors.")
    documents: int = Field(ge=0, description="Stored vectors that were searched.")
    queries: int = Field(ge=0, description="Queries that were compared.")
    of_documents: bool = Field(description="The queries are documents of the sample, which real queries are not.")
    criteria: IndexCriteria = IndexCriteria()
    widths: tuple[int, ...] | None = Field(
        default=None, max_length=2, description="Values of a stored and of a new vector, if they differ."
    )
    mean_cosine: float | None = Field(default=None, description="Between the old and the new vector of a query.")
    lowest_cosine: float | None = Field(default=None, description="The lowest of them.")
    alone: Recalls | None = Field(default=None, description="In the index as it is.")
    mixed: Recalls | None = Field(default=None, description="In the index with new vectors of half of the documents.")
    adapted: Recalls | None = Field(default=None, description="Through an adapter, in the index as it is.")
    hardest: tuple[int, ...] = Field(default=(), max_length=20, description="Numbers of the queries that lose most.")

    @property
    def summary(self) -> str:
        """In one clause, for people."""
        if self.widths is not None:
            return f"the index has vectors of {self.widths[0]} values, and this model gives {self.widths[1]}"
        if self.alone is None or self.mixed is None:
            return "nothing was compared"
        wanted = self.criteria.min_recall
        worse = min(self.alone, self.mixed, key=lambda one: one.recall_low)
        where = " with half of the documents embedded again" if worse is self.mixed else ""
        return (
            f"{worse.recall:.4f} of the {self.criteria.k} results are no loss{where} (at least {worse.recall_low:.4f} "
            f"with 95 % confidence, {wanted:g} wanted; {self.queries} queries, {self.documents} documents, "
            f"plain recall {self.alone.plain:.3f})"
        )
