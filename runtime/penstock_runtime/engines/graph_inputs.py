"""The arrays of a batch under the names that a graph takes them by."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_runtime.rows import Batch, Int


def feed(batch: Batch, names: Iterable[str]) -> dict[str, Int]:
    """Those of `input_ids`, `attention_mask` and `token_type_ids` that the graph has: int64 [batch, tokens]."""
    return {name: getattr(batch, name) for name in names}
