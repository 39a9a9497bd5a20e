"""Operations of one forward pass, from configurations of every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file, save_file

from penstock.tasks import Head
from penstock_optimizer.candidate.measure import EncoderShape
from penstock_optimizer.export import Flavour, export
from penstock_runtime.models.folder import ModelFolder
from tests.optimizer.end_to_end.small_model import write_small_bert

MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
DISTILBERT = {"dim": 768, "n_layers": 6, "hidden_dim": 3072}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MINILM, EncoderShape(384, 6, 1536)),
        (DISTILBERT, EncoderShape(768, 6, 3072)),
        ({"d_model": 512, "num_layers": 6, "d_ff": 2048}, EncoderShape(512, 6, 2048)),
        ({"hidden_size": 384}, None),
        ({**MINILM, "num_hidden_layers": None}, None),
    ],
)
def test_sizes_are_read_under_any_family_name(config: dict[str, Any], shape: EncoderShape | None) -> None:
    assert EncoderShape.of(config) == shape


def test_operations_equal_those_counted_by_hand() -> None:
    # One layer, hidden 2, feed-forward 8, 3 tokens: 4 projections of 3x2x2, scores 3x3x2, sums 3x3x2, 2 x 3x2x8.
    assert EncoderShape(2, 1, 8).operations(3) == 2 * (4 * 12 + 18 + 18 + 2 * 48)


def test_operations_of_minilm_at_128_tokens_are_twice_its_weights_per_token_and_attention() -> None:
    shape = EncoderShape.of(MINILM)

    assert shape is not None
    weights = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert shape.operations(128) == 2 * 128 * weights + 6 * 4 * 128 * 128 * 384
    assert shape.operations(128, rows=3) == 3 * shape.operations(128)


# The last layer of a graph that classifies

GRAPHS = [(Head.SEQUENCE, "builder", True), (Head.SEQUENCE, "torch", False), (Head.SEQUENCE, "own-onnx", False)]


@pytest.mark.parametrize(("head", "how", "first_only"), [*GRAPHS, (Head.ENCODER, "builder", False)])
def test_only_a_built_graph_for_classification_leaves_out_unread_tokens(head: Head, how: str, first_only: bool) -> None:
    assert EncoderShape.of(DISTILBERT, head=head, how=how) == EncoderShape(768, 6, 3072, first_only=first_only)


def test_of_the_last_layer_only_keys_and_values_are_of_all_tokens() -> None:
    # As above, of one token: query and output projection 2x2, scores 3x2, sums 3x2, 2 x 2x8.
    last = 2 * (2 * 12 + 2 * 4 + 6 + 6 + 2 * 16)

    assert EncoderShape(2, 1, 8, first_only=True).operations(3) == last
    assert EncoderShape(2, 3, 8, first_only=True).operations(3, rows=2) == 2 * (
        EncoderShape(2, 2, 8).operations(3) + last
    )


def test_the_count_equals_the_products_of_the_built_graphs(tmp_path: Path) -> None:
    folder = write_small_bert(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    vectors = _products(folder, Head.ENCODER, tmp_path / "a", tokens=24)
    _make_classifier(folder, config)
    classes = _products(folder, Head.SEQUENCE, tmp_path / "b", tokens=24)
    counted = [EncoderShape.of(config, head=head, how="builder") for head in (Head.ENCODER, Head.SEQUENCE)]

    assert [shape.operations(24) for shape in counted if shape is not None] == [vectors, classes]
    assert vectors > 1.5 * classes


def _make_classifier(folder: Path, config: dict[str, Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    hidden = config["hidden_size"]
    tensors = {f"bert.{name}": value for name, value in tensors.items()}
    tensors |= {"classifier.weight": np.ones((2, hidden), np.float32), "classifier.bias": np.zeros(2, np.float32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))


def _products(folder: Path, head: Head, out: Path, *, tokens: int) -> int:
    """Operations of the matrix products of the layers of the built graph, by the shapes that they really have."""
    path = export(ModelFolder.open(folder), head, out, flavour=Flavour.PLAIN).path
    model = onnx.load(path)
    products = [node for node in model.graph.node if node.op_type == "MatMul" and node.name.startswith("layer.")]
    constants = {one.name: tuple(one.dims) for one in model.graph.initializer}
    seen = {name for node in products for name in (node.input[0], node.output[0])} - constants.keys()
    shown = {one.name for one in model.graph.output}
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in sorted(seen - shown))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {one.name: np.ones((1, tokens), np.int64) for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    found = dict(zip(names, session.run(names, feed), strict=True))
    return sum(2 * found[node.output[0]].size * found[node.input[0]].shape[-1] for node in products)
