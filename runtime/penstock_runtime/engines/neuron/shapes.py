"""Divides a batch into runs of compiled shapes, and pads their inputs. Pure.

A run takes as long as its bucket is large, however many of its rows are real, plus a constant. So a batch of five rows
may run as one run of a bucket of eight, or as one of four and one of one: `divide` takes the cheapest division.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.hardware import NeuronGeneration
from penstock.neuron_artefact import CompiledModel, NeuronBucket
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.rows import Batch

Int32 = NDArray[np.int32]
CONSTANT_TOKENS = {NeuronGeneration.INF1: 14.7 / 1.61 * 128, NeuronGeneration.INF2: 0.348 / 0.673 * 128}
"""The constant time of a run, as the number of tokens that take as long, from the fitted times of BERT-base
(`penstock_optimizer.neuron.plans`): milliseconds of a run / milliseconds of a row * tokens of a row."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Rows of a batch that run together."""

    start: int
    rows: int
    bucket: int
    """Index in `CompiledModel.buckets`."""

    @property
    def end(self) -> int:
        """Index after its last row."""
        return self.start + self.rows


@dataclass(frozen=True, slots=True)
class BucketGrid(ShapeGrid):
    """The compiled lengths."""

    compiled: tuple[int, ...] = ()
    """In tokens, ascending, not empty."""

    def length(self, tokens: int) -> int:
        """The shortest compiled length for a row of `tokens`; `tokens` if there is none."""
        return next((length for length in self.compiled if length >= tokens), tokens)

    def rows(self, count: int) -> int:
        """Rows to run at once out of `count`: all of them; `divide` makes the runs."""
        return count

    def lengths(self, longest: int) -> tuple[int, ...]:
        """The compiled lengths that rows of up to `longest` tokens use."""
        return tuple(sorted({min(self.length(tokens), longest) for tokens in range(1, longest + 1)}))


def bucket_grid(model: CompiledModel) -> BucketGrid:
    """The grid of a compiled model."""
    return BucketGrid(model.longest, tuple(sorted({bucket.tokens for bucket in model.buckets})))


def divide(model: CompiledModel, rows: int, tokens: int) -> tuple[BatchPart, ...]:
    """The runs for a batch of `rows` rows padded to `tokens`, the first rows first.

    ValueError if the rows are longer than every bucket.
    """
    found = _divided(model.buckets, CONSTANT_TOKENS[model.target], rows, tokens)
    if found is None:
        raise ValueError(f"{tokens} tokens are more than the {model.longest} that the model was compiled for")
    parts, start = [], 0
    for bucket in found:
        count = min(model.buckets[bucket].batch, rows - start)
        parts.append(BatchPart(start, count, bucket))
        start += count
    return tuple(parts)


@lru_cache(maxsize=4096)
def _divided(buckets: tuple[NeuronBucket, ...], constant: float, rows: int, tokens: int) -> tuple[int, ...] | None:
    """Indices of the buckets with the lowest total cost, the largest first; None if no bucket is long enough."""
    # Of each batch size the shortest bucket that is long enough.
    usable: dict[int, int] = {}
    for index, bucket in enumerate(buckets):
        if bucket.tokens >= tokens:
            other = usable.get(bucket.batch)
            if other is None or bucket.tokens < buckets[other].tokens:
                usable[bucket.batch] = index
    if not usable:
        return None
    # best[n]: lowest cost of n rows, with the bucket of one of its runs.
    best: list[tuple[float, int]] = [(0.0, -1)]
    for count in range(1, rows + 1):
        best.append(
            min(
                (best[max(0, count - batch)][0] + buckets[index].size + constant, index)
                for batch, index in usable.items()
            )
        )
    chosen, left = [], rows
    while left > 0:
        index = best[left][1]
        chosen.append(index)
        left -= buckets[index].batch
    return tuple(sorted(chosen, key=lambda index: -buckets[index].batch))


def padded_inputs(model: CompiledModel, batch: Batch, part: BatchPart) -> list[Int32]:
    """The arrays of a run in the order of the model's inputs: int32 [bucket's batch, bucket's tokens].

    The batch has the real tokens. Padding has the model's padding token and a mask of 0. Rows that are only
    padding have their first token unmasked: a softmax over masked tokens alone is not a number in some models.
    """
    bucket = model.buckets[part.bucket]
    shape = (bucket.batch, bucket.tokens)
    mask = np.zeros(shape, np.int32)
    tokens = batch.input_ids.shape[1]
    mask[: part.rows, :tokens] = batch.attention_mask[part.start : part.end]
    arrays: list[Int32] = []
    for name in model.inputs:
        if name == "attention_mask":
            given = mask.copy()
            given[part.rows :, 0] = 1
        elif name == "input_ids":
            given = np.full(shape, model.pad_token, np.int32)
            given[: part.rows, :tokens] = batch.input_ids[part.start : part.end]
            given[mask == 0] = model.pad_token
        else:
            given = np.zeros(shape, np.int32)
            given[: part.rows, :tokens] = batch.token_type_ids[part.start : part.end]
        arrays.append(given)
    return arrays


def real_tokens(batch: Batch, parts: Sequence[BatchPart], model: CompiledModel) -> tuple[int, int]:
    """Tokens of the batch, and padded tokens of its runs."""
    return int(batch.attention_mask.sum()), sum(model.buckets[part.bucket].size for part in parts)
