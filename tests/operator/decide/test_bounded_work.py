"""Whatever numbers pods and a Prometheus report, a decision takes a bounded number of operations.

Counted are the executed lines of the operator, loops included, so that a slow machine changes nothing.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.resources.endpoint_parts.scaling import PrometheusQueries
from penstock_operator.decide import (
    Idle,
    Measurement,
    Metrics,
    Observation,
    ScalingSettings,
    State,
    Unknown,
    Value,
    decide,
    dump_handover,
    in_measured_requests,
    replicas_for_load,
    restore_handover,
)
from penstock_operator.decide.measurement import PodReading
from penstock_operator.endpoint.objects.canary import CanaryTrial, PlanCounter, PlanCounts
from penstock_operator.scaling.read.gateways import parse_demand, parse_gateway_metrics
from penstock_operator.scaling.read.history import History
from penstock_operator.scaling.read.queries import (
    Answer,
    Element,
    EndpointPods,
    QueryFailure,
    Vector,
    Windows,
    metrics_of,
    queries,
)
from penstock_operator.scaling.read.scrape import (
    MAX_BUCKETS,
    MAX_COUNT,
    UnreadableMetrics,
    parse_metrics,
)
from tests.examples import examples
from tests.operator.decide import test_texts, test_tokens
from tests.operator.decide.cases import START, service

DECISION = 3_000
"""Lines of one decision."""
LOOK = 200
"""Lines of one look at a canary."""


def takes_at_most(lines: int, call: Callable[[], object]) -> None:
    """Fails as soon as a call has executed more lines of the operator; an iteration of a loop counts its lines
    again."""
    left = lines

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left
        if "penstock_operator" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        assert left >= 0, f"more than {lines} lines"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


def test_iterations_of_a_loop_are_counted() -> None:
    with pytest.raises(AssertionError, match="more than 20 lines"):
        takes_at_most(LOOK // 10, lambda: CanaryTrial(600.0).look(PlanCounts(9, 1), PlanCounts(2, 1), 1.0))


counts = st.one_of(st.integers(0, 1_000), st.integers(0, int(MAX_COUNT)))
values = st.one_of(st.floats(0, 1_000), st.floats(0, 1_000 * MAX_COUNT))
times = st.one_of(st.floats(0, 200), st.floats(-1e12, 1e12))


def measurements(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Measurement]:
    return st.one_of(st.builds(Value, numbers), st.just(Idle()), st.just(Unknown("lost")))


metrics = st.builds(
    Metrics,
    arrivals_fast=measurements(values),
    arrivals_slow=measurements(values),
    in_flight=measurements(values),
    good_share=measurements(st.floats(0, 1)),
    p95_milliseconds=measurements(values),
    coverage=st.floats(0, 1),
    tokens_per_request=measurements(values),
)
chosen = st.builds(
    ScalingSettings,
    min_replicas=st.integers(0, 1),
    max_replicas=st.integers(1, 1_000_000),
    headroom=st.floats(0.01, 1),
    strict_window=st.booleans(),
    shrink_window_seconds=st.floats(0, 86_400),
)
services = st.sampled_from(
    [None, service(), service(pooled=True), service().slower(3.0), test_texts.service(), test_tokens.service()]
)


@settings(max_examples=examples(300), deadline=None)
@given(
    chosen,
    services,
    st.lists(st.tuples(metrics, times, st.integers(0, 1_000_000), st.booleans()), min_size=1, max_size=25),
)
def test_a_decision(one: ScalingSettings, capacity: Any, course: list[tuple[Metrics, float, int, bool]]) -> None:
    state, now, replicas = State(), START, 1
    for seen, seconds, ready, rolling_out in course:
        now += seconds

        def step(seen: Metrics = seen, ready: int = ready, rolling_out: bool = rolling_out, now: float = now) -> None:
            nonlocal state, replicas
            observation = Observation(replicas, ready, in_measured_requests(seen, capacity), rolling_out=rolling_out)
            decision, state = decide(one, capacity, observation, state, now)
            replicas = decision.replicas
            state = restore_handover(dump_handover(state), one, now) if ready == 13 else state

        takes_at_most(DECISION, step)


@settings(max_examples=examples(100), deadline=None)
@given(values, st.floats(0.01, 1), st.booleans())
def test_the_replicas_for_a_load(rate: float, headroom: float, pooled: bool) -> None:
    takes_at_most(DECISION, lambda: replicas_for_load(service(pooled=pooled), rate, headroom))


plans = st.builds(
    lambda requests, share, buckets: PlanCounts(requests, int(share * requests), buckets),
    counts,
    st.floats(0, 1),
    st.dictionaries(st.sampled_from([0.01, 0.02, 0.05, math.inf]), st.floats(0, MAX_COUNT)),
)


@settings(max_examples=examples(400), deadline=None)
@given(plans, plans)
@example(PlanCounts(9 * 10**15, 3 * 10**15), PlanCounts(9 * 10**15, 3 * 10**15 + 10**8))
def test_a_look_at_a_canary(old: PlanCounts, new: PlanCounts) -> None:
    takes_at_most(LOOK, lambda: CanaryTrial(600.0).look(old, new, 600.0))


readings = st.builds(
    lambda numbers, tokens: PodReading(
        numbers[0], numbers[1], (*map(float, range(len(numbers) - 1)), math.inf), array("d", numbers), numbers[-1],
        numbers[0], tokens,
    ),
    st.lists(st.floats(0, MAX_COUNT), min_size=2, max_size=MAX_BUCKETS),
    st.none() | st.floats(0, MAX_COUNT),
)  # fmt: skip


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), readings, times), max_size=8))
def test_readings_of_pods(course: list[tuple[str, PodReading, float]]) -> None:
    history, counter, now = History(), PlanCounter(), START
    for pod, reading, seconds in course:
        now += seconds

        def step(pod: str = pod, reading: PodReading = reading, now: float = now) -> None:
            history.put(pod, now, reading)
            counter.put(pod, reading, new=True)
            history.metrics(("a", "b"), now, objective_seconds=0.02, interval_seconds=2.0)

        # Two pods with up to 8 histograms of at most 128 buckets.
        takes_at_most(20 * MAX_BUCKETS + DECISION, step)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.one_of(st.floats(), st.just("lost")), min_size=7, max_size=7), st.floats())
def test_answers_of_a_prometheus(numbers: list[float | str], evaluated_at: float) -> None:
    asked = queries(pods := EndpointPods("a", "e", ("p",)), windows := Windows.of(15.0), PrometheusQueries())
    answers: dict[str, Answer] = {
        name: QueryFailure(number)
        if isinstance(number, str)
        else Vector((Element({"le": "+Inf", "pod": "p"}, number),))
        for name, number in zip(asked, numbers, strict=False)
    }

    def step() -> None:
        found = metrics_of(
            answers, pods, windows, PrometheusQueries(), evaluated_at=evaluated_at, objective_seconds=0.02
        )
        decide(ScalingSettings(), service(), Observation(1, 1, found), State(), START)

    takes_at_most(DECISION, step)


@pytest.mark.parametrize("size", [1_000, 4_000])
@pytest.mark.parametrize(
    "line", ['penstock_requests_total{code="500"} 9e15', "penstock_in_flight_requests 9", "x" * 50]
)
def test_a_text_takes_lines_in_proportion_to_its_size(line: str, size: int) -> None:
    text = "\n".join([line] * size)

    def read() -> None:
        for parse in (parse_metrics, parse_gateway_metrics):
            with pytest.raises(UnreadableMetrics):
                parse(text)

    takes_at_most(40 * size, read)


def test_a_number_of_waiting_requests_has_few_digits() -> None:
    takes_at_most(10, lambda: parse_demand(b"9" * 15))
