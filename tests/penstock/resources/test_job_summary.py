"""The summary of a job: its content from the manifest, and that it always fits into a termination message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity import CapacityCurve, CapacityPoint, TokenCurve, TokenPoint
from penstock.errors import ArtefactError, ModelAccessDenied, PenstockError
from penstock.hardware import CpuIdentity, Isa
from penstock.manifest import (
    CandidateFacts,
    GraphIO,
    LatencyPoint,
    Manifest,
    Metric,
    ModelFacts,
    Outcome,
    ServedModel,
    Verdict,
)
from penstock.recipe import EngineName, Plan, Precision, Recipe
from penstock.resources.job_summary import LIMIT_BYTES, Summary, summary_of
from penstock.resources.result import ArtefactReference, Result
from penstock.tasks import Head, TaskName

DIGEST = f"sha256:{'ab' * 32}"
URI = "s3://bucket/penstock/" + "ab" * 32
INT8 = Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC, options=("smooth-quant",))
FP32 = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32)
CPU = CpuIdentity(vendor="GenuineIntel", family=6, model=106, stepping=6, model_name="Xeon", isa=Isa.AVX512_VNNI)


def point(rate: float, p95: float, *, refused: float = 0.0) -> CapacityPoint:
    return CapacityPoint(
        arrivals_per_second=rate,
        completed_per_second=rate,
        p50_milliseconds=p95 / 2,
        p95_milliseconds=p95,
        p99_milliseconds=p95 * 2,
        refused_share=refused,
        samples=100,
    )


def served(recipe: Recipe) -> ServedModel:
    plan = Plan(recipe=recipe, streams=1, threads_per_stream=2)
    return ServedModel(path="model/x", io=GraphIO(inputs=("input_ids",), outputs={}), plan=plan)


def manifest(**changes: Any) -> Manifest:
    verdict = Verdict(
        passed=True,
        reason="all within the budget",
        metrics=(Metric(name="argmax_agreement", value=0.99234567, lower=0.98, budget=0.97, passed=True),),
        texts=256,
    )
    fields: dict[str, Any] = {
        "key": "k",
        "created": "2026-11-21T00:00:00Z",
        "toolchain": {},
        "model": ModelFacts(
            source="hf://a/b", digest=DIGEST, architecture="BertModel", head=Head.SEQUENCE, parameters=66_000_000,
            max_tokens=512,
        ),
        "task": TaskName.TEXT_CLASSIFICATION,
        "cpu": CPU,
        "cores": 2,
        "objective": "p95 within 20 ms",
        "chosen": served(INT8),
        "baseline": served(FP32),
        "candidates": (
            CandidateFacts(recipe=FP32, outcome=Outcome.REFERENCE, reason="the reference"),
            CandidateFacts(
                recipe=INT8,
                outcome=Outcome.CHOSEN,
                reason="fastest",
                verdict=verdict,
                latency=(
                    LatencyPoint(tokens=8, p50_milliseconds=1.23456, minimum_milliseconds=1),
                    LatencyPoint(tokens=128, p50_milliseconds=9, minimum_milliseconds=8),
                ),
            ),
            CandidateFacts(
                recipe=INT8.model_copy(update={"options": ()}), outcome=Outcome.REJECTED, reason="0.94 is under 0.97"
            ),
        ),
        "capacity": CapacityCurve(
            points=(point(50, 8), point(100, 12), point(150, 40)), p95_objective_milliseconds=20
        ),
        "speed_up": {8: 2.0, 128: 8.0},
        "seconds": 123.456,
        "findings": ("the cores are shared",),
        "files": {},
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


def summary(made: Manifest, uri: str = URI) -> Summary:
    return summary_of(made, digest=DIGEST, uri=uri, size_bytes=70_000_000)


def token_curve() -> TokenCurve:
    points = [
        TokenPoint(
            clients=2**power,
            requests_per_second=1.23456 * 2**power,
            tokens_per_second=98.7654 * 2**power,
            first_token_p95_milliseconds=100 * 2**power,
            next_token_p95_milliseconds=12.3456,
            samples=20,
        )
        for power in range(7)
    ]
    return TokenCurve.of(points, first_token=900, next_token=None)


def test_the_result_has_the_capacity_in_tokens_as_the_autoscaler_takes_it() -> None:
    result = Result.of(manifest(token_capacity=token_curve()))
    assert result.token_capacity is not None
    assert result.token_capacity.tokens_per_second == 790.1
    within = result.token_capacity.curve.within
    assert within is not None
    assert (within.clients, within.requests_per_second) == (8, 9.876)
    assert Result.of(manifest()).token_capacity is None


def test_a_report_that_is_too_long_keeps_the_best_point_of_the_capacity_in_tokens() -> None:
    result = Result.of(manifest(token_capacity=token_curve()))
    assert result.token_capacity is not None
    whole = Summary(succeeded=True, artefact=ArtefactReference(digest=DIGEST, uri=URI), result=result)
    for limit in range(900, 2400, 50):
        message = whole.to_message(limit=limit)
        read = Summary.from_message(message).result
        assert read is not None
        if read.token_capacity is not None and read.token_capacity.points:
            within = read.token_capacity.curve.within
            assert within is not None
            assert within.clients == 8


def test_a_report_holds_what_was_found() -> None:
    report = summary(manifest())
    result = report.result
    assert result is not None
    assert report.artefact == ArtefactReference(digest=DIGEST, uri=URI, bytes=70_000_000)
    assert result.plan.summary == "openvino-int8-plain-smooth-quant, 1x2 threads"
    assert (result.accuracy.within_budget, result.accuracy.metrics[0].value) == (True, 0.9923)
    assert [(one.tokens, one.p50_milliseconds, one.speed_up) for one in result.latency] == [
        (8, 1.235, 2.0),
        (128, 9.0, 8.0),
    ]
    assert result.speed_up == 4.0
    assert result.capacity.requests_per_second == pytest.approx(114.3, abs=0.05)
    assert result.capacity.curve.rate_within(12) == 100
    assert result.cpu.identity == CPU
    assert [(one.recipe, one.outcome) for one in result.rejected] == [("openvino-int8-plain", Outcome.REJECTED)]
    assert result.left_out is False


def test_where_the_fp32_graph_itself_is_served_the_summary_has_its_figures() -> None:
    made = manifest(
        chosen=served(FP32),
        candidates=(
            CandidateFacts(
                recipe=FP32,
                outcome=Outcome.REFERENCE,
                reason="the reference",
                latency=(LatencyPoint(tokens=8, p50_milliseconds=3, minimum_milliseconds=3),),
            ),
        ),
        speed_up={},
    )
    result = summary(made).result
    assert result is not None
    assert (result.accuracy.within_budget, result.speed_up, result.latency[0].p50_milliseconds) == (True, None, 3)


def test_a_message_reads_back_as_it_was() -> None:
    report = summary(manifest())
    assert Summary.from_message(report.to_message()) == report


def test_a_failure_has_a_remedy_and_the_baseline() -> None:
    baseline = ArtefactReference(digest=DIGEST, uri=URI)
    report = Summary.failed(ModelAccessDenied("hf://a/b wants a token", remedy="Set HF_TOKEN"), baseline=baseline)
    back = Summary.from_message(report.to_message())
    assert back.failure is not None
    assert (back.succeeded, back.failure.reason, back.failure.remedy, back.failure.retryable) == (
        False, "ModelAccessDenied", "Set HF_TOKEN", False,
    )  # fmt: skip
    assert back.baseline == baseline


@pytest.mark.parametrize("message", ["", "Killed", '{"succeeded": true}', "[1]", "Traceback\n\nValueError: x"])
def test_the_output_of_a_crash_is_not_a_summary(message: str) -> None:
    with pytest.raises(ArtefactError, match="left no summary") as caught:
        Summary.from_message(message)
    assert message.strip().split("\n")[-1] in caught.value.message
    assert caught.value.remedy


def test_the_least_important_parts_are_dropped_first() -> None:
    rejected = tuple(
        CandidateFacts(recipe=INT8, outcome=Outcome.FAILED, reason="it crashed, with a long message " * 9)
        for _ in range(20)
    )
    points = tuple(point(10.0 * step, 2.0 * step) for step in range(1, 17))
    made = manifest(
        candidates=(*manifest().candidates, *rejected),
        capacity=CapacityCurve(points=points, p95_objective_milliseconds=21),
    )
    report = Summary.from_message(summary(made).to_message())
    assert report.result is not None
    assert report.result.left_out
    assert 0 < len(report.result.rejected) < 21
    assert len(report.result.capacity.points) == 16
    smaller = Summary.from_message(summary(made).to_message(limit=1500))
    assert smaller.result is not None
    assert smaller.result.rejected == ()
    kept = [one.requests_per_second for one in smaller.result.capacity.points]
    assert {100.0, 110.0} <= set(kept) or kept == []
    assert smaller.result.plan == report.result.plan


TEXT = st.text(st.characters(codec="utf-8"), max_size=400)
LONG = st.one_of(TEXT, st.sampled_from(["\x00" * 300, "é" * 300, "𝄞" * 300, '"\\' * 200]))
CANDIDATES = st.lists(
    st.builds(
        lambda reason, option, outcome: CandidateFacts(
            recipe=INT8.model_copy(update={"options": (option,)}), outcome=outcome, reason=reason
        ),
        LONG,
        LONG,
        st.sampled_from([Outcome.REJECTED, Outcome.SLOWER, Outcome.FAILED, Outcome.SKIPPED]),
    ),
    max_size=40,
)
URIS = st.one_of(st.just(URI), st.just("s3://" + "x" * 507), st.from_regex(r"file:/[a-z]{0,40}", fullmatch=True))


@given(CANDIDATES, st.lists(LONG, max_size=30), st.tuples(LONG, LONG), URIS, st.integers(0, 30))
def test_every_report_fits_and_reads_back(
    rejected: list[CandidateFacts], findings: list[str], texts: tuple[str, str], uri: str, points: int
) -> None:
    name, workload = texts
    made = manifest(
        candidates=(*manifest().candidates, *rejected),
        findings=tuple(findings),
        cpu=CPU.model_copy(update={"model_name": name, "vendor": name}),
        objective=workload,
        workload=workload,
        capacity=CapacityCurve(
            points=tuple(point(1.5 + step, 3.3 * step + 1) for step in range(points)), p95_objective_milliseconds=20
        ),
    )
    baseline = ArtefactReference(digest=DIGEST, uri=uri, bytes=2**62)
    report = summary_of(made, digest=DIGEST, uri=uri, size_bytes=2**62, baseline=baseline)
    message = report.to_message()
    assert len(message.encode()) <= LIMIT_BYTES
    back = Summary.from_message(message)
    assert (back.artefact, back.baseline) == (report.artefact, report.baseline)
    assert back.result is not None
    assert report.result is not None
    assert back.result.capacity.requests_per_second == report.result.capacity.requests_per_second
    whole = len(report.to_message(limit=10**9).encode()) <= LIMIT_BYTES
    assert (back == report) if whole else back.result.left_out


@given(LONG, LONG, st.integers(1, 30), URIS)
def test_every_failure_fits_and_reads_back(message: str, remedy: str, times: int, uri: str) -> None:
    error = PenstockError(message * times, remedy=remedy * times)
    report = Summary.failed(error, baseline=ArtefactReference(digest=DIGEST, uri=uri))
    written = report.to_message()
    assert len(written.encode()) <= LIMIT_BYTES
    assert Summary.from_message(written).failure is not None
