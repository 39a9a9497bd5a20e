"""Which layers of a graph are quantised, and which are quantised together."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import helper

from penstock_optimizer.quantise.linear import LinearGraph
from tests.optimizer.quantise import graphs


def names(graph: LinearGraph) -> list[list[str]]:
    return [[node.name for node in group.nodes] for group in graph.groups]


def test_products_of_one_input_are_a_group_and_a_small_last_layer_is_left_alone() -> None:
    assert names(LinearGraph(graphs.feed_forward())) == [["up", "gate"], ["down"]]


def test_products_that_share_a_weight_are_a_group() -> None:
    assert names(LinearGraph(graphs.tied())) == [["first", "second"]]


def test_groups_that_share_a_later_node_are_merged() -> None:
    model = graphs.model(
        [
            helper.make_node("MatMul", ["x", "v"], ["a"], "a"),
            helper.make_node("Relu", ["x"], ["r"], "relu"),
            helper.make_node("MatMul", ["r", "w"], ["b"], "b"),
            helper.make_node("MatMul", ["r", "v"], ["y"], "c"),
        ],
        {"v": graphs.weight(128, 128, 1), "w": graphs.weight(128, 128, 2)},
    )

    assert [sorted(group) for group in names(LinearGraph(model))] == [["a", "b", "c"]]


def test_a_fused_attention_is_a_linear_layer() -> None:
    assert names(LinearGraph(graphs.attention())) == [["attention"], ["out"]]


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (helper.make_node("MatMul", ["x", "x"], ["y"], "n"), "no constant weight"),
        (helper.make_node("MatMul", ["w", "w"], ["y"], "n"), "no activation"),
        (helper.make_node("MatMul", ["x", "thin"], ["y"], "n"), "few outputs"),
        (helper.make_node("MatMul", ["x", "stack"], ["y"], "n"), "three axes"),
        (helper.make_node("Gemm", ["x", "w"], ["y"], "n", alpha=0.5), "a factor"),
        (helper.make_node("Gemm", ["x", "w"], ["y"], "n", transA=1), "a transposed input"),
        (helper.make_node("Gemm", ["x", "w", "x"], ["y"], "n"), "a bias that is computed"),
        (helper.make_node("Conv", ["x", "w"], ["y"], "n"), "another operator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nodes_that_are_not_a_plain_product_with_a_weight_are_left_unchanged(node: Any, why: str) -> None:
    constants = {
        "w": graphs.weight(128, 128, 1),
        "thin": graphs.weight(2048, 8, 2),
        "stack": graphs.weight(128, 256, 3).reshape(2, 128, 128),
    }

    assert LinearGraph(graphs.model([node], constants)).groups == ()


@pytest.mark.parametrize("extra", [{"inputs": ["", "", "x"]}, {"attributes": {"qkv_hidden_sizes": [128, 128, 128]}}])
def test_an_attention_that_the_int8_operator_does_not_support_is_left_unchanged(extra: dict[str, Any]) -> None:
    graph = graphs.attention(**extra.get("attributes", {}))
    node = next(node for node in graph.graph.node if node.op_type == "Attention")
    node.input.extend(extra.get("inputs", []))

    assert names(LinearGraph(graph)) == [["out"]]


def test_weights_of_another_type_are_left_alone() -> None:
    graph = graphs.tied()
    graph.graph.initializer[1].data_type = onnx.TensorProto.FLOAT16

    assert LinearGraph(graph).groups == ()
