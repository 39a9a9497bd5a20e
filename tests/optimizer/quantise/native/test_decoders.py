"""Families of decoders, and of encoders that are built like them or have a bias by distance, on the native engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from penstock.errors import OptimizationError
from penstock.tasks import Head
from penstock_bench.random_models.families import CONFIGURATIONS
from penstock_bench.random_models.writer import write_model
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.quantise import build
from penstock_optimizer.quantise.native.values import ScoreBias, distance_table
from penstock_runtime.engines.grid import feed
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Row, collate, split
from tests.optimizer.export.models import FAMILIES as ENCODERS
from tests.optimizer.export.models import make
from tests.optimizer.export.test_sparse import with_modules
from tests.optimizer.quantise.native.test_families import NEAR, RECIPE, WIDE, served
from tests.runtime.engines.native.programs import needs_library

pytestmark = [needs_library, pytest.mark.parity]
SMALL: Mapping[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 160, "vocab_size": 320, "d_model": 128, "d_kv": 32, "d_ff": 160, "num_layers": 2,
    "num_heads": 4, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32,
}  # fmt: skip
DEVIATION = 0.06
SHARP = {"t5", "gemma3"}
"""Their attention makes more of the rounding of queries and keys: T5 does not scale its scores, and Gemma normalises
the result of each attention. The same products in 8 bits in ONNX Runtime are as far from fp32."""


def small(name: str, **changes: Any) -> dict[str, Any]:
    """The family's smallest model with widths that the kernels have."""
    config = {key: SMALL.get(key, value) for key, value in CONFIGURATIONS[name].items()}
    return {**config, **changes}


def rows(*lengths: int) -> list[Row]:
    rng = np.random.default_rng(len(lengths))
    return [Row(rng.integers(10, 320, length).tolist()) for length in lengths]


def check(folder: ModelFolder, head: Head, path: Path, near: float = NEAR) -> None:
    """Near fp32, and the same bits for a row alone and among others."""
    graph = export(folder, head, path / "graph", flavour=Flavour.FUSED)
    reference = ort.InferenceSession(str(graph.path), providers=["CPUExecutionProvider"])
    some = rows(5, 17, 2, 33, 70)
    apart = []
    with served(graph, path / "native") as engine:
        together = split(engine.run(collate(some)), some, graph.io)
        for row, among_others in zip(some, together, strict=True):
            batch = collate([row])
            alone = split(engine.run(batch), [row], graph.io)[0]
            (name,) = graph.io.outputs
            (expected,) = reference.run([name], feed(batch, graph.io.inputs))
            np.testing.assert_array_equal(among_others[name], alone[name])
            assert alone[name].shape == expected[0].shape
            apart.append((alone[name].ravel(), expected.ravel()))
    found, true = (np.concatenate(side) for side in zip(*apart, strict=True))
    assert np.linalg.norm(found - true) <= near * np.linalg.norm(true)


@pytest.mark.parametrize(
    ("name", "head", "changes"),
    [
        *(pytest.param(name, Head.ENCODER, {}, id=name) for name in ("jina", "t5", "eurobert", "llama", "gemma3")),
        pytest.param("t5", Head.ENCODER, {"feed_forward_proj": "gated-gelu"}, id="t5 with gates"),
        pytest.param("jina", Head.SEQUENCE, {"num_labels": 2}, id="slopes for one query"),
        pytest.param("eurobert", Head.SEQUENCE, {"num_labels": 2}, id="the mean of the labels of each token"),
        pytest.param("eurobert", Head.SEQUENCE, {"clf_pooling": "bos"}, id="one query of a grouped attention"),
        pytest.param("llama", Head.SEQUENCE, {"num_labels": 2}, id="the last token"),
        pytest.param("llama", Head.SEQUENCE, {"pad_token_id": 9}, id="the last that is no padding"),
        pytest.param("mistral", Head.ENCODER, {"sliding_window": 8}, id="a window before the token"),
        pytest.param("qwen2", Head.TOKEN, {"num_labels": 5}, id="biases of grouped products"),
        pytest.param("qwen3", Head.ENCODER, {}, id="normalised heads"),
        pytest.param("qwen3", Head.ENCODER, {"num_key_value_heads": 1}, id="one head of keys"),
        pytest.param("gemma3", Head.ENCODER, {"use_bidirectional_attention": False}, id="gemma3 as a decoder"),
    ],
)
def test_a_family_is_near_fp32(name: str, head: Head, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", small(name, **changes), head=head, deviation=DEVIATION)

    check(folder, head, tmp_path, near=2.3 * NEAR if head is Head.SEQUENCE or name in SHARP else NEAR)


def test_heads_that_are_normalised_and_narrow_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", small("qwen3", head_dim=16), deviation=DEVIATION)
    graph = export(folder, Head.ENCODER, tmp_path / "graph", flavour=Flavour.FUSED)

    with pytest.raises(OptimizationError, match="normalised heads of 16 numbers"):
        build(RECIPE, graph.path, graph.io, (), tmp_path / "native")


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("config_class", ["BertConfig", "RobertaConfig", "DistilBertConfig", "ModernBertConfig"])
def test_the_weights_of_a_sparse_model_are_near_fp32(
    config_class: str, activation: str, pooling: str, tmp_path: Path
) -> None:
    widths = {"dim": 128, "n_heads": 2, "hidden_dim": 160} if config_class == "DistilBertConfig" else WIDE
    fields = {**ENCODERS[config_class], **widths, "vocab_size": 333, "max_position_embeddings": 80}
    made = make(tmp_path / "model", config_class, Head.MASKED_LM, **fields)
    with_modules(made.path, pooling, activation=activation)

    check(made.folder, Head.SPARSE, tmp_path)


def test_ranges_of_two_biases_are_those_of_both() -> None:
    both = ScoreBias(before=7, after=7).plus(ScoreBias(after=0))

    assert both == ScoreBias(before=7, after=0)
    assert ScoreBias(table="a").plus(ScoreBias(table="b")) is None


def test_tables_of_distances_hold_slopes_and_clipped_distances() -> None:
    slopes = distance_table(ScoreBias(kind="slopes"), np.array([-0.5, -0.25], np.float32).reshape(1, 2, 1, 1))
    clipped = distance_table(ScoreBias(kind="distances"), np.array([[1, 2, 3, 4, 5]], np.float32))

    assert slopes is not None
    assert clipped is not None
    middle = 8191
    assert slopes[:, middle - 3 : middle + 3].tolist() == [
        [-1.5, -1, -0.5, 0, -0.5, -1], [-0.75, -0.5, -0.25, 0, -0.25, -0.5]
    ]  # fmt: skip
    assert clipped[0, middle - 4 : middle + 5].tolist() == [1, 1, 1, 2, 3, 4, 5, 5, 5]
