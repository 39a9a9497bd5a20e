"""The pure parts: distances, graphs, weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from penstock_optimizer.export.build.graph import Graph
from penstock_optimizer.export.families.bert import distance_bias
from penstock_optimizer.export.families.deberta import log_buckets
from penstock_optimizer.export.families.t5 import BUCKETS, distance_buckets
from penstock_optimizer.export.reader import Weights
from penstock_optimizer.export.transformer import BY_NAME, Activation
from penstock_runtime.models.folder import ModelFolder


def test_every_distance_falls_into_the_bucket_that_transformers_gives_it() -> None:
    distances = np.arange(-3000, 3001)

    expected = MPNetEncoder.relative_position_bucket(torch.from_numpy(distances)).numpy()

    np.testing.assert_array_equal(distance_buckets(distances), expected)


@pytest.mark.parametrize(("buckets", "furthest"), [(256, 512), (256, 1024), (8, 40), (10, 100), (2, 64), (15, 512)])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_every_distance_of_a_deberta_falls_into_the_bucket_that_transformers_gives_it(
    buckets: int, furthest: int
) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distances = np.arange(-furthest, furthest + 1)

    expected = make_log_bucket_position(torch.from_numpy(distances), buckets, furthest).numpy()

    np.testing.assert_array_equal(log_buckets(distances, buckets, furthest), expected)


@given(st.integers(-(10**6), 10**6))
def test_buckets_are_within_the_table_and_differ_between_directions(distance: int) -> None:
    bucket = int(distance_buckets(np.array([distance]))[0])

    assert 0 <= bucket < BUCKETS
    assert (bucket >= BUCKETS // 2) == (distance > 0)


def test_the_bias_depends_on_the_distance_alone() -> None:
    bias = distance_bias(np.arange(BUCKETS * 2, dtype=np.float32).reshape(BUCKETS, 2), 20)

    assert bias.shape == (1, 2, 20, 20)
    np.testing.assert_array_equal(bias[0, :, 1:, 1:], bias[0, :, :-1, :-1])


def test_every_activation_has_a_name() -> None:
    assert set(BY_NAME.values()) == set(Activation)


def saved(graph: Graph, path: Path) -> Any:
    graph.save(path)
    return onnx.load(str(path))


def test_a_shared_array_is_written_once_and_equal_ones_twice(tmp_path: Path) -> None:
    graph = Graph("test")
    array, equal = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)

    names = [graph.constant(array, "a"), graph.constant(array, "b"), graph.constant(equal, "c")]

    assert names == ["a", "a", "c"]
    assert [tensor.name for tensor in saved(graph, tmp_path / "g.onnx").graph.initializer] == ["a", "c"]


def test_a_derived_tensor_is_made_once_for_each_role() -> None:
    graph = Graph("test")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    made: list[str] = []

    def make(role: str) -> np.ndarray[Any, Any]:
        made.append(role)
        return array.T

    names = [graph.derived([array], role, "weight", partial(make, role)) for role in ("x", "y", "x")]

    assert names == ["weight", "weight.2", "weight"]
    assert made == ["x", "y"]


def test_nodes_of_one_name_get_different_names() -> None:
    graph = Graph("test")
    x = graph.input("x", ["batch"])

    assert [graph.node("Neg", [x], "neg") for _ in range(3)] == ["neg", "neg.2", "neg.3"]


@pytest.mark.parametrize(("stored", "exact"), [("F32", True), ("F16", True), ("BF16", True), ("F64", False)])
def test_weights_are_widened_without_loss(stored: str, exact: bool, tmp_path: Path) -> None:
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    values = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(kinds[stored])
    weights = weights_of(tmp_path, {"pad": torch.zeros(3, dtype=torch.float16), "x.gamma": values})

    taken = weights.take("x.weight", (5, 7))

    assert taken.dtype == np.float32
    np.testing.assert_array_equal(taken, values.float().numpy())
    assert exact == np.array_equal(taken.astype(np.float64), values.double().numpy())
    assert weights.take("x.weight", (5, 7)) is taken
    assert weights.parameters == 35


def test_an_empty_tensor_is_accepted(tmp_path: Path) -> None:
    assert weights_of(tmp_path, {"types": torch.zeros(0, 4)}).take("types", (0, 4)).shape == (0, 4)


def weights_of(path: Path, tensors: dict[str, torch.Tensor]) -> Weights:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return Weights(ModelFolder.open(path))
