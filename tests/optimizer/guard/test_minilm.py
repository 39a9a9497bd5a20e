"""The guard on the real all-MiniLM-L6-v2: which recipes it accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from penstock.hardware import Isa
from penstock.manifest import GraphIO, Verdict
from penstock.recipe import EngineName, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import TaskName
from penstock_optimizer.export import Flavour
from penstock_optimizer.guard.gate import (
    arithmetic_of,
    calibration_rows,
    forward_of,
    judge_candidate,
    judging_samples,
    observe_reference,
    own_corpus,
    samples,
    split,
)
from penstock_optimizer.search.recipes import REFERENCE, candidate_recipes
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from tests.runtime import minilm

TEXTS = samples(TaskName.FEATURE_EXTRACTION, split(own_corpus())[1])
CALIBRATION = samples(TaskName.FEATURE_EXTRACTION, split(own_corpus())[0])
EVERYTHING = (tuple(EngineName), tuple(Precision))
CANDIDATES = {
    recipe.full_name: recipe
    for isa in (Isa.AVX2, Isa.AVX512_VNNI)
    for recipe in candidate_recipes(isa, *EVERYTHING).recipes
}
TUNED = [name for name in CANDIDATES if name.startswith("onnxruntime") and "compensated" in name]
SAMPLED = [
    # Each is tuned for twenty seconds. Two recipes cover both precisions, 7 bits and 8.
    pytest.param(name, marks=[pytest.mark.extended] if ("static" in name) is not ("reduced-range" in name) else [])
    for name in TUNED
]
LIMITED = "onnxruntime int8-dynamic per-channel reduced-range"
VerdictOf = Callable[[str], Verdict]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Guarded:
    """The guard with its reference."""

    verdict_of: VerdictOf
    """The verdict on a candidate by name."""
    judge: Callable[[Recipe, Path, GraphIO], Verdict]
    """The verdict on a graph of another tool."""


@pytest.fixture(scope="module")
def verdict_of(guarded: Guarded) -> VerdictOf:
    return guarded.verdict_of


@pytest.fixture(scope="module")
def guarded() -> Guarded:
    task = minilm.task()
    exported = minilm.exported(Flavour.FUSED)
    engine = load_engine(exported.path, exported.io, REFERENCE, Threads(1, 2))
    reference = observe_reference(task, forward_of(engine, exported.io), judging_samples(task, TEXTS))
    rows = calibration_rows(task, CALIBRATION)

    def judged_by(recipe: Recipe, graph: Path, io: GraphIO) -> Verdict:
        candidate = load_engine(graph, io, recipe, Threads(1, 2))
        return judge_candidate(
            task,
            forward_of(candidate, io),
            reference,
            AccuracyBudget(),
            arithmetic=arithmetic_of(recipe),
            grid=candidate.facts.grid,
        )

    @cache
    def judged(name: str) -> Verdict:
        recipe: Recipe = CANDIDATES[name]
        built = minilm.quantised(recipe, rows)
        return judged_by(recipe, built.path, built.io)

    return Guarded(judged, judged_by)


def value(verdict: Verdict, name: str) -> float:
    return next(metric.value for metric in verdict.metrics if metric.name == name)


def test_naive_dynamic_int8_is_rejected(verdict_of: VerdictOf) -> None:
    """One scale for a whole matrix costs the accuracy, on every processor: saturation is not the cause."""
    verdict = verdict_of("onnxruntime int8-dynamic")

    assert not verdict.passed
    assert value(verdict, "mean_cosine") == pytest.approx(0.947, abs=0.01)
    assert value(verdict, "p1_cosine") < 0.90
    assert value(verdict, "min_cosine") < 0.85
    assert "under the budget of 0.985" in verdict.reason


def test_per_channel_reduced_range_passes_with_a_margin(verdict_of: VerdictOf) -> None:
    verdict = verdict_of(LIMITED)

    assert verdict.passed, verdict.reason
    assert verdict.batching == "single"
    mean = next(metric for metric in verdict.metrics if metric.name == "mean_cosine")
    assert mean.value == pytest.approx(0.991, abs=0.002)
    assert mean.lower is not None
    assert mean.lower > mean.budget + 0.002
    assert value(verdict, "p1_cosine") > 0.96
    assert value(verdict, "min_cosine") > 0.93


@pytest.mark.parametrize(("per_channel", "kept"), [(True, True), (False, False)])
def test_the_same_verdicts_hold_for_graphs_of_onnx_runtimes_quantiser(
    per_channel: bool, kept: bool, guarded: Guarded, tmp_path: Path
) -> None:
    """With 7 bits for every weight, the usual remedy for processors without VNNI."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source = minilm.exported(Flavour.FUSED)
    path = tmp_path / "model.onnx"
    quantize_dynamic(
        source.path,
        path,
        op_types_to_quantize=["MatMul", "Gemm", "Attention"],
        per_channel=per_channel,
        reduce_range=True,
        weight_type=QuantType.QInt8,
    )

    verdict = guarded.judge(CANDIDATES[LIMITED], path, source.io)

    assert verdict.passed is kept, verdict.reason
    assert value(verdict, "mean_cosine") == pytest.approx(0.990 if kept else 0.84, abs=0.01)


@pytest.mark.parametrize("name", SAMPLED)
def test_tuned_int8_passes(name: str, verdict_of: VerdictOf) -> None:
    verdict = verdict_of(name)

    assert verdict.passed
    assert value(verdict, "mean_cosine") > 0.995
    assert verdict.texts == 240


@pytest.mark.parametrize("name", SAMPLED)
def test_only_recipes_whose_rows_do_not_depend_on_the_batch_may_be_batched(name: str, verdict_of: VerdictOf) -> None:
    dynamic = CANDIDATES[name].precision is Precision.INT8_DYNAMIC

    assert verdict_of(name).batching == ("single" if dynamic else "padded")


def test_openvino_reads_the_same_grids(verdict_of: VerdictOf) -> None:
    """It sums in another order at another point of its grid of shapes, which int8 makes visible."""
    verdict = verdict_of("openvino int8-static compensated per-channel smooth")

    assert verdict.passed
    assert verdict.batching == "equal-length"
    assert value(verdict, "batch_invariance_equal-length") == 0


def test_fp32_of_another_engine_is_as_good_as_the_reference(verdict_of: VerdictOf) -> None:
    verdict = verdict_of("openvino fp32")

    assert verdict.passed
    assert value(verdict, "min_cosine") > 0.99999
    assert verdict.batching == "padded"
    assert value(verdict, "batch_invariance_padded") < 1e-5
