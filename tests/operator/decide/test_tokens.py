"""Text generation: the capacity from the curve in tokens, the load in measured requests, decisions on both."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capacity import TokenCurve, TokenPoint
from penstock_operator.decide import (
    Cause,
    Decision,
    Idle,
    Measurement,
    Metrics,
    Service,
    Unknown,
    Value,
    in_measured_requests,
)
from penstock_operator.decide.service import LEAST_WEIGHT, MOST_WEIGHT, mean_in_flight, weight_of
from tests.examples import examples
from tests.operator.decide.cases import SETTINGS, TICK, Replay

TOKENS = 60.0
"""Output tokens of a measured answer."""
MEASURED = Value(TOKENS)


def curve(*points: tuple[int, float, float], first_token: float = 500) -> TokenCurve:
    """Points of (clients, tokens/s, p95 of the time to the first token in milliseconds)."""
    return TokenCurve.of(
        [
            TokenPoint(
                clients=clients,
                requests_per_second=tokens / TOKENS,
                tokens_per_second=tokens,
                first_token_p95_milliseconds=first,
                next_token_p95_milliseconds=20,
                samples=20,
            )
            for clients, tokens, first in points
        ],
        first_token=first_token,
        next_token=None,
    )


CURVE = curve((1, 60, 100), (2, 110, 150), (4, 190, 220), (8, 300, 400), (16, 360, 900))


def service(of: TokenCurve = CURVE, *, pooled: bool = False) -> Service:
    found = Service.from_tokens(of, pooled=pooled)
    assert found is not None
    return found


def load(
    rate: float, *, in_flight: float, tokens: Measurement = MEASURED, p95: float = 200.0, good: float = 0.99
) -> Metrics:
    """Requests/s that arrive, and requests in progress."""
    if rate == 0:
        return Metrics(Idle(), Idle(), Value(in_flight), Idle(), Idle())
    return Metrics(Value(rate), Value(rate), Value(in_flight), Value(good), Value(p95), tokens_per_request=tokens)


@given(st.floats(0.01, 1000))
def test_clients_at_random_are_fewer_on_average_than_those_that_a_replica_takes(clients: float) -> None:
    mean = mean_in_flight(clients)
    assert mean + 1.645 * math.sqrt(mean) == pytest.approx(clients)


def test_the_capacity_is_a_rate_at_which_few_requests_find_more_clients_than_the_limit_allows() -> None:
    found = service()
    # 8 clients are within the limit: 4.508 on average, between the points of 4 and 8 clients.
    assert found.rate * TOKENS == pytest.approx(190 + 0.508 / 4 * 110, rel=1e-3)
    assert found.within_objective
    assert found.p95_objective_milliseconds == 500
    assert found.saturation * TOKENS == 360
    assert found.tokens_per_request == pytest.approx(TOKENS)
    assert found.seconds_in_flight is not None
    assert found.seconds_in_flight * found.rate == pytest.approx(4.508, rel=1e-3)
    assert found.p95_at(found.rate) == pytest.approx(400)


def test_an_objective_out_of_reach_still_gives_a_number_of_replicas() -> None:
    found = service(curve((1, 60, 600), (2, 110, 900)))
    assert not found.within_objective
    assert found.rate > 0


def test_without_points_the_capacity_is_unknown() -> None:
    assert Service.from_tokens(TokenCurve()) is None


@given(st.lists(st.tuples(st.floats(1, 500), st.floats(1, 5000)), min_size=1, max_size=7), st.floats(1, 5000))
def test_any_curve_gives_a_service_that_the_autoscaler_can_use(
    measured: list[tuple[float, float]], limit: float
) -> None:
    points = [(2**power, tokens, first) for power, (tokens, first) in enumerate(measured)]
    found = service(curve(*points, first_token=limit))
    assert 0 < found.rate <= found.saturation * (1 + 1e-9)
    assert list(found.rates) == sorted(set(found.rates))
    assert list(found.p95_milliseconds) == sorted(found.p95_milliseconds)
    assert found.longest_in_flight_seconds > 0


@pytest.mark.parametrize(
    ("observed", "weight"),
    [
        (Value(TOKENS), 1),
        (Value(2 * TOKENS), 2),
        (Value(1000 * TOKENS), MOST_WEIGHT),
        (Value(1), LEAST_WEIGHT),
        (Value(0), 1),
        (Idle(), 1),
        (Unknown("lost"), 1),
    ],
)
def test_a_request_counts_by_its_output_tokens(observed: Measurement, weight: float) -> None:
    assert weight_of(observed, TOKENS) == pytest.approx(weight)


def test_the_load_of_other_tasks_is_not_changed() -> None:
    encoder = Service(5, 100, (5.0,), (100.0,), 6)
    metrics = load(3, in_flight=40)
    assert in_measured_requests(metrics, encoder) is metrics
    assert in_measured_requests(metrics, None) is metrics


def test_unknown_arrivals_stay_unknown() -> None:
    lost = Unknown("lost")
    metrics = Metrics(lost, lost, Value(50), lost, lost)
    assert in_measured_requests(metrics, service()).arrivals_fast == lost


@given(st.floats(0, 100), st.floats(0, 1000), st.floats(1, 500))
def test_more_tokens_or_requests_in_progress_are_never_less_load(rate: float, in_flight: float, tokens: float) -> None:
    def arrivals(metrics: Metrics) -> float:
        found = in_measured_requests(metrics, service()).arrivals_fast
        return found.value if isinstance(found, Value) else 0.0

    base = arrivals(load(rate, in_flight=in_flight, tokens=Value(tokens)))
    assert arrivals(load(rate, in_flight=in_flight, tokens=Value(2 * tokens))) >= base
    assert arrivals(load(rate, in_flight=in_flight + 1, tokens=Value(tokens))) >= base - 1e-9


class TokenReplay(Replay):
    """Feeds loads as the loop does."""

    def tick(self, metrics: Metrics, *, seconds: float = TICK) -> Decision:
        return super().tick(in_measured_requests(metrics, self.service), seconds=seconds)


def replay() -> TokenReplay:
    return TokenReplay(SETTINGS, service())


RATE = service().rate


@pytest.mark.parametrize(
    ("metrics", "least", "most"),
    [
        (load(0.5 * RATE, in_flight=2), 1, 1),
        (load(2.2 * RATE, in_flight=10), 3, 4),
        (load(1.1 * RATE, in_flight=9, tokens=Value(2 * TOKENS)), 3, 4),
        (load(0.5 * RATE, in_flight=2, tokens=Value(TOKENS / 2)), 1, 1),
        # Clients that wait for their answers: the arrivals are those that one replica can answer.
        (load(1.0 * RATE, in_flight=40), 6, 12),
    ],
    ids=["light", "requests", "longer answers", "short answers", "requests in progress"],
)
def test_replicas_follow_tokens_and_requests_in_progress(metrics: Metrics, least: int, most: int) -> None:
    numbers = replay().play(metrics, 300)
    assert least <= numbers[-1] <= most
    assert numbers == sorted(numbers), "a constant load does not scale down"


def test_late_first_tokens_add_a_replica() -> None:
    course = replay()
    numbers = course.play(load(0.5 * RATE, in_flight=2, p95=900, good=0.8), 600)
    assert numbers[-1] > 1
    assert any(decision.cause is Cause.GUARD for decision in course.decisions)


def test_the_sentence_names_tokens_and_the_time_to_the_first_one() -> None:
    course = replay()
    course.play(load(2 * RATE, in_flight=10), 60)
    assert "requests/s of 60 tokens now" in course.decisions[-1].reason
    assert "at p95 of the first token 500 ms" in course.decisions[-1].reason


def test_without_requests_replicas_go_after_the_window() -> None:
    course = replay()
    course.play(load(3 * RATE, in_flight=14), 300)
    before = course.replicas
    course.play(load(0, in_flight=0), 600)
    assert before > 2
    assert course.replicas == 1


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0, 400), st.floats(1, 600)), min_size=1, max_size=20))
def test_any_course_stays_within_the_bounds(course: list[tuple[float, float, float]]) -> None:
    run = replay()
    for rate, in_flight, tokens in course:
        decision = run.tick(load(rate, in_flight=in_flight, tokens=Value(tokens)))
        assert SETTINGS.min_replicas <= decision.replicas <= SETTINGS.max_replicas
