"""An engine for tests: a small attention network of random weights with a real paged cache, in numpy.

Each token is computed on its own, with the same operations whatever the chunk and the other rows, so its logits are the
same bits alone and with others. It checks what the scheduler gives it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock_runtime.rows import StepRow

WIDTH = 8
EMPTY = -1


class PagedEngine:
    """`StepEngine`. `owners` records which token is in each place of the cache."""

    def __init__(
        self, *, vocabulary: int = 40, context: int = 64, block_size: int = 4, blocks: int = 32, seed: int = 0
    ) -> None:
        self.vocabulary, self.context, self.block_size, self.blocks = vocabulary, context, block_size, blocks
        random = np.random.default_rng(seed)
        self._embedding = random.normal(size=(vocabulary, WIDTH))
        self._position = random.normal(size=(context, WIDTH)) * 0.5
        self._products = random.normal(size=(3, WIDTH, WIDTH))
        self._head = random.normal(size=(WIDTH, vocabulary)) * 2
        self._cache = np.zeros((2, blocks * block_size, WIDTH))
        self.tokens = np.full(blocks * block_size, EMPTY)
        self.steps: list[list[tuple[int, int]]] = []
        """Of each step: position and number of tokens of each row."""
        self.closed = False
        self.gate: threading.Semaphore | None = None
        """If set, each step waits for it."""
        self.fail: Exception | None = None

    def step(self, rows: Sequence[StepRow]) -> NDArray[np.float32]:
        assert not self.closed
        if self.gate is not None:
            assert self.gate.acquire(timeout=60)
        if self.fail is not None:
            raise self.fail
        self.steps.append([(row.position, len(row.tokens)) for row in rows])
        written: set[int] = set()
        logits = []
        for row in rows:
            end = row.position + len(row.tokens)
            assert len(row.blocks) == -(-end // self.block_size)
            assert len(set(row.blocks.tolist())) == len(row.blocks)
            assert end <= self.context
            places = (row.blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)[:end]
            for position, token in zip(range(row.position, end), row.tokens.tolist(), strict=True):
                assert int(places[position]) not in written, "two rows write to one place"
                written.add(int(places[position]))
                hidden = self._token(token, position, places)
                if end - position <= row.logits:
                    logits.append(hidden @ self._head)
        if not logits:
            return np.zeros((0, self.vocabulary), dtype=np.float32)
        return np.asarray(logits, dtype=np.float32)

    def _token(self, token: int, position: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        inputs = self._embedding[token] + self._position[position]
        query, key, value = (inputs @ product for product in self._products)
        place = places[position]
        self._cache[0, place], self._cache[1, place] = key, value
        self.tokens[place] = token
        keys, values = self._cache[0, places[: position + 1]], self._cache[1, places[: position + 1]]
        scores = keys @ query / WIDTH
        weights = np.exp(scores - scores.max())
        hidden: NDArray[np.float64] = inputs + weights @ values / weights.sum()
        return hidden

    def close(self) -> None:
        self.closed = True
