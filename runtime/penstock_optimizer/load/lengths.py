"""The length mix: how many tokens the requests of a workload have.

Without a stated workload: log-normal with a median of 44 tokens and a 95th percentile near 187, which is what short
texts in production look like (questions, sentences, product titles; a tail of paragraphs).
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from penstock.resources.endpoint import Workload

DEFAULT_MEDIAN_TOKENS = 44
DEFAULT_SIGMA = 0.88
"""Standard deviation of the logarithm: puts the 95th percentile at 187 tokens, the mean at 64."""
STANDARD_LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)
"""The lengths of the published tables: latency is measured at these."""


@dataclass(frozen=True)
class LengthMix:
    """A distribution of lengths in tokens, special tokens included, within [minimum, maximum]."""

    maximum: int
    """The model's own limit."""
    lengths: tuple[int, ...] = ()
    """Each as likely as it is listed; empty: log-normal."""
    minimum: int = 3

    @classmethod
    def of(cls, workload: Workload, *, maximum: int) -> LengthMix:
        """The mix that an endpoint states, capped by what its model can take."""
        return cls(maximum=maximum, lengths=workload.sequence_lengths)

    def sample(self, count: int, *, seed: int) -> list[int]:
        """`count` lengths in random order, stratified: the quantiles of the sample are those of the distribution.

        Two samples of one size differ in order only, so that repeated measurements compare like with like.
        """
        if self.lengths:
            listed = sorted(self.lengths)
            drawn = [float(listed[index * len(listed) // count]) for index in range(count)]
        else:
            normal = statistics.NormalDist()
            drawn = [
                DEFAULT_MEDIAN_TOKENS * math.exp(DEFAULT_SIGMA * normal.inv_cdf((index + 0.5) / count))
                for index in range(count)
            ]
        lengths = [max(min(round(value), self.maximum), min(self.minimum, self.maximum)) for value in drawn]
        random.Random(seed).shuffle(lengths)  # noqa: S311 - reproducible, not secret
        return lengths

    @property
    def summary(self) -> str:
        """One line for the report, such as `median 44 tokens, p95 187`."""
        sample = sorted(self.sample(1000, seed=0))
        return f"median {sample[500]} tokens, p95 {sample[950]}, longest {sample[-1]}"


def measured_lengths(maximum: int, mix: LengthMix | None = None) -> tuple[int, ...]:
    """The lengths to measure latency at: the standard ones that the model can take, and the stated ones.

    At most four stated lengths are added, so that a long list does not eat the time budget.
    """
    lengths = {length for length in STANDARD_LENGTHS if length <= maximum} or {maximum}
    if mix is not None and mix.lengths:
        stated = sorted({min(length, maximum) for length in mix.lengths} - lengths)
        step = max(1, len(stated) // 4)
        lengths.update(stated[::step][:4])
    return tuple(sorted(lengths))
