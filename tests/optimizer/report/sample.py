"""A manifest as a real optimisation leaves it: every outcome, a curve, trials and findings."""

from __future__ import annotations

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock.hardware import CpuIdentity, Isa
from penstock.manifest import (
    Axes,
    CandidateFacts,
    GemmShare,
    GraphIO,
    LatencyPoint,
    Manifest,
    Metric,
    ModelFacts,
    Outcome,
    PlanTrial,
    ServedModel,
    Verdict,
)
from penstock.recipe import Batching, EngineName, Plan, Precision, Recipe
from penstock.tasks import Head, TaskName

LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)
FP32_MILLISECONDS = (2.6, 3.5, 6.5, 11.7, 20.6, 46.2, 73.2, 97.4)
IO = GraphIO(inputs=("input_ids", "attention_mask"), outputs={"last_hidden_state": Axes.TOKENS})


def recipe(engine: EngineName, precision: Precision, *options: str) -> Recipe:
    return Recipe(engine=engine, precision=precision, options=options)


ORT, OV = EngineName.ONNXRUNTIME, EngineName.OPENVINO
FP32 = recipe(ORT, Precision.FP32)
INT8 = recipe(ORT, Precision.INT8_DYNAMIC, "per-channel", "reduced-range")
PLAN = Plan(recipe=INT8, streams=2, threads_per_stream=1, wide_from_tokens=64)
FP32_PLAN = Plan(
    recipe=FP32, streams=2, threads_per_stream=1, batching=Batching.PADDED, max_batch_rows=8, max_padding_share=0.15
)


def latency(factor: float) -> tuple[LatencyPoint, ...]:
    return tuple(
        LatencyPoint(
            tokens=tokens, p50_milliseconds=base * factor, minimum_milliseconds=base * factor * 0.93, spread=0.04
        )
        for tokens, base in zip(LENGTHS, FP32_MILLISECONDS, strict=True)
    )


def verdict(cosine: float, batching: Batching, *, reason: str = "") -> Verdict:
    return Verdict(
        passed=cosine >= 0.985,
        reason=reason or f"min_cosine {cosine:.3f} is within the budget of 0.985",
        metrics=(
            Metric(name="min_cosine", value=cosine, budget=0.985, passed=cosine >= 0.985),
            Metric(name="neighbour_overlap", value=0.97, lower=0.95, budget=0.9, passed=True),
        ),
        texts=160,
        batching=batching.value,
    )


def point(rate: float, p95: float) -> CapacityPoint:
    return CapacityPoint(
        arrivals_per_second=rate,
        completed_per_second=rate,
        p50_milliseconds=p95 * 0.35,
        p95_milliseconds=p95,
        p99_milliseconds=p95 * 1.4,
        samples=300,
    )


def sample_manifest() -> Manifest:
    fused = {"Attention": 6, "BiasGelu": 6, "SkipLayerNormalization": 12}
    candidates = (
        CandidateFacts(
            recipe=FP32,
            outcome=Outcome.REFERENCE,
            reason="the fp32 graph that the others are judged by",
            latency=latency(1.0),
            fused_nodes=fused,
            build_seconds=1.0,
            size_bytes=90_900_000,
        ),
        CandidateFacts(
            recipe=INT8,
            outcome=Outcome.CHOSEN,
            reason="fastest within the accuracy budget: single-request latency 1.8 times that of fp32",
            verdict=verdict(0.9901, Batching.SINGLE),
            latency=latency(0.48),
            fused_nodes={**fused, "DynamicQuantizeMatMul": 18},
            build_seconds=4.2,
            size_bytes=23_100_000,
        ),
        CandidateFacts(
            recipe=recipe(ORT, Precision.INT8_STATIC, "per-channel", "reduced-range", "smooth"),
            outcome=Outcome.SLOWER,
            reason="1.2 times as slow as the chosen plan",
            verdict=verdict(0.9921, Batching.PADDED),
            latency=latency(0.58),
            build_seconds=9.0,
            size_bytes=23_300_000,
        ),
        CandidateFacts(
            recipe=recipe(OV, Precision.INT8_STATIC, "smooth"),
            outcome=Outcome.SLOWER,
            reason="1.9 times as slow as the chosen plan",
            verdict=verdict(0.9936, Batching.PADDED),
            latency=latency(1.15),
            build_seconds=21.7,
            size_bytes=22_900_000,
        ),
        CandidateFacts(
            recipe=recipe(OV, Precision.FP32),
            outcome=Outcome.SLOWER,
            reason="2.1 times as slow as the chosen plan",
            verdict=verdict(0.9999998, Batching.PADDED),
            latency=latency(1.03),
        ),
        CandidateFacts(
            recipe=recipe(ORT, Precision.INT8_DYNAMIC),
            outcome=Outcome.REJECTED,
            reason="min_cosine 0.944 is under the budget of 0.985",
            verdict=verdict(0.9071, Batching.SINGLE, reason="min_cosine 0.907 is under the budget of 0.985"),
            latency=latency(0.47)[:5],
        ),
        CandidateFacts(
            recipe=recipe(OV, Precision.INT8_STATIC, "fp32-attention", "smooth"),
            outcome=Outcome.FAILED,
            reason="killed by signal 11 (SIGSEGV)",
        ),
        CandidateFacts(
            recipe=recipe(OV, Precision.BF16),
            outcome=Outcome.SKIPPED,
            reason="avx2 has no native bf16: it would be emulated, slower than fp32",
        ),
    )
    curve = CapacityCurve(
        points=(point(20, 12), point(32, 14), point(51, 21), point(82, 44), point(95, 71), point(131, 900)),
        p95_objective_milliseconds=50,
    )
    return Manifest(
        key="3f9c" * 16,
        created="2026-11-21T16:22:22+00:00",
        toolchain={"penstock": "0.1.0", "onnxruntime": "1.31.0", "openvino": "2026.4.0"},
        model=ModelFacts(
            source="hf://sentence-transformers/all-MiniLM-L6-v2@main",
            digest="ab" * 32,
            architecture="BertModel",
            head=Head.ENCODER,
            parameters=22_713_216,
            max_tokens=512,
        ),
        task=TaskName.FEATURE_EXTRACTION,
        cpu=CpuIdentity(
            vendor="AuthenticAMD",
            family=25,
            model=1,
            model_name="AMD EPYC 7763 64-Core Processor",
            isa=Isa.AVX2,
            flags=("avx2", "f16c", "fma"),
        ),
        cores=2,
        objective="p95 within 50 ms",
        chosen=ServedModel(path=f"model/{INT8.slug}/model.onnx", io=IO, plan=PLAN),
        baseline=ServedModel(path=f"model/{FP32.slug}/model.onnx", io=IO, plan=FP32_PLAN),
        candidates=candidates,
        capacity=curve,
        gemm=tuple(
            GemmShare(tokens=tokens, ceiling_gops=260, reached_gops=260 * share, share=share)
            for tokens, share in zip(LENGTHS, (0.31, 0.4, 0.55, 0.68, 0.79, 0.83, 0.82, 0.81), strict=True)
        ),
        speed_up=dict.fromkeys(LENGTHS, 1 / 0.48),
        noise=0.03,
        workload="median 44 tokens, p95 187, longest 512",
        trials=(
            PlanTrial(
                plan=PLAN, against=FP32_PLAN, promoted=True, reason="48% better by single-request latency (noise 3%)"
            ),
            PlanTrial(
                plan=PLAN.model_copy(update={"streams": 1, "threads_per_stream": 2}),
                against=PLAN,
                promoted=False,
                reason="no difference beyond the noise (3%)",
            ),
        ),
        findings=("The load generator shared the cores with the server: its own work is in the latencies.",),
        serving_rss_bytes=212_000_000,
        seconds=171.0,
        budget_seconds=600.0,
        files={f"model/{INT8.slug}/model.onnx": "00" * 32},
    )
