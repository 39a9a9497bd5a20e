"""The published target of BERT behind FastAPI, on the measured curves that the benchmark wrote."""

from __future__ import annotations

import pytest

from benchmarks.fastapi_target import DOLLARS, is_reached, plan
from penstock_planner.compare import HardwareComparison, Sizing
from penstock_planner.evidence import Origin
from penstock_planner.offers import NODE_RESERVE
from penstock_planner.project import project


def planned(family: str) -> HardwareComparison:
    return plan(family, tuple(one for of, one in project().curves if of == family))


def test_distilbert_reaches_the_target() -> None:
    comparison = planned("distilbert")
    best = comparison.best

    assert is_reached(comparison)
    assert best is not None
    assert best.sizing is not None
    assert (best.offer.hardware_class, best.sizing.replicas_peak) == ("sapphirerapids", 1)
    assert best.sizing.reserved_per_month == pytest.approx(130.3, abs=0.1)
    assert best.sizing.p95_peak < 100


def test_bert_base_keeps_rate_and_latency_and_costs_eleven_dollars_more() -> None:
    best = planned("bert-base").best

    assert best is not None
    assert best.sizing is not None
    assert best.sizing.p95_peak < 100
    # Three replicas of one core, and one core for the system: the smallest such node is c7i.2xlarge.
    assert (best.sizing.replicas_peak, best.node and best.node.name, NODE_RESERVE) == (3, "c7i.2xlarge", 1)
    assert best.sizing.reserved_per_month == pytest.approx(260.6, abs=0.1)


@pytest.mark.parametrize(
    ("family", "hardware_class", "origin", "middle", "fast"),
    [
        ("distilbert", "sapphirerapids", Origin.MEASURED_BY_PROJECT, True, True),
        ("distilbert", "icelake", Origin.ESTIMATED, False, True),
        ("distilbert", "zen4-full-cores", Origin.ESTIMATED, False, True),
        ("distilbert", "graviton3", Origin.ESTIMATED, False, True),
        ("bert-base", "sapphirerapids", Origin.MEASURED_BY_PROJECT, False, False),
        ("bert-base", "icelake", Origin.ESTIMATED, False, True),
        ("bert-base", "zen4-full-cores", Origin.ESTIMATED, False, False),
        ("bert-base", "graviton3", Origin.ESTIMATED, False, False),
    ],
)
def test_what_is_measured_and_what_is_estimated_meets_the_target_as_documented(
    family: str, hardware_class: str, origin: Origin, middle: bool, fast: bool
) -> None:
    (row,) = [
        one
        for one in planned(family).rows
        if (one.offer.hardware_class, one.offer.cores, one.evidence and one.evidence.origin)
        == (hardware_class, 1, origin)
    ]

    def meets(sizing: Sizing | None) -> bool:
        assert sizing is not None
        return sizing.within_objective and sizing.p95_peak < 100 and sizing.reserved_per_month < DOLLARS

    assert (meets(row.sizing), meets(row.fast)) == (middle, fast)
