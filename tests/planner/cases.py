"""Small endpoints and offers for the tests: a replica takes 80 requests/s within 50 ms."""

from __future__ import annotations

from penstock.capacity import CapacityCurve, CapacityPoint, TokenCurve, TokenPoint
from penstock_planner.compare import Load, Node, Offer
from penstock_planner.evidence import Evidence, Interval, Origin


def point(rate: float, p95: float) -> CapacityPoint:
    return CapacityPoint(
        arrivals_per_second=rate, completed_per_second=rate, p50_milliseconds=p95 / 2, p95_milliseconds=p95,
        p99_milliseconds=p95 * 1.5, samples=500,
    )  # fmt: skip


CURVE = CapacityCurve(
    points=(point(10, 20), point(40, 25), point(80, 50), point(100, 200)), p95_objective_milliseconds=50
)
TOKENS = TokenCurve.of(
    [
        TokenPoint(
            clients=clients, requests_per_second=tokens / 60, tokens_per_second=tokens,
            first_token_p95_milliseconds=first, next_token_p95_milliseconds=20, samples=20,
        )
        for clients, tokens, first in ((1, 60, 100), (2, 110, 150), (4, 190, 220), (8, 300, 400), (16, 360, 900))
    ],
    first_token=500,
    next_token=None,
)  # fmt: skip
"""Text generation: 60 output tokens in each request."""
LOAD = Load(mean=200, peak=800, p95_milliseconds=50)
NODE = Node("big", 1.0, 4)


def evidence(
    name: str = "icelake",
    cores: int = 1,
    *,
    curve: CapacityCurve = CURVE,
    origin: Origin = Origin.MEASURED_ON_CLASS,
    error: float = 0.1,
) -> Evidence:
    return Evidence(name, cores, "native-int8, 1x1 threads", curve, origin, "a test", Interval.around(error))


def offer(name: str = "icelake", cores: int = 1, *, per_hour: float = 1.0, replicas: int = 4, **how: object) -> Offer:
    found = evidence(name, cores, **how)  # type: ignore[arg-type]
    return Offer(name, cores, (found,), (Node(f"{name}.big", per_hour, replicas),))
