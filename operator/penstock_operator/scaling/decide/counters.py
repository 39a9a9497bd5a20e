"""Samples of counters and gauges -> rates, for the operator that scrapes the pods itself.

As Prometheus counts, without its extrapolation to the ends of a window: increases between samples, a counter that went
down has been reset and counts from zero, and one sample makes no rate. Times are the samples' own, so that a late
scrape is no lower rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock_operator.scaling.decide.measurement import Idle, Measurement, Unknown, Value


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading of one pod's series."""

    at: float
    """Seconds since the epoch, by the clock of whoever scraped."""
    value: float


Series = Mapping[str, Sequence[Sample]]
"""Samples by pod, oldest first."""


def increase(samples: Sequence[Sample]) -> float:
    """How much a counter has grown over its samples, resets included."""
    total = 0.0
    for before, after in pairwise(samples):
        total += after.value if after.value < before.value else after.value - before.value
    return total


def within(samples: Sequence[Sample], window_seconds: float, now: float) -> list[Sample]:
    """The finite samples of the window, oldest first, each time once; samples of the future are left out."""
    kept: list[Sample] = []
    for sample in samples:
        fresh = now - window_seconds <= sample.at <= now
        if fresh and math.isfinite(sample.value) and (not kept or sample.at > kept[-1].at):
            kept.append(sample)
    return kept


def lately(series: Series, least_seconds: float, most_seconds: float, now: float) -> Series:
    """Of each pod the newest finite sample and the nearest one that is at least `least_seconds` older.

    Nothing older than `most_seconds`; both ends or only one of them, where there is no other. A window that holds two
    scrapes loses a rate with every scrape that is late; this reaches back for as far as it must and no further.
    """
    found: dict[str, list[Sample]] = {}
    for pod, samples in series.items():
        inside = within(samples, most_seconds, now)
        if inside:
            older = [at for at, sample in enumerate(inside) if inside[-1].at - sample.at >= least_seconds]
            found[pod] = inside[older[-1] if older else 0 :]
    return found


def span_seconds(series: Series) -> float:
    """The shortest time between the ends of a pod's samples; 0 where no pod has two."""
    return min((samples[-1].at - samples[0].at for samples in series.values() if len(samples) > 1), default=0.0)


def rate(series: Series, window_seconds: float, now: float) -> Measurement:
    """Requests/s over all pods; Idle when every counter stood still; Unknown when no pod has two samples."""
    total, counted, oldest = 0.0, 0, 0.0
    for samples in series.values():
        inside = within(samples, window_seconds, now)
        if len(inside) >= 2:
            total += increase(inside) / (inside[-1].at - inside[0].at)
            counted += 1
            oldest = max(oldest, now - inside[-1].at)
    if not counted:
        return Unknown(f"no pod was scraped twice within {window_seconds:.0f} s")
    return Value(total, oldest) if total > 0 else Idle()


def latest(series: Series, freshest_seconds: float, now: float) -> Measurement:
    """The sum of a gauge's newest values; Unknown when no pod has one that is fresh."""
    newest = [inside[-1] for samples in series.values() if (inside := within(samples, freshest_seconds, now))]
    if not newest:
        return Unknown(f"no pod was scraped within {freshest_seconds:.0f} s")
    return Value(sum(sample.value for sample in newest), now - min(sample.at for sample in newest))


def growth(series: Series, window_seconds: float, now: float) -> float:
    """By how much a gauge's sum changes in a second; a pod that has just come had nothing before. 0 without samples."""
    change, begin, end = 0.0, math.inf, -math.inf
    for samples in series.values():
        inside = within(samples, window_seconds, now)
        if inside:
            change += inside[-1].value - (inside[0].value if len(inside) > 1 else 0.0)
            begin, end = min(begin, inside[0].at), max(end, inside[-1].at)
    return change / (end - begin) if end > begin else 0.0


def coverage(series: Series, ready: Sequence[str], freshest_seconds: float, now: float) -> float:
    """Share of the ready pods with a fresh sample, 0 to 1; 1 when no pod is ready, for there is nothing to miss."""
    if not ready:
        return 1.0
    return sum(1 for pod in ready if within(series.get(pod, ()), freshest_seconds, now)) / len(ready)
