"""Arrow tables: columns of texts and of vectors. Imports pyarrow, of the extra `index`, for the other modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.errors import MissingPackage, PenstockError
from penstock_runtime.rows import Float

__all__ = ["pa", "vector_column", "with_vectors"]

try:
    import pyarrow as pa
except ImportError as missing:
    raise MissingPackage("pyarrow is not installed", remedy="Run pip install 'penstock[index]'") from missing


def with_vectors(table: Any, text: str, vector: str, embed: Callable[[Sequence[Any]], Float]) -> Any:
    """The table or batch with a column of vectors behind its own. PenstockError if it lacks the column of texts, or has
    one of the name `vector`."""
    names = table.schema.names
    if text not in names or vector in names:
        raise PenstockError(
            f"the columns are {', '.join(names)}: there must be {text}, and no {vector}",
            remedy="Pass the names of the columns: text=..., vector=...",
        )
    column = vector_column(embed(table.column(text).to_pylist()))
    return table.append_column(pa.field(vector, column.type), column)


def vector_column(vectors: Float) -> Any:
    """A FixedSizeList of the vectors' dtype, null for rows with NaN. Without a copy where there is no such row."""
    absent = np.isnan(vectors[:, :1]).any(axis=1) if vectors.size else np.ones(len(vectors), dtype=bool)
    values = pa.array(vectors.reshape(-1))
    mask = pa.array(absent) if absent.any() else None
    return pa.FixedSizeListArray.from_arrays(values, max(1, vectors.shape[1]) if vectors.size else 1, mask=mask)
