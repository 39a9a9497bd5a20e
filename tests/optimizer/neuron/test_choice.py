"""What is compiled for Inferentia: arguments, shapes by the workload and by memory, cores of a copy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UnsupportedModel
from penstock.hardware import NeuronGeneration
from penstock.resources.endpoint import Latency, ModelEndpointSpec, Objective, Throughput
from penstock_optimizer.neuron.choice import (
    BF16,
    BF16_PRODUCTS,
    FP32,
    RECIPES,
    NeuronChoice,
    arithmetic,
    choose,
    compiler_flags,
    how_many_fit,
    longest_row,
    model_shape,
    neuron_key,
    sdk_release,
)
from penstock_optimizer.neuron.published import SHAPES, ModelShape, published_rows

INF1, INF2 = NeuronGeneration.INF1, NeuronGeneration.INF2
BASE = SHAPES["bert-base"]
FAST = Objective(latency=Latency(p95_milliseconds=20))
MANY = Objective(throughput=Throughput(requests_per_second=500))


def _choose(
    target: NeuronGeneration,
    cores: int,
    objective: Objective,
    lengths: tuple[int, ...] = (100,),
    *,
    longest: int = 128,
    shape: ModelShape = BASE,
    weights_bytes: int = 2 * BASE.weights,
) -> NeuronChoice:
    return choose(
        published_rows(), target, cores, shape, objective=objective, lengths=lengths, longest=longest,
        weights_bytes=weights_bytes,
    )  # fmt: skip


def test_arguments_state_everything_that_decides_the_result() -> None:
    start = ("--target", "inf2", "--model-type", "transformer", "--auto-cast")
    assert compiler_flags(INF2, BF16) == (*start, "matmult", "--auto-cast-type", "bf16", "--optlevel", "2")
    assert compiler_flags(INF2, FP32) == (*start, "none", "--optlevel", "2")
    assert compiler_flags(INF1, BF16) == ("--fast-math", "all")
    assert compiler_flags(INF1, BF16_PRODUCTS) == ("--fast-math", "fp32-cast-matmult")
    assert compiler_flags(INF1, FP32, 16) == ("--fast-math", "none", "--neuroncore-pipeline-cores", "16")


@pytest.mark.parametrize("target", NeuronGeneration)
def test_the_last_precision_is_fp32_and_each_has_its_arithmetic(target: NeuronGeneration) -> None:
    assert RECIPES[target][-1] == FP32
    assert arithmetic(target, FP32) == "float32"
    assert arithmetic(target, BF16) == ("bf16" if target is INF1 else "bf16-products")
    names = [recipe.name for recipe in RECIPES[target]]
    assert len(set(names)) == len(names)


def test_published_choices_for_bert_base_are_reproduced() -> None:
    # Latency on Inf1: a pipeline over all cores; throughput: a copy on each core and batch 6.
    fast = _choose(INF1, 16, FAST)
    assert (fast.cores_per_model, fast.copies, fast.requests_per_copy) == (16, 1, 12)
    assert fast.others == (12, 1)
    many = _choose(INF1, 4, MANY)
    assert (many.cores_per_model, many.copies, many.requests_per_copy) == (1, 4, 2)
    assert {shape.batch for shape in many.shapes} == {1, 6}
    inf2 = _choose(INF2, 2, MANY)
    assert inf2.cores_per_model == 1
    assert inf2.figure is not None
    assert "published" in inf2.figure.basis


def test_with_both_objectives_the_best_rate_within_the_latency_is_chosen() -> None:
    both = Objective(latency=Latency(p95_milliseconds=20), throughput=Throughput(requests_per_second=500))
    figure = _choose(INF1, 4, both).figure
    assert figure is not None
    assert figure.latency_milliseconds <= 20
    unreachable = both.model_copy(update={"latency": Latency(p95_milliseconds=0.1)})
    fastest = _choose(INF1, 4, FAST).figure
    assert _choose(INF1, 4, unreachable).figure == fastest


def test_the_first_shape_holds_every_row_and_the_rest_follow_the_workload() -> None:
    chosen = _choose(INF2, 2, MANY, lengths=(20, 20, 20, 100, 500), longest=512)
    assert (chosen.shapes[0].batch, chosen.shapes[0].tokens) == (1, 512)
    assert [shape.tokens for shape in chosen.shapes[1:3]] == [32, 32]
    assert {shape.tokens for shape in chosen.shapes} == {32, 128, 512}
    assert all(shape.file == f"b{shape.batch}-t{shape.tokens}.pt" for shape in chosen.shapes)


def test_shapes_fit_into_four_fifths_of_a_core() -> None:
    # Nine shapes of BERT-base for an Inf1 core, by the SDK's bucketing note, which counts 1e9 bytes.
    assert how_many_fit(INF1, 2 * BASE.device_weights) == 9
    chosen = _choose(INF1, 4, MANY, lengths=(20, 50, 100, 200, 500), longest=512, weights_bytes=1_200_000_000)
    assert len(chosen.shapes) == how_many_fit(INF1, 1_200_000_000) == 1
    assert (chosen.shapes[0].batch, chosen.shapes[0].tokens) == (1, 512)
    assert chosen.dropped > 0
    with pytest.raises(UnsupportedModel, match="weights of 2000 MB do not fit"):
        _choose(INF1, 4, MANY, weights_bytes=2_000_000_000)


@given(
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=30),
    longest=st.sampled_from([1, 17, 64, 128, 512, 4096]),
    cores=st.sampled_from([2, 4, 12]),
)
def test_every_row_up_to_the_longest_has_a_shape(lengths: list[int], longest: int, cores: int) -> None:
    chosen = _choose(INF2, cores, MANY, lengths=tuple(lengths), longest=longest)
    assert max(shape.tokens for shape in chosen.shapes) == longest
    assert len({(shape.batch, shape.tokens) for shape in chosen.shapes}) == len(chosen.shapes)
    assert chosen.copies * chosen.cores_per_model == cores


def test_the_longest_row_is_the_stated_one_else_512_or_what_the_workload_has() -> None:
    assert longest_row(8192, None, ()) == 512
    assert longest_row(384, None, ()) == 384
    assert longest_row(8192, None, (100, 2000)) == 2000
    assert longest_row(8192, 4096, (100,)) == 4096


def test_the_shape_of_an_unknown_model_comes_from_its_configuration() -> None:
    found = model_shape({"dim": 64, "n_layers": 3}, 1000, 2000)
    assert (found.layers, found.hidden, found.weights, found.device_weights) == (3, 64, 1000, 1)


def test_the_release_of_the_sdk_is_known_for_pinned_packages_only() -> None:
    assert sdk_release(INF2, {"torch-neuronx": "2.9.0.2.15.32035"}) == "2.31.1"
    assert sdk_release(INF1, {"torch-neuron": "1.9.1.0"}) == "torch-neuron 1.9.1.0"


def test_the_key_depends_on_device_packages_model_and_workload() -> None:
    spec = ModelEndpointSpec.model_validate({"model": "hf://a/b", "task": "feature-extraction", "cores": 2})
    other = spec.model_copy(update={"workload": spec.workload.model_copy(update={"sequence_lengths": (64,)})})
    packages = {"torch-neuronx": "2.9.0.2.15.32035"}

    def key(spec: ModelEndpointSpec = spec, **changed: object) -> str:
        arguments = {"target": INF2, "packages": packages, "digest": "d", "cores": 2, **changed}
        return neuron_key(spec, **arguments)  # type: ignore[arg-type]

    keys = [key(), key(other), key(target=INF1), key(packages={}), key(digest="e"), key(cores=4)]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
