"""The published figures that results are compared with: Hugging Face Infinity against plain transformers."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

TABLE = "infinity_c6i_2cores_batch1.csv"
TABLE_CORES = 2
TABLE_BATCH = 1


@dataclass(frozen=True)
class PublishedRow:
    """Requests per second at one length."""

    tokens: int
    infinity_per_second: float
    transformers_per_second: float

    @property
    def ratio(self) -> float:
        """How much faster Infinity was."""
        return self.infinity_per_second / self.transformers_per_second


@cache
def published_table() -> Mapping[int, PublishedRow]:
    """The rows by length in tokens, ascending. The file's comment names the source."""
    lines = resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return MappingProxyType(
        {
            int(row["sequence_length"]): PublishedRow(
                tokens=int(row["sequence_length"]),
                infinity_per_second=float(row["infinity_rps"]),
                transformers_per_second=float(row["transformers_rps"]),
            )
            for row in rows
        }
    )


@cache
def published_source() -> str:
    """The comment at the top of the table: model, machine, source."""
    lines = resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
