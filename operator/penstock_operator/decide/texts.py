"""How the capacity follows from the length of the texts that come. Pure.

The curve was measured with texts of the workload. A request with other texts takes another time: the factor is the
ratio of the times of one run, which the optimisation measured for several lengths. Replicas are then those of the
measured curve with every duration multiplied by it (`CapacityCurve.faster`).

Only the mean length is observed. The time of a run is nearly linear in the tokens, so that the time at the mean is
nearly the mean of the times; the error is the same for the workload and cancels where the lengths vary alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_operator.decide.measurement import Measurement, Value

SHORTEST, LONGEST = 0.1, 8.0
"""Limits of the factor: one odd reading must neither end a fleet nor ask for one."""
AROUND_MILLISECONDS = 0.3
"""Of each request, before and after its run (HTTP, tokenising, answer): docs/reference/figures.md."""


@dataclass(frozen=True)
class MeasuredTexts:
    """The texts that a curve was measured with, and the time of texts of other lengths."""

    tokens: float
    """Computed for a request, mean."""
    lengths: tuple[float, ...]
    """In tokens, rising; at least two."""
    milliseconds: tuple[float, ...]
    """Of one run of one text of each length."""

    @classmethod
    def of(cls, tokens: float | None, times: Sequence[tuple[float, float]]) -> MeasuredTexts | None:
        """From pairs of tokens and milliseconds; None where these do not show how the time depends on the length."""
        rising = sorted(dict(times).items())
        if tokens is None or len(rising) < 2 or any(time <= 0 for _, time in rising):
            return None
        return cls(tokens, tuple(length for length, _ in rising), tuple(time for _, time in rising))

    def factor(self, observed: Measurement) -> float | None:
        """How many times as long a request takes as one of the measured workload; None: its tokens are not known."""
        if not isinstance(observed, Value) or observed.value <= 0:
            return None
        factor = self._time(observed.value) / self._time(self.tokens)
        return min(max(factor, SHORTEST), LONGEST)

    def _time(self, tokens: float) -> float:
        """Milliseconds of a request: linear between the measured lengths, the first time below them, and beyond them
        with the slope of the last two. Several texts of one request count as one that is as long as all of them."""
        lengths, times = self.lengths, self.milliseconds
        if tokens <= lengths[0]:
            return times[0] + AROUND_MILLISECONDS
        last = next((index for index in range(1, len(lengths)) if tokens <= lengths[index]), len(lengths) - 1)
        slope = (times[last] - times[last - 1]) / (lengths[last] - lengths[last - 1])
        return max(times[last - 1] + slope * (tokens - lengths[last - 1]), times[0]) + AROUND_MILLISECONDS
