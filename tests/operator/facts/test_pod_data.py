"""Every parser of data that pods give: any bytes are a value within bounds or one exception."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.resources.job_summary import Summary
from penstock.resources.result import CapacityFacts
from penstock.resources.status import PodReport
from penstock_operator.decide import (
    Observation,
    ScalingSettings,
    Service,
    Value,
    decide,
    restore_handover,
)
from penstock_operator.decide.measurement import PodReading
from penstock_operator.endpoint.optimization.outcome import JobFailed, JobSucceeded, job_outcome
from penstock_operator.endpoint.pods.judging import judge_pinning, pod_problems, pod_reports
from penstock_operator.facts.findings import unprintable_as_spaces
from penstock_operator.facts.pod_data import (
    INFO_MAX_BYTES,
    MAX_DEPTH,
    MAX_FLOAT,
    MAX_INTEGER,
    MESSAGE_MAX_BYTES,
    PROGRESS_MAX_BYTES,
    Unreadable,
    read_body,
    read_json,
)
from penstock_operator.facts.pods import ContainerFacts, HostReport, JobFacts, JobReport, PodFacts, RuntimePod
from penstock_operator.scaling.read.gateways import parse_demand, parse_gateway_metrics
from penstock_operator.scaling.read.history import History
from penstock_operator.scaling.read.queries import QueryFailure, Vector, read
from penstock_operator.scaling.read.scrape import parse_metrics
from tests.operator import kubelet
from tests.operator.endpoint.kube import Kube, info

Found = TypeVar("Found")
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**400), 2**63, -1, 0, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan]),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "\x1b[2J", "a\nb", "\u202egnp.exe", "\u2028", "\x9b1m", "x" * 20_000, "1e999", "NaN"]),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
"""JSON values, and those that Python writes as if they were."""
NESTED = st.builds(
    lambda opening, depth, closed: (opening * depth + closed * depth).encode(),
    st.sampled_from(["[", '{"a":', '[{"host":', '{"event":[']),
    st.integers(1, 3000),
    st.sampled_from(["", "]", "}"]),
)
JUNK = st.binary(max_size=200) | NESTED


def replaced(value: Any, other: Any, place: int) -> Any:
    """The value with its part number `place` (in the order of a walk) replaced."""
    count = -1

    def walk(part: Any) -> Any:
        nonlocal count
        count += 1
        if count == place:
            return other
        if isinstance(part, dict):
            return {name: walk(inner) for name, inner in part.items()}
        return [walk(inner) for inner in part] if isinstance(part, list) else part

    return walk(value)


def encoded(value: Any) -> bytes:
    """As JSON; numbers beyond it as Python writes them."""
    return json.dumps(value).encode()


def changed(valid: Any) -> st.SearchStrategy[bytes]:
    """A valid value with one part replaced by anything, or junk in its place."""
    parts = st.builds(lambda other, place: encoded(replaced(valid, other, place)), VALUES, st.integers(0, 60))
    return parts | JUNK


def attempted(read: Callable[[], Found]) -> tuple[Found | None, str]:
    """What was read, or why nothing was."""
    try:
        return read(), ""
    except Unreadable as error:
        return None, str(error)


def check_bounds(value: Any, depth: int = 0) -> None:
    """Fails when a part is outside the bounds of `read_json`."""
    assert depth <= MAX_DEPTH + 1
    if isinstance(value, str):
        assert value.isprintable()
    elif isinstance(value, bool) or value is None:
        pass
    elif isinstance(value, int):
        assert abs(value) <= MAX_INTEGER
    elif isinstance(value, float):
        assert abs(value) <= MAX_FLOAT
    elif isinstance(value, list):
        for inner in value:
            check_bounds(inner, depth + 1)
    else:
        for name, inner in value.items():
            assert name.isprintable()
            check_bounds(inner, depth + 1)


@given(VALUES.map(encoded) | JUNK)
def test_json_is_read_within_bounds_or_not_at_all(data: bytes) -> None:
    value, why = attempted(lambda: read_json(data, max_bytes=10_000))

    check_bounds(value)
    assert why.isprintable()
    assert len(why) < 300


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[" * 200_000, "bytes"),
        (b"[" * 9_000, "not JSON"),
        (b"[" * 20 + b"]" * 20, "nested"),
        (b"1e999", "number beyond"),
        (b"-1e16", "number beyond"),
        (b"NaN", "not JSON"),
        (b"9" * 30, "64 bits"),
        (b"9" * 5_000, "not JSON"),
        (b'"\xff"', "not JSON"),
        (rb'"\ud800"', "not JSON"),
    ],
)
def test_what_is_beyond_the_bounds_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_json(data, max_bytes=10_000)


@given(st.text())
def test_texts_of_pods_have_no_control_characters(text: str) -> None:
    assert unprintable_as_spaces(text).isprintable()
    assert len(unprintable_as_spaces(text)) == len(text)
    assert unprintable_as_spaces(text) == text or not text.isprintable()


def test_escape_sequences_and_line_breaks_become_spaces() -> None:
    assert unprintable_as_spaces("a\nb\x1b[31m\x9b\u2028\u202ec") == "a b [31m   c"
    assert unprintable_as_spaces("Größe 模型 é") == "Größe 模型 é"


def test_a_body_that_is_too_long_is_not_read_to_its_end() -> None:
    given_chunks = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal given_chunks
        while True:
            given_chunks += 1
            yield b"x" * 100

    with pytest.raises(Unreadable, match="more than 1000 bytes"):
        asyncio.run(read_body(chunks(), max_bytes=1000))
    assert given_chunks == 11


INFO = {
    **info((4, 5, 6, 7), quota=2.5),
    "plan": {"summary": "openvino-int8"},
    "artefact": {"key": "k", "cpu": {"vendor": "x"}},
}


@given(changed(INFO))
def test_an_info_is_a_report_or_a_failed_read(data: bytes) -> None:
    report, why = attempted(lambda: HostReport.from_info(read_json(data, max_bytes=INFO_MAX_BYTES)))

    assert why.isprintable()
    pod = RuntimePod(PodFacts("p", node="n", phase="Running", qos="Guaranteed"), report)
    verdicts = judge_pinning([pod], cpus=4, neighbours=())
    for found in pod_reports([pod], verdicts, ()):
        assert PodReport.model_validate(found.to_object()) == found
        assert all(text.isprintable() for text in (found.reason, found.cpus, found.cpu))


def test_an_info_as_a_runtime_gives_it_is_a_report() -> None:
    report = HostReport.from_info(read_json(encoded(INFO), max_bytes=INFO_MAX_BYTES))

    assert report is not None
    assert (report.cpus, report.quota, report.plan) == ((4, 5, 6, 7), 2.5, "openvino-int8")


BASELINE = {"digest": kubelet.DIGEST, "uri": "file:///x", "bytes": 12}
PROGRESS = {"done": 7, "of": 23, "stage": "candidates", "message": "int8", "baseline": BASELINE}


@given(changed(PROGRESS))
def test_a_progress_is_a_report_or_a_failed_read(data: bytes) -> None:
    report, why = attempted(lambda: JobReport.from_json(read_json(data, max_bytes=PROGRESS_MAX_BYTES)))

    assert why.isprintable()
    if report is not None:
        assert report.progress is not None
        assert (report.progress.summary + report.progress.stage + report.progress.message).isprintable()
        assert 0 <= report.progress.done <= MAX_INTEGER
        assert report.baseline_uri.isprintable()


SUMMARY = {"succeeded": True, "artefact": kubelet.artefact().to_object(), "result": kubelet.RESULT}
FAILURE = {"succeeded": False, "failure": {"reason": "ModelUnusable", "message": "no", "remedy": "", "retryable": True}}


@given(changed(SUMMARY) | changed(FAILURE), st.integers(0, 1))
def test_any_termination_message_of_a_job_is_an_outcome(data: bytes, code: int) -> None:
    container = ContainerFacts(exit_code=code, termination_message=data.decode(errors="replace"))
    pod = PodFacts("p", node="n", phase="Failed" if code else "Succeeded", container=container)

    outcome = job_outcome(JobFacts("j", 1, pod=pod))

    assert isinstance(outcome, JobSucceeded | JobFailed)
    if isinstance(outcome, JobSucceeded):
        check_bounds(outcome.summary.to_object())
    else:
        check_bounds(outcome.failure.to_object())


def test_the_result_of_a_job_is_read_from_its_termination_message() -> None:
    pod = PodFacts(
        "p", phase="Succeeded", container=ContainerFacts(exit_code=0, termination_message=json.dumps(SUMMARY))
    )

    assert job_outcome(JobFacts("j", 1, pod=pod)) == JobSucceeded(Summary.model_validate(SUMMARY))


@given(changed(FAILURE["failure"]))
def test_any_termination_message_of_a_runtime_is_a_problem(data: bytes) -> None:
    message = data.decode(errors="replace")
    status = {"name": "penstock", "restartCount": 5, "lastState": {"terminated": {"exitCode": 1, "message": message}}}
    pod = RuntimePod.from_object({"metadata": {"name": "p"}, "status": {"containerStatuses": [status]}})

    (problem,) = pod_problems([pod], "")

    assert problem.message
    assert len(pod.pod.container.termination_message) <= MESSAGE_MAX_BYTES


EXPOSITION = """# TYPE penstock_request_seconds histogram
penstock_request_seconds_bucket{route="/predict",le="0.01"} 3.0
penstock_request_seconds_bucket{route="/predict",le="0.1"} 9.0
penstock_request_seconds_bucket{route="/predict",le="+Inf"} 10.0
penstock_request_seconds_count{route="/predict"} 10.0
penstock_requests_total{code="429",route="/predict"} 2.0
penstock_in_flight_requests 3.0
"""
GATEWAY = "penstock_gateway_requests_total 12\npenstock_gateway_in_flight_requests 5\n"
COUNTS = st.sampled_from(
    ["nan", "inf", "-inf", "-1", "1e999", "1e308", "9" * 400, "0x1", "", "1 2 3", "\u0661", "1_0", "\x00", "9e15"]
)


def with_others(text: str) -> st.SearchStrategy[str]:
    """The exposition with some numbers and lines replaced."""
    words = text.split(" ")

    def change(changes: dict[int, str], junk: str) -> str:
        return " ".join(changes.get(place, word) for place, word in enumerate(words)) + junk

    return st.builds(change, st.dictionaries(st.integers(0, len(words) - 1), COUNTS | TEXTS, max_size=3), TEXTS)


@given(with_others(EXPOSITION) | with_others(EXPOSITION * 60) | st.text(), st.floats(1, 60))
def test_any_exposition_of_a_runtime_gives_finite_metrics_or_is_refused(text: str, seconds: float) -> None:
    with suppress(Unreadable):
        check_reading(parse_metrics(text), seconds)


@given(with_others(GATEWAY) | st.text(), st.floats(1, 60))
def test_any_exposition_of_a_gateway_gives_finite_metrics_or_is_refused(text: str, seconds: float) -> None:
    with suppress(Unreadable):
        check_reading(parse_gateway_metrics(text), seconds)


def check_reading(reading: PodReading, seconds: float) -> None:
    """Fails when the metrics made of it are not finite."""
    assert 0 <= reading.arrivals < math.inf
    assert 0 <= reading.in_flight < math.inf
    history = History()
    history.put("p", 1000.0, parse_metrics(EXPOSITION))
    history.put("p", 1000.0 + seconds, reading)
    found = history.metrics(("p",), 1000.0 + seconds, objective_seconds=0.02, interval_seconds=seconds, problem="")
    for value in (found.arrivals_fast, found.arrivals_slow, found.in_flight, found.good_share):
        assert not isinstance(value, Value) or math.isfinite(value.value)


def test_an_exposition_with_thousands_of_buckets_is_refused() -> None:
    many = "".join(f'penstock_request_seconds_bucket{{le="{number}"}} 1\n' for number in range(1000))

    with pytest.raises(Unreadable, match="more than 128 bounds"):
        parse_metrics(many + EXPOSITION)


@given(st.binary(max_size=64))
def test_any_answer_to_a_question_for_demand_is_a_number_or_refused(data: bytes) -> None:
    with suppress(Unreadable):
        assert 0 <= parse_demand(data) < 10**15


@pytest.mark.parametrize("data", [b"", b"-1", b"+1", b"1.5", b"1_0", "\u0661".encode(), b"9" * 20, b"one"])
def test_an_answer_that_is_no_number_of_requests_is_refused(data: bytes) -> None:
    with pytest.raises(Unreadable):
        parse_demand(data)


PROMETHEUS = {
    "status": "success",
    "data": {"resultType": "vector", "result": [{"metric": {"pod": "p"}, "value": [1.5, "2"]}]},
}


@given(changed(PROMETHEUS))
def test_any_answer_of_a_prometheus_is_a_vector_or_a_failure(data: bytes) -> None:
    assert isinstance(read(data), Vector | QueryFailure)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000,
        encoded({"status": "success", "data": {"resultType": "scalar", "result": [0, 10**400]}}),
        encoded({"status": "success", "data": {"resultType": "x\n" * 9000, "result": []}}),
    ],
)
def test_an_answer_of_a_prometheus_beyond_all_bounds_is_a_failure(data: bytes) -> None:
    answer = read(data)

    assert isinstance(answer, QueryFailure)
    assert answer.reason.isprintable()
    assert len(answer.reason) < 200


@given(changed(SUMMARY) | changed(FAILURE), st.integers(0, 1))
def test_any_termination_message_of_a_job_gives_a_plan(data: bytes, code: int) -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_ends(data.decode(errors="replace"), code=code)

    status = kube.reconcile().status

    for condition in status["conditions"]:
        check_bounds(condition)


MEASURED = {
    "requestsPerSecond": 80.0,
    "p95ObjectiveMilliseconds": 20.0,
    "points": [
        {"requestsPerSecond": 20.0, "completedPerSecond": 20.0, "p95Milliseconds": 9.1},
        {"requestsPerSecond": 60.0, "completedPerSecond": 60.0, "p95Milliseconds": 14.2},
        {"requestsPerSecond": 100.0, "completedPerSecond": 97.0, "p95Milliseconds": 26.0},
    ],
}


@given(changed(MEASURED), with_others(EXPOSITION))
def test_any_capacity_and_any_load_give_a_decision(data: bytes, text: str) -> None:
    try:
        capacity = CapacityFacts.model_validate(read_json(data, max_bytes=MESSAGE_MAX_BYTES))
        reading = parse_metrics(text)
    except ValueError:
        return
    settings = ScalingSettings(min_replicas=1, max_replicas=6)
    service = Service.from_curve(capacity.curve, p95_objective_milliseconds=20.0, pooled=False)
    history = History()
    state = restore_handover("", settings, 1000.0, slowdown=None)
    for step in range(5):
        now = 1000.0 + 2 * step
        history.put("p", now, reading if step % 2 else parse_metrics(EXPOSITION))
        metrics = history.metrics(("p",), now, objective_seconds=0.02, interval_seconds=2.0, problem="")

        decision, state = decide(
            settings, service, Observation(1, 1, metrics, rolling_out=False, started=()), state, now
        )

        assert 1 <= decision.replicas <= 6
