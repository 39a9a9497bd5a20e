"""The index that the vectors of an endpoint must fit."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.resources.base import Spec, TextRule
from penstock.resources.core import ModelSource
from penstock.resources.index_certificate import IndexCriteria

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
