"""Compares offers for a load: p95, replicas, cost, and why each offer that is not chosen lost. Pure.

Replicas at the mean and at the peak are what the autoscaler computes for a steady load, from the same capacity
model and headroom. Two costs are given:

    reserved   whole nodes for the replicas of the peak, all month
    used       the share of nodes that the replicas of the mean load take, as an autoscaled endpoint on shared nodes

Every figure has an interval, from the interval of its evidence. Measured offers are judged as measured, rough ones
(published, estimated, or off by a quarter or more) at the slow end of their interval: an estimate is chosen only if it
is cheapest even when it is wrong by as much as it may be. One that is cheapest in the middle of its interval only is
likely, with the command whose measurement would decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from penstock.prices.pod_costs import per_million, per_month
from penstock_operator.decide import Service, replicas_for_load
from penstock_planner.evidence import Evidence


def counted(number: int | str, noun: str) -> str:
    """Such as `1 core` and `2 cores`."""
    return f"{number} {noun}{'' if str(number) == '1' else 's'}"


@dataclass(frozen=True)
class Load:
    """The load of the endpoint."""

    mean: float
    """Requests per second, on average over a month; over 0."""
    peak: float
    """The highest rate that lasts; at least the mean."""
    p95_milliseconds: float
    headroom: float = 0.75
    """`spec.scaling.headroom`."""
    most_replicas: int | None = None
    """`spec.scaling.maxReplicas`, if it limits the plan."""
    least_replicas: int = 1
    pooled: bool = False
    """Requests go through a gateway to the least busy replica."""


@dataclass(frozen=True)
class Node:
    """A node that replicas are bought on."""

    name: str
    """Instance type; `a core` where a class has a price for each core."""
    per_hour: float
    replicas: int
    """Replicas of the offer that fit on one."""
    is_share: bool = False
    """The price is of a replica, not of a node: nodes are shared with other workloads."""
    spot_per_hour: float | None = None
    """The price of a spot node; None: not known."""
    committed_per_hour: float | None = None
    """The price with a commitment; None: not known."""

    def reserved_per_hour(self, replicas: int) -> float:
        """Whole nodes for this many replicas."""
        return math.ceil(replicas / self.replicas) * self.per_hour

    def used_per_hour(self, replicas: float) -> float:
        """The share of nodes that they take."""
        return replicas / self.replicas * self.per_hour


@dataclass(frozen=True)
class Offer:
    """A hardware class with a number of cores: the evidence for it, and the nodes to buy it on."""

    hardware_class: str
    cores: int
    evidence: tuple[Evidence, ...] = ()
    nodes: tuple[Node, ...] = ()
    problem: str = ""
    """Why it cannot be judged, such as a missing price."""
    remedy: str = ""
    caveats: tuple[str, ...] = ()
    not_chosen: str = ""
    """Why it is only shown for comparison, such as a GPU, which Penstock has no runtime for."""


@dataclass(frozen=True)
class Sizing:
    """One piece of evidence on one kind of node at one speed within its interval."""

    replicas_mean: int
    replicas_peak: int
    p95_mean: float
    p95_peak: float
    reserved_per_month: float
    used_per_month: float
    reserved_per_million: float
    used_per_million: float
    capacity: float
    """Requests/s of one replica within the objective."""
    within_objective: bool


@dataclass(frozen=True)
class OfferRow:
    """One offer in the comparison."""

    offer: Offer
    evidence: Evidence | None = None
    node: Node | None = None
    sizing: Sizing | None = None
    slow: Sizing | None = None
    """At the slow end of the interval."""
    fast: Sizing | None = None
    is_feasible: bool = False
    is_likely: bool = False
    """Not chosen, and cheaper than the chosen one in the middle of its interval."""
    why: str = ""
    """Why it is chosen, or why it lost."""

    @property
    def ranked(self) -> Sizing | None:
        """The judged figures: the slow end of an estimate or a publication, a measurement itself."""
        return self.slow if self.is_rough else self.sizing

    @property
    def is_rough(self) -> bool:
        """Whether it is judged at the slow end of its interval."""
        return self.evidence is not None and self.evidence.is_rough

    @property
    def name(self) -> str:
        """Class and cores, such as `icelake, 2 cores`."""
        return f"{self.offer.hardware_class}, {counted(self.offer.cores, 'core')}"


@dataclass(frozen=True)
class Traced:
    """A row under a trace of requests, by the simulator of the autoscaler."""

    row: OfferRow
    late_share: float
    """Of requests: answered after the objective, or not at all."""
    replica_hours: float
    hours: float
    """Of the trace."""
    by_hour: tuple[float, ...]
    """Mean replicas in each hour."""
    most_replicas: int

    def per_month(self, per_hour: float | None) -> float | None:
        """The cost of a month of such days, of the share of nodes that the replicas take."""
        node = self.row.node
        if per_hour is None or node is None:
            return None
        return per_month(per_hour / node.replicas * self.replica_hours / self.hours)

    @property
    def costs(self) -> dict[str, float | None]:
        """Of a month, by kind of price: on demand and spot for the replicas of each hour, with a commitment for whole
        nodes of the most replicas all month; None where there is no price."""
        node = self.row.node
        committed = node.committed_per_hour if node is not None else None
        whole = math.ceil(self.most_replicas / node.replicas) if node is not None else 0
        return {
            "on_demand": self.per_month(node.per_hour if node is not None else None),
            "spot": self.per_month(node.spot_per_hour if node is not None else None),
            "reserved": None if committed is None else per_month(committed * whole),
        }


@dataclass(frozen=True)
class HardwareComparison:
    """All offers: the chosen one, the likely one, then by cost."""

    load: Load
    rows: tuple[OfferRow, ...]
    nearest: str = ""
    """What would be feasible, where nothing is."""
    notes: tuple[str, ...] = field(default=())
    currency: str = "USD"
    """Of all costs."""
    measure: str = "penstock optimize FILE"
    """The command that measures a class, on a node of it."""
    traced: tuple[Traced, ...] = ()
    """Rows under the trace of `--trace`."""

    @property
    def best(self) -> OfferRow | None:
        """The chosen one; None when nothing meets the objective."""
        return _best(self.rows)

    @property
    def likely(self) -> OfferRow | None:
        """A rough one that is cheaper than the chosen one in the middle of its interval, and not at its slow end."""
        return next((row for row in self.rows if row.is_likely), None)


def compare(
    offers: Iterable[Offer],
    load: Load,
    *,
    notes: Sequence[str] = (),
    currency: str = "USD",
    measure: str = "penstock optimize FILE",
) -> HardwareComparison:
    """The comparison. ValueError for a load without requests, or with a peak under its mean."""
    if not (load.mean > 0 and load.peak >= load.mean and load.p95_milliseconds > 0):
        raise ValueError("the mean must be over 0, the peak at least the mean, and the p95 over 0")
    candidates = [_candidates(offer, load) for offer in offers]
    rows = sorted((min(of_offer, key=_order) for of_offer in candidates), key=_order)
    best = _best(rows)
    likely = _likely([row for of_offer in candidates for row in of_offer], best, load)
    first = [row for row in (best, likely) if row is not None]
    rest = [row for row in rows if all(row.offer is not one.offer for one in first)]
    explained = tuple(
        replace(row, is_likely=row is likely, why=_settled_by(row, measure) if row is likely else _why(row, best, load))
        for row in (*first, *rest)
    )
    nearest = "" if best else _nearest(explained, load)
    return HardwareComparison(load, explained, nearest, tuple(notes), currency, measure)


def _best(rows: Iterable[OfferRow]) -> OfferRow | None:
    return next((row for row in rows if row.is_feasible and not row.offer.not_chosen and not row.is_likely), None)


def _likely(rows: Iterable[OfferRow], best: OfferRow | None, load: Load) -> OfferRow | None:
    """The cheapest in the middle of its interval, if it is rough and cheaper than the best one there."""
    limit = math.inf if best is None or best.sizing is None else 0.995 * best.sizing.reserved_per_month
    able = [
        (row.sizing.reserved_per_month, row.sizing.used_per_month, row.sizing.p95_peak, row.name, row)
        for row in rows
        if row.sizing is not None and row.is_rough and not row.offer.not_chosen
        and (best is None or row.offer is not best.offer)
        and _feasible(row.sizing, load) and row.sizing.reserved_per_month < limit
    ]  # fmt: skip
    return min(able, key=lambda one: one[:4])[4] if able else None


def _settled_by(row: OfferRow, measure: str) -> str:
    place = row.offer.hardware_class if row.node is None or row.node.is_share else row.node.name
    cores = counted(row.offer.cores, "core")
    return f"likely: cheapest in the middle of its interval only. To decide: {measure}, on {place}, {cores}"


def size(evidence: Evidence, node: Node, load: Load, *, speed: float = 1.0) -> Sizing | None:
    """Replicas, p95 and cost for a load on one kind of node; None when the curve has no rate that is kept up with."""
    service = Service.from_curve(
        evidence.curve.faster(speed), p95_objective_milliseconds=load.p95_milliseconds, pooled=load.pooled
    )
    if service is None:
        return None
    mean = max(replicas_for_load(service, load.mean, load.headroom), load.least_replicas, 1)
    peak = max(replicas_for_load(service, load.peak, load.headroom), mean)
    reserved, used = node.reserved_per_hour(peak), node.used_per_hour(mean)
    return Sizing(
        replicas_mean=mean,
        replicas_peak=peak,
        p95_mean=service.p95_of(load.mean, mean),
        p95_peak=service.p95_of(load.peak, peak),
        reserved_per_month=per_month(reserved),
        used_per_month=per_month(used),
        reserved_per_million=per_million(reserved, load.mean),
        used_per_million=per_million(used, load.mean),
        capacity=service.rate,
        within_objective=service.within_objective,
    )


def _feasible(sizing: Sizing | None, load: Load) -> bool:
    if sizing is None or not sizing.within_objective:
        return False
    late = max(sizing.p95_mean, sizing.p95_peak) > load.p95_milliseconds
    return not late and (load.most_replicas is None or sizing.replicas_peak <= load.most_replicas)


def _candidates(offer: Offer, load: Load) -> list[OfferRow]:
    """A row for each evidence and node of an offer that can be sized; one without figures if there is none."""
    found = []
    for evidence in offer.evidence:
        for node in offer.nodes:
            sizing = size(evidence, node, load)
            if sizing is None:
                continue
            slow = size(evidence, node, load, speed=evidence.interval.low)
            fast = size(evidence, node, load, speed=evidence.interval.high)
            row = OfferRow(offer, evidence, node, sizing, slow, fast)
            found.append(replace(row, is_feasible=_feasible(row.ranked, load)))
    return found or [OfferRow(offer)]


def _order(row: OfferRow) -> tuple[float, ...]:
    sizing, ranked = row.sizing, row.ranked
    if sizing is None or ranked is None:
        return (2, 0, 0)
    if row.is_feasible:
        return (0, ranked.reserved_per_month, ranked.used_per_month, sizing.p95_peak)
    return (1, sizing.p95_mean, sizing.reserved_per_month)


def _why(row: OfferRow, best: OfferRow | None, load: Load) -> str:
    sizing = row.sizing
    if sizing is None:
        if row.offer.problem:
            return f"{row.offer.problem}. {row.offer.remedy}" if row.offer.remedy else row.offer.problem
        return "no rate was measured that a replica keeps up with. Optimise again with more time"
    if best is not None and row.offer is best.offer:
        return "cheapest within the objective" + (", even at the slow end of its interval" if row.is_rough else "")
    judged = row.ranked or sizing
    if not judged.within_objective or max(judged.p95_mean, judged.p95_peak) > load.p95_milliseconds:
        if judged is not sizing and sizing.within_objective:
            return f"{_origin(row)}: may miss the p95 of {load.p95_milliseconds:g} ms; measure it on this class"
        origin = f" ({_origin(row)})" if row.is_rough else ""
        return (
            f"misses the p95: {sizing.p95_mean:.3g} ms at the mean load{origin}, {load.p95_milliseconds:g} ms allowed"
        )
    if load.most_replicas is not None and judged.replicas_peak > load.most_replicas:
        return f"needs {judged.replicas_peak} replicas at the peak, scaling.maxReplicas is {load.most_replicas}"
    if row.offer.not_chosen:
        return f"for comparison: {row.offer.not_chosen}"
    if best is None or best.sizing is None:
        return ""
    return _dearer(row, sizing, best, best.sizing)


def _dearer(row: OfferRow, sizing: Sizing, best: OfferRow, chosen: Sizing) -> str:
    fast = row.fast or sizing
    if sizing.reserved_per_month > chosen.reserved_per_month * 1.005:
        times = sizing.reserved_per_month / chosen.reserved_per_month
        more = f"costs {times:.2f} times as much" if times < 10 else f"costs {times:.0f} times as much"
        if fast.reserved_per_month < chosen.reserved_per_month:
            return f"{more}, and is {_origin(row)}: at the fast end of its interval it would be cheaper; measure it"
        return more
    if row.evidence is not None and sizing.reserved_per_month < chosen.reserved_per_month * 0.995:
        return f"looks cheaper, and is {_origin(row)}: not at the slow end of its interval; measure it"
    if sizing.used_per_month > chosen.used_per_month * 1.005:
        return f"same reserved cost, used cost {sizing.used_per_month / chosen.used_per_month:.2f} times as high"
    return f"same cost as {best.name}"


def _origin(row: OfferRow) -> str:
    return row.evidence.origin.value if row.evidence is not None else "unknown"


def _nearest(rows: Sequence[OfferRow], load: Load) -> str:
    """The nearest feasible objective: a later p95, or more replicas."""
    judged = [
        row
        for row in rows
        if row.sizing is not None and row.evidence is not None and row.node is not None and not row.offer.not_chosen
    ]
    if not judged:
        return "nothing can be judged: measure a class (penstock optimize), or give --measurements and --prices"
    limited = [row for row in judged if row.sizing and row.sizing.within_objective and load.most_replicas is not None]
    in_time = [row for row in limited if row.sizing and row.sizing.p95_peak <= load.p95_milliseconds]
    if in_time:
        row = min(in_time, key=lambda one: one.sizing.replicas_peak if one.sizing else 0)
        assert row.sizing is not None  # noqa: S101 - of those above
        return (
            f"nearest: {row.name} with scaling.maxReplicas {row.sizing.replicas_peak}, "
            f"{row.sizing.reserved_per_month:,.0f} a month reserved"
        )
    return _later(judged, load)


def _later(rows: Sequence[OfferRow], load: Load) -> str:
    """The earliest p95 that any offer keeps at this load."""
    found: list[tuple[float, float, OfferRow]] = []
    for row in rows:
        assert row.evidence is not None and row.node is not None  # noqa: S101, PT018 - of the judged rows
        speed = row.evidence.interval.low if row.is_rough else 1.0
        p95s = sorted({point.p95_milliseconds / speed for point in row.evidence.curve.points})
        for p95 in p95s:
            # A little over the measured value, as a whole number of milliseconds above 10.
            asked = math.ceil(p95) if p95 > 10 else math.ceil(p95 * 10) / 10
            if asked <= load.p95_milliseconds:
                continue
            changed = replace(load, p95_milliseconds=asked)
            sizing = size(row.evidence, row.node, changed, speed=speed)
            if sizing is not None and _feasible(sizing, changed):
                found.append((asked, sizing.reserved_per_month, row))
                break
    if not found:
        return "no offer keeps up with this load at any p95 within its replicas"
    asked, cost, row = min(found, key=lambda one: (one[0], one[1]))
    return f"nearest: {row.name} with a p95 of {asked:g} ms, {cost:,.0f} a month reserved"
