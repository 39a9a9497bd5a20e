"""Compares offers for a corpus of texts that are processed once: node-hours and cost, on demand and spot. Pure.

The rate is the highest that a replica completed; latency does not count. Rough figures are ranked at the slow end of
their interval, as in `compare`. The last node of a run ends with the others: work is divided among all replicas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.prices import currency_sign
from penstock_planner.compare import Node, Offer, counted
from penstock_planner.evidence import Evidence, as_json

DAY_HOURS = 24.0
HTTP_NOTE = "rates of a server over HTTP at its highest load; a request has one row"


@dataclass(frozen=True)
class CorpusRow:
    """One piece of evidence on one kind of node, for a corpus."""

    offer: Offer
    evidence: Evidence
    node: Node
    rows_per_second: float
    """Of one replica."""
    node_hours: float
    slow_node_hours: float
    """At the slow end of the interval."""

    @property
    def ranked_cost(self) -> float:
        """Of what is cheaper, spot or on demand; of rough figures at the slow end."""
        hours = self.slow_node_hours if self.evidence.is_rough else self.node_hours
        return hours * min(self.node.per_hour, self.node.spot_per_hour or math.inf)

    @property
    def on_demand(self) -> float:
        """Cost."""
        return self.node_hours * self.node.per_hour

    @property
    def spot(self) -> float | None:
        """Cost; None: there is no price."""
        return None if self.node.spot_per_hour is None else self.node_hours * self.node.spot_per_hour

    @property
    def nodes_for_a_day(self) -> int:
        """Nodes that are through within 24 hours, rough figures at the slow end."""
        return math.ceil((self.slow_node_hours if self.evidence.is_rough else self.node_hours) / DAY_HOURS)

    @property
    def name(self) -> str:
        """Class and cores."""
        return f"{self.offer.hardware_class}, {counted(self.offer.cores, 'core')}"


def corpus_rows(offers: Iterable[Offer], rows: int) -> tuple[CorpusRow, ...]:
    """The cheapest evidence and node of each offer that has figures, cheapest first; those that are for comparison
    only last."""
    found = []
    for offer in offers:
        of_offer = [
            _row(offer, evidence, node, rows, rate)
            for evidence in offer.evidence
            if (rate := max((point.completed_per_second for point in evidence.curve.points), default=0.0)) > 0
            for node in offer.nodes
        ]
        if of_offer:
            found.append(min(of_offer, key=lambda one: one.ranked_cost))
    return tuple(sorted(found, key=lambda one: (bool(one.offer.not_chosen), one.ranked_cost, one.name)))


def _row(offer: Offer, evidence: Evidence, node: Node, rows: int, rate: float) -> CorpusRow:
    hours = rows / rate / 3600 / node.replicas
    return CorpusRow(offer, evidence, node, rate, hours, hours / evidence.interval.low)


def _figure(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


CORPUS_HEADS = ("class", "cores", "rows/s", "node", "node-hours", "on demand", "spot", "nodes for a day", "figures")


def corpus_cells(row: CorpusRow, sign: str) -> tuple[str, ...]:
    """The cells of one row, in the order of `CORPUS_HEADS`."""
    slow = "" if math.isclose(row.node_hours, row.slow_node_hours) else f" (to {_figure(row.slow_node_hours)})"
    spot = "" if row.spot is None else f"{sign}{_figure(row.spot)}"
    return (
        row.offer.hardware_class, str(row.offer.cores), _figure(row.rows_per_second), row.node.name,
        f"{_figure(row.node_hours)}{slow}", f"{sign}{_figure(row.on_demand)}", spot, str(row.nodes_for_a_day),
        row.evidence.origin.value,
    )  # fmt: skip


def corpus_headline(found: Sequence[CorpusRow], rows: int, currency: str) -> str:
    """What is cheapest."""
    best = next((one for one in found if not one.offer.not_chosen), None)
    if best is None:
        return f"nothing is known that {rows:,} rows could be planned with: measure a class, or give --measurements"
    sign = currency_sign(currency)
    cost = best.on_demand if best.spot is None else min(best.on_demand, best.spot)
    kind = "on demand" if cost == best.on_demand else "spot"
    return (
        f"{best.name}, {best.evidence.plan} ({best.evidence.origin.value}): {rows:,} rows in "
        f"{_figure(best.node_hours)} hours of a {best.node.name}, {sign}{_figure(cost)} {kind}; "
        f"{counted(best.nodes_for_a_day, 'node')} for a day"
    )


def corpus_json(found: Sequence[CorpusRow], rows: int, notes: Sequence[str], currency: str) -> str:
    """All figures, as indented text."""
    value = {
        "rows_of_corpus": rows,
        "currency": currency,
        "notes": list(notes),
        "rows": [
            {
                "hardware_class": one.offer.hardware_class,
                "cores": one.offer.cores,
                "node": one.node.name,
                "rows_per_second": one.rows_per_second,
                "node_hours": one.node_hours,
                "node_hours_slow": one.slow_node_hours,
                "on_demand": one.on_demand,
                "spot": one.spot,
                "nodes_for_a_day": one.nodes_for_a_day,
                "for_comparison": one.offer.not_chosen,
                "evidence": as_json(one.evidence),
            }
            for one in found
        ],
    }
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
