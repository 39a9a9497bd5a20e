"""Speed of one class of processors against another, and how exact it is.

Between two classes that the project has measured, the ratio is the measured one. Otherwise it is between the ratios of
the int8 and of the fp32 arithmetic of a core. `leave_one_out` compares both with the measurements in `project.yaml`:
the errors give the width of the interval, with a floor of `LEAST_WIDTH` until more classes are measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock_planner.evidence import Interval

LEAST_WIDTH = 0.35
"""A figure of another class is taken to be off by up to this share at least: three processors and one encoder are
measured, which is too few for a narrower interval, however well they agree."""
NEAR = 4.0
"""Loads with a mean length up to this factor from the endpoint's count: short texts are limited by HTTP, long ones by
products and attention."""


@dataclass(frozen=True)
class CorePeak:
    """Arithmetic of one physical core."""

    int8: float
    """8-bit multiply-accumulates in a cycle."""
    fp32: float
    """fp32 multiply-accumulates in a cycle."""
    gigahertz: float
    """Sustained, of the cloud's instances."""

    def ratio_to(self, other: CorePeak) -> Interval:
        """Speed against another processor: between the ratios of their int8 and of their fp32 arithmetic, times the
        ratio of their clocks (the roofline model, Williams et al., 2009, for work that is limited by arithmetic)."""
        clock = self.gigahertz / other.gigahertz
        ratios = sorted((self.int8 / other.int8 * clock, self.fp32 / other.fp32 * clock))
        return Interval(ratios[0], ratios[1])


CORE_PEAKS = {
    "cascadelake": CorePeak(128, 32, 3.1),
    "icelake": CorePeak(128, 32, 3.2),
    "sapphirerapids": CorePeak(1024, 32, 3.0),
    "graniterapids": CorePeak(1024, 32, 3.2),
    "zen4": CorePeak(64, 16, 3.5),
    "zen5": CorePeak(128, 32, 4.0),
    "graviton3": CorePeak(128, 16, 2.6),
    "graviton4": CorePeak(128, 16, 2.8),
}
"""From the optimisation guides of Intel, AMD and Arm: width and number of the dot-product and FMA pipes, and AMX."""


def processor_of(hardware_class: str) -> str:
    """The processor of a class: `zen4` and `zen4-full-cores` have the same one."""
    return hardware_class.removesuffix("-full-cores")


@dataclass(frozen=True)
class LoadRates:
    """Requests/s of one load on several processors, measured with the same command and number of cores."""

    name: str
    """Such as `16 clients, 128 tokens`."""
    tokens: int
    """Mean length of the texts."""
    per_second: Mapping[str, float]
    """By processor."""

    def ratio(self, target: str, source: str) -> float | None:
        """Speed of one processor against another; None unless both were measured."""
        if target not in self.per_second or source not in self.per_second:
            return None
        return self.per_second[target] / self.per_second[source]


@dataclass(frozen=True)
class ClassRatio:
    """Speed of a class against another one."""

    middle: float
    """The geometric mean."""
    interval: Interval
    """As factors of the middle."""
    basis: str

    @property
    def low(self) -> float:
        """The slowest."""
        return self.middle * self.interval.low

    @property
    def high(self) -> float:
        """The fastest."""
        return self.middle * self.interval.high

    def outside(self, ratio: float) -> float:
        """The factor by which a measured ratio is outside it; 1 within."""
        return max(1.0, self.low / ratio, ratio / self.high)


def class_ratio(target: str, source: str, tokens: int, loads: Sequence[LoadRates]) -> ClassRatio | None:
    """Speed of the class `target` against the class `source` for texts of this mean length; None if it is not known.

    Measured where the project has measured both; else by arithmetic. Either is wider by its largest error in the
    measured pairs (`measured_error`, `arithmetic_error`).
    """
    ours, theirs = processor_of(target), processor_of(source)
    if ours == theirs:
        return ClassRatio(1.0, _floored(1.0, 1.0, 1.0), f"the same processor as {source}")
    near = _near(loads, tokens)
    found = _of_measured(_ratios(near, ours, theirs), measured_error(near))
    return found or _of_arithmetic(ours, theirs, arithmetic_error(near))


def _near(loads: Iterable[LoadRates], tokens: int) -> list[LoadRates]:
    return [load for load in loads if tokens / NEAR <= load.tokens <= tokens * NEAR]


def _ratios(loads: Iterable[LoadRates], target: str, source: str) -> list[float]:
    return [ratio for load in loads if (ratio := load.ratio(target, source)) is not None]


def _of_measured(ratios: Sequence[float], error: float = 1.0) -> ClassRatio | None:
    if not ratios:
        return None
    middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
    interval = _floored(middle, min(ratios) / error, max(ratios) * error)
    return ClassRatio(middle, interval, f"{min(ratios):.2g} to {max(ratios):.2g} times as fast in the project's tables")


def _of_arithmetic(target: str, source: str, error: float) -> ClassRatio | None:
    if target not in CORE_PEAKS or source not in CORE_PEAKS:
        return None
    ratio = CORE_PEAKS[target].ratio_to(CORE_PEAKS[source])
    middle = math.sqrt(ratio.low * ratio.high)
    interval = _floored(middle, ratio.low / error, ratio.high * error)
    span = f"{ratio.low:.2g}" if math.isclose(ratio.low, ratio.high) else f"{ratio.low:.2g} to {ratio.high:.2g}"
    return ClassRatio(middle, interval, f"{span} times as fast by the int8 and fp32 arithmetic of a core")


def _floored(middle: float, low: float, high: float) -> Interval:
    return Interval(min(low / middle, 1 - LEAST_WIDTH), max(high / middle, 1 + LEAST_WIDTH))


def arithmetic_error(loads: Iterable[LoadRates], *, without: str = "") -> float:
    """The largest factor, at least 1, by which a measured ratio is outside the range of the arithmetic, over all pairs
    of processors and loads; `without` one processor."""
    worst = 1.0
    for load in loads:
        for target, source in _pairs(load):
            if without not in {target, source}:
                ratio, range_ = load.per_second[target] / load.per_second[source], _peaks(target, source)
                worst = max(worst, range_.low / ratio, ratio / range_.high)
    return worst


def measured_error(loads: Sequence[LoadRates]) -> float:
    """The largest factor, at least 1, by which a measured ratio is outside the interval of the other loads of the same
    processors."""
    return max((one.tables.outside(one.measured) for one in _left_out(loads, loads) if one.tables), default=1.0)


def _pairs(load: LoadRates) -> list[tuple[str, str]]:
    known = [name for name in load.per_second if name in CORE_PEAKS]
    return [(target, source) for target in known for source in known if target != source]


def _peaks(target: str, source: str) -> Interval:
    return CORE_PEAKS[target].ratio_to(CORE_PEAKS[source])


@dataclass(frozen=True)
class LeftOut:
    """A measured ratio, and what is predicted from the measurements without it."""

    target: str
    source: str
    load: LoadRates
    measured: float
    arithmetic: ClassRatio
    """As for a class that was never measured: no measurement of the target has a part in it."""
    tables: ClassRatio | None
    """From the other loads of both processors; None without any."""


def leave_one_out(loads: Sequence[LoadRates]) -> tuple[LeftOut, ...]:
    """Each ordered pair of measured processors with each load, left out in turn (Stone, 1974)."""
    return tuple(one for load in loads for one in _left_out([load], _near(loads, load.tokens)))


def _left_out(left_out: Iterable[LoadRates], near: Sequence[LoadRates]) -> list[LeftOut]:
    found = []
    for load in left_out:
        for target, source in _pairs(load):
            arithmetic = _of_arithmetic(target, source, arithmetic_error(near, without=target))
            assert arithmetic is not None  # noqa: S101 - `_pairs` has processors of CORE_PEAKS only
            rest = _ratios([one for one in near if one is not load], target, source)
            measured = load.per_second[target] / load.per_second[source]
            found.append(LeftOut(target, source, load, measured, arithmetic, _of_measured(rest)))
    return found
