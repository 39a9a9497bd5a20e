"""The guard on the real all-MiniLM-L6-v2: what it lets through, and what not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from penstock.endpoint import AccuracyBudget
from penstock.hardware import Isa
from penstock.manifest import Verdict
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import TaskName
from penstock_optimizer.calibration import calibration_rows, judging_samples, own_corpus, samples, split
from penstock_optimizer.export import Flavour
from penstock_optimizer.guard import forward_of, guard_candidate, teach
from penstock_optimizer.quantise import build
from penstock_optimizer.recipes import TEACHER, candidate_recipes
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from tests.runtime import minilm

TEXTS = samples(TaskName.FEATURE_EXTRACTION, split(own_corpus())[1])
CALIBRATION = samples(TaskName.FEATURE_EXTRACTION, split(own_corpus())[0])
EVERYTHING = (tuple(EngineName), tuple(Precision))
CANDIDATES = {
    recipe.name: recipe for isa in (Isa.AVX2, Isa.AVX512_VNNI) for recipe in candidate_recipes(isa, *EVERYTHING).recipes
}
TUNED = [name for name in CANDIDATES if name.startswith("onnxruntime") and "reduced-range" in name]
VerdictOf = Callable[[str], Verdict]


@pytest.fixture(scope="module")
def verdict_of(tmp_path_factory: pytest.TempPathFactory) -> VerdictOf:
    task = minilm.task()
    exported = minilm.exported(Flavour.FUSED)
    engine = load_engine(exported.path, exported.io, TEACHER, Threads(1, 2))
    teacher = teach(task, forward_of(engine, exported.io), judging_samples(task, TEXTS))
    rows = calibration_rows(task, CALIBRATION)

    @cache
    def judged(name: str) -> Verdict:
        recipe: Recipe = CANDIDATES[name]
        source = minilm.exported(Flavour.FUSED if recipe.engine is EngineName.ONNXRUNTIME else Flavour.PLAIN)
        built = build(recipe, source.path, source.io, rows, tmp_path_factory.mktemp(recipe.slug), threads=2)
        candidate = load_engine(built.path, built.io, recipe, Threads(1, 2))
        return guard_candidate(task, forward_of(candidate, built.io), teacher, AccuracyBudget())

    return judged


def value(verdict: Verdict, name: str) -> float:
    return next(metric.value for metric in verdict.metrics if metric.name == name)


def test_naive_dynamic_int8_is_rejected(verdict_of: VerdictOf) -> None:
    """A scale for a whole matrix costs the accuracy, on every processor: saturation has no part in it."""
    verdict = verdict_of("onnxruntime int8-dynamic")

    assert not verdict.passed
    assert value(verdict, "mean_cosine") < 0.96
    assert value(verdict, "p1_cosine") < 0.90
    assert "under the budget of 0.985" in verdict.reason


@pytest.mark.parametrize("name", TUNED)
def test_tuned_int8_is_kept(name: str, verdict_of: VerdictOf) -> None:
    verdict = verdict_of(name)

    assert verdict.passed
    assert value(verdict, "mean_cosine") > 0.995
    assert verdict.texts == 240


@pytest.mark.parametrize("name", TUNED)
def test_only_what_does_not_depend_on_its_company_may_be_batched(name: str, verdict_of: VerdictOf) -> None:
    dynamic = CANDIDATES[name].precision is Precision.INT8_DYNAMIC

    assert verdict_of(name).batching == ("single" if dynamic else "padded")


def test_openvino_reads_the_same_grids(verdict_of: VerdictOf) -> None:
    verdict = verdict_of("openvino int8-static compensated per-channel smooth")

    assert verdict.passed
    assert verdict.batching == "padded"


def test_fp32_of_another_engine_is_as_good_as_the_teacher(verdict_of: VerdictOf) -> None:
    verdict = verdict_of("openvino fp32")

    assert verdict.passed
    assert value(verdict, "min_cosine") > 0.99999
    assert verdict.batching == "padded"
