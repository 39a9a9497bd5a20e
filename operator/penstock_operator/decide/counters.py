"""Rates from samples of counters and gauges, for pods that the operator scrapes itself. Pure.

Rates are calculated as Prometheus does, without its extrapolation to the ends of a window: from the increases between
samples, where a counter that went down was reset and counts from zero. One sample gives no rate. Times are those of the
samples, so that a late scrape does not lower a rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock_operator.decide.measurement import Idle, Measurement, Unknown, Value


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one pod's series."""

    at: float
    """Seconds since the epoch, by the scraping process' clock."""
    value: float


Series = Mapping[str, Sequence[Sample]]
"""Samples by pod, oldest first."""


def increase(samples: Sequence[Sample]) -> float:
    """Increase of a counter over its samples, resets taken into account."""
    total = 0.0
    for before, after in pairwise(samples):
        total += after.value if after.value < before.value else after.value - before.value
    return total


def within(samples: Sequence[Sample], window_seconds: float, now: float) -> list[Sample]:
    """The finite samples of the window, oldest first, one for each time; samples in the future are left out."""
    kept: list[Sample] = []
    for sample in samples:
        fresh = now - window_seconds <= sample.at <= now
        if fresh and math.isfinite(sample.value) and (not kept or sample.at > kept[-1].at):
            kept.append(sample)
    return kept


def lately(series: Series, least_seconds: float, most_seconds: float, now: float) -> Series:
    """For each pod the samples from the newest finite one back to the first that is at least `least_seconds` older.

    None is older than `most_seconds`. A fixed window for two scrapes would lose the rate whenever a scrape is late;
    this one reaches back as far as needed.
    """
    found: dict[str, list[Sample]] = {}
    for pod, samples in series.items():
        inside = within(samples, most_seconds, now)
        if inside:
            older = [at for at, sample in enumerate(inside) if inside[-1].at - sample.at >= least_seconds]
            found[pod] = inside[older[-1] if older else 0 :]
    return found


def span_seconds(series: Series) -> float:
    """The shortest time between the first and last sample of a pod; 0 if no pod has two."""
    return min((samples[-1].at - samples[0].at for samples in series.values() if len(samples) > 1), default=0.0)


def rate(series: Series, window_seconds: float, now: float) -> Measurement:
    """Requests/s over all pods; Idle if no counter changed; Unknown if no pod has two samples."""
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
    """The sum of a gauge's newest values; Unknown if no pod has a fresh one."""
    newest = [inside[-1] for samples in series.values() if (inside := within(samples, freshest_seconds, now))]
    if not newest:
        return Unknown(f"no pod was scraped within {freshest_seconds:.0f} s")
    return Value(sum(sample.value for sample in newest), now - min(sample.at for sample in newest))


def growth(series: Series, window_seconds: float, now: float) -> float:
    """Change of a gauge's sum per second, where a new pod started at 0. 0 without samples."""
    change, begin, end = 0.0, math.inf, -math.inf
    for samples in series.values():
        inside = within(samples, window_seconds, now)
        if inside:
            change += inside[-1].value - (inside[0].value if len(inside) > 1 else 0.0)
            begin, end = min(begin, inside[0].at), max(end, inside[-1].at)
    return change / (end - begin) if end > begin else 0.0


def coverage(series: Series, ready: Sequence[str], freshest_seconds: float, now: float) -> float:
    """Share of the ready pods with a fresh sample, 0 to 1; 1 when no pod is ready."""
    if not ready:
        return 1.0
    return sum(1 for pod in ready if within(series.get(pod, ()), freshest_seconds, now)) / len(ready)
