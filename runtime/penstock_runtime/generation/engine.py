"""The interface between the scheduler of text generation and an engine that computes the next tokens' logits.

An engine owns the weights, the threads and the pool of cache blocks; the scheduler owns the sequences and decides which
blocks of the pool each sequence uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 32
"""Tokens in a block of the cache, in every engine: the only size that OpenVINO's CPU plugin has."""


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one sequence that one step computes.

    tokens: int32 [n], n >= 1: one while decoding, a chunk of the prompt before that.
    position: the number of tokens of the sequence that the cache holds already.
    blocks: int32 [ceil((position + n) / block_size)], the blocks of the pool that hold the sequence, in order.
    logits: how many of the row's last tokens need logits (0 for a chunk inside a prompt, 1 usually, n for the guard).
    """

    tokens: NDArray[np.int32]
    position: int
    blocks: NDArray[np.int32]
    logits: int


class StepEngine(Protocol):
    """Computes steps of generation. Called by one thread at a time."""

    @property
    def vocabulary(self) -> int:
        """The number of logits for each token."""
        ...

    @property
    def context(self) -> int:
        """The largest number of tokens of a sequence."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block of the cache."""
        ...

    @property
    def blocks(self) -> int:
        """Blocks in the pool."""
        ...

    def step(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Compute one step. Returns float32 [sum of row.logits, vocabulary], in the order of the rows."""
        ...

    def close(self) -> None:
        """Release the weights and the pool."""
        ...
