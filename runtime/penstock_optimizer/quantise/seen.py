"""What calibration saw of an activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock_runtime.rows import Float


@dataclass(frozen=True, eq=False)
class Seen:
    """One activation over the calibration texts, by channel (its last axis). Each text counts the same."""

    low: Float
    """[channels]: the smallest value."""
    high: Float
    """[channels]: the largest value."""
    mean: Float
    """[channels]"""
    samples: Float
    """[n, channels]: some tokens of each text, scaled so that `samples.T @ samples` is a sum of means over texts."""

    @property
    def magnitude(self) -> Float:
        """[channels]: the largest absolute value."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


class Watch:
    """Collects `Seen` text by text. `tokens` is about how many samples there will be at most, over `texts` texts."""

    def __init__(self, *, texts: int, tokens: int) -> None:
        self._most = max(1, tokens // max(texts, 1))
        self._low: list[Float] = []
        self._high: list[Float] = []
        self._mean: list[Float] = []
        self._samples: list[Float] = []

    def add(self, values: Float) -> None:
        """One text's activation, float32 [..., channels]."""
        flat = values.reshape(-1, values.shape[-1])
        self._low.append(flat.min(axis=0))
        self._high.append(flat.max(axis=0))
        self._mean.append(flat.mean(axis=0))
        count = min(len(flat), self._most)
        # Evenly from the first token to the last: special tokens, which stand there, reach the largest values.
        picked = flat[np.linspace(0, len(flat) - 1, count).round().astype(int)]
        self._samples.append(picked / np.float32(np.sqrt(count)))

    def seen(self) -> Seen:
        """The summary. At least one text must have been added."""
        return Seen(
            low=np.min(self._low, axis=0),
            high=np.max(self._high, axis=0),
            mean=np.mean(self._mean, axis=0, dtype=np.float32),
            samples=np.concatenate(self._samples),
        )


def together(several: Sequence[Seen]) -> Seen:
    """Several activations that meet the same weight, as one."""
    return Seen(
        low=np.min([one.low for one in several], axis=0),
        high=np.max([one.high for one in several], axis=0),
        mean=np.mean([one.mean for one in several], axis=0, dtype=np.float32),
        samples=np.concatenate([one.samples for one in several]),
    )
