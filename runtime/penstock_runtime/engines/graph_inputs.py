"""The arrays of a batch under the names that a graph takes them by."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock_runtime.rows import Batch, Int


def feed(batch: Batch, names: Iterable[str]) -> dict[str, Int]:
    """Those of `input_ids`, `attention_mask` and `token_type_ids` that the graph has: int64 [batch, tokens]."""
    return {name: getattr(batch, name) for name in names}


def pad(batch: Batch, tokens: int) -> Batch:
    """The batch with masked zeros on the right, up to `tokens`; the same one when it is that long."""
    more = tokens - batch.input_ids.shape[1]
    if more <= 0:
        return batch
    width = ((0, 0), (0, more))
    return Batch(
        np.pad(batch.input_ids, width), np.pad(batch.attention_mask, width), np.pad(batch.token_type_ids, width)
    )
