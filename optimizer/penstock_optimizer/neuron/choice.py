"""What to compile for Inferentia: precisions with their compiler arguments, shapes, cores of a copy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.hardware import NeuronGeneration
from penstock.neuron_artefact import NeuronBucket
from penstock.recipe import EngineName, Precision, Recipe
from penstock.resources.endpoint import ModelEndpointSpec, Objective
from penstock_optimizer.candidate.work_folder import result_key
from penstock_optimizer.neuron.plans import (
    NeuronCandidate,
    NeuronFigure,
    NeuronGoal,
    buckets,
    candidates,
    figures_for,
    rank,
)
from penstock_optimizer.neuron.published import Mode, ModelShape, PublishedFigure

MATMULT = "fp32-cast-matmult"
"""Option of a recipe for Inf1: only matrix products are in bfloat16."""
BF16 = Recipe(engine=EngineName.NEURON, precision=Precision.BF16)
BF16_PRODUCTS = Recipe(engine=EngineName.NEURON, precision=Precision.BF16, options=(MATMULT,))
FP32 = Recipe(engine=EngineName.NEURON, precision=Precision.FP32)
RECIPES = {NeuronGeneration.INF2: (BF16, FP32), NeuronGeneration.INF1: (BF16, BF16_PRODUCTS, FP32)}
"""In the order that they are tried: the first that the guard accepts is compiled."""
_FAST_MATH = {BF16: "all", BF16_PRODUCTS: MATMULT, FP32: "none"}
USUAL_TOKENS = 512
"""Longest compiled length where neither endpoint nor workload states another one: each length takes minutes."""
CORE_BYTES = {NeuronGeneration.INF1: 2 * 2**30, NeuronGeneration.INF2: 16 * 2**30}
"""Device memory of a NeuronCore: 8 GiB for four, 32 GiB for two."""
USABLE_SHARE = 0.8
CODE_BYTES = 5_000_000
"""Device memory of a compiled model besides its weights: 4.4 MB of a published one, rounded up."""
SDK_RELEASES = {"torch-neuronx 2.9.0.2.15.32035": "2.31.1", "torch-neuron 1.13.1.2.11.13.0": "2.20.0"}
"""Releases of the Neuron SDK, by the package that they brought."""
PACKAGE = {NeuronGeneration.INF2: "torch-neuronx", NeuronGeneration.INF1: "torch-neuron"}


def sdk_release(target: NeuronGeneration, packages: Mapping[str, str]) -> str:
    """The SDK's release, or the package's version where that is not a known one."""
    package = f"{PACKAGE[target]} {packages[PACKAGE[target]]}"
    return SDK_RELEASES.get(package, package)


def compiler_flags(target: NeuronGeneration, recipe: Recipe, cores: int = 1) -> tuple[str, ...]:
    """The compiler's arguments, with everything stated that decides the result: defaults change between releases."""
    if target is NeuronGeneration.INF1:
        pipeline = ("--neuroncore-pipeline-cores", str(cores)) if cores > 1 else ()
        return ("--fast-math", _FAST_MATH[recipe], *pipeline)
    cast = ("matmult", "--auto-cast-type", "bf16") if recipe.precision is Precision.BF16 else ("none",)
    return ("--target", "inf2", "--model-type", "transformer", "--auto-cast", *cast, "--optlevel", "2")


def arithmetic(target: NeuronGeneration, recipe: Recipe) -> str:
    """The name in `Child.answers` of the arithmetic that the compiler's arguments select."""
    if recipe.precision is Precision.FP32:
        return "float32"
    return "bf16" if target is NeuronGeneration.INF1 and recipe == BF16 else "bf16-products"


def longest_row(model_tokens: int, stated: int | None, workload: Sequence[int]) -> int:
    """Tokens of the longest compiled row: as the endpoint states it, else as the workload needs it, usually 512."""
    return stated or min(model_tokens, max(USUAL_TOKENS, *workload, 1))


@dataclass(frozen=True)
class NeuronChoice:
    """What to compile: copies over how many cores, for which shapes."""

    target: NeuronGeneration
    cores: int
    """Granted NeuronCores."""
    cores_per_model: int
    others: tuple[int, ...]
    """Cores of a copy to try when the compiler refuses that number, in this order."""
    shapes: tuple[NeuronBucket, ...]
    """In the order to compile them: with the first, all rows can be served."""
    figure: NeuronFigure | None = None
    """Published or estimated throughput of this choice; None where there is none."""
    dropped: int = 0
    """Shapes that were left out, so that the rest fits into a core's memory."""

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return self.cores // self.cores_per_model

    @property
    def requests_per_copy(self) -> int:
        """Runs in progress: 2 hide the host's time; a pipeline has one for each of its stages that are busy."""
        return 2 if self.cores_per_model == 1 else 4 + (self.cores_per_model - 4) * 8 // 12

    def over(self, cores_per_model: int) -> NeuronChoice:
        """The same with copies over another number of cores."""
        return replace(self, cores_per_model=cores_per_model, others=())


def choose(
    rows: Iterable[PublishedFigure],
    target: NeuronGeneration,
    cores: int,
    shape: ModelShape,
    *,
    objective: Objective,
    lengths: Sequence[int],
    longest: int,
    weights_bytes: int,
) -> NeuronChoice:
    """The planner's best for the objective, and shapes for the workload's `lengths` (tokens, as often as they occur).

    `shape`: what times are estimated for; `weights_bytes`: of this model, on the device. UnsupportedModel when one
    shape alone does not fit into a core's memory.
    """
    compiled = buckets((min(length, longest) for length in lengths), longest=longest)
    typical = next(tokens for tokens in compiled if tokens >= min(median(lengths), longest))
    figures = figures_for(rows, target, cores, shape, typical)
    best = best_figure(figures, objective)
    candidate = best.candidate if best is not None else NeuronCandidate(Mode.DATA_PARALLEL, 1, 1)
    each = candidate.cores_per_model
    others = dict.fromkeys(one.cores_per_model for one in candidates(target, cores, shape.device_weights))
    order = [one for one in others if one not in {1, each}]
    fitting = how_many_fit(target, weights_bytes // each)
    if not fitting:
        raise UnsupportedModel(
            f"weights of {weights_bytes / 1e6:.0f} MB do not fit into 80 % of the memory of {each} NeuronCores of "
            f"{target.value}",
            remedy="Take a smaller model, or a class with larger devices",
        )
    wanted = _in_order(compiled, candidate.batch, lengths)
    return NeuronChoice(
        target, cores, each, (*order, 1) if each > 1 else (), wanted[:fitting], best, dropped=len(wanted[fitting:])
    )


def how_many_fit(target: NeuronGeneration, weights_bytes: int) -> int:
    """How many shapes fit into 80 % of a core's memory: each has a copy of the weights."""
    return int(CORE_BYTES[target] * USABLE_SHARE) // (weights_bytes + CODE_BYTES)


def best_figure(figures: Sequence[NeuronFigure], objective: Objective) -> NeuronFigure | None:
    """The best for an endpoint's objective; None of none."""
    if not figures:
        return None
    latency, throughput = objective.latency, objective.throughput
    if latency is not None and throughput is not None:
        within = [one for one in figures if one.latency_milliseconds <= latency.p95_milliseconds]
        goal = NeuronGoal.THROUGHPUT if within else NeuronGoal.LATENCY
        return rank(within or figures, goal)[0]
    return rank(figures, NeuronGoal.LATENCY if latency is not None else NeuronGoal.THROUGHPUT)[0]


def _in_order(compiled: Sequence[int], batch: int, lengths: Sequence[int]) -> tuple[NeuronBucket, ...]:
    """All shapes, first the one that holds every row alone, then by how many of the `lengths` use their length."""

    def used(tokens: int) -> int:
        shorter = max((one for one in compiled if one < tokens), default=0)
        return sum(shorter < length <= tokens for length in lengths)

    first = (1, compiled[-1])
    rest = [(rows, tokens) for tokens in sorted(compiled, key=used, reverse=True) for rows in sorted({1, batch})]
    order = dict.fromkeys((first, *rest))
    return tuple(NeuronBucket(file=f"b{rows}-t{tokens}.pt", batch=rows, tokens=tokens) for rows, tokens in order)


def model_shape(config: Mapping[str, Any], weights: int, embedding_weights: int) -> ModelShape:
    """The shape of a model that has no published family, from its configuration."""

    def number(*names: str, otherwise: int) -> int:
        found = (config.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), otherwise)

    return ModelShape(
        "",
        layers=number("num_hidden_layers", "n_layers", "num_layers", otherwise=12),
        hidden=number("hidden_size", "dim", "d_model", otherwise=768),
        weights=weights,
        embedding_weights=min(embedding_weights, weights - 1),
    )


def neuron_key(
    spec: ModelEndpointSpec, *, target: NeuronGeneration, packages: Mapping[str, str], digest: str, cores: int
) -> str:
    """sha256, hexadecimal, of all that decides the result. The CPU of the compiling host is not part of it."""
    parts = {
        "target": target.value,
        "packages": dict(packages),
        "cores": cores,
        "flags": [compiler_flags(target, recipe) for recipe in RECIPES[target]],
        "precisions": sorted(precision.value for precision in spec.optimization.precisions),
    }
    return result_key(spec, digest, parts)
