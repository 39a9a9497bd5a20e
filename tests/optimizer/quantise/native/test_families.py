"""Every family of the builder with every head on the native engine: near fp32, with the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from penstock.errors import OptimizationError
from penstock.manifest import Axes
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import Head
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.export.reader import Exported
from penstock_optimizer.quantise import build
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.engines.grid import feed
from penstock_runtime.engines.load import load_engine
from penstock_runtime.rows import Float, Row, collate, split
from tests.optimizer.export.models import ENCODER_HEADS, FAMILIES, MASK_ID, PAD_ID, SMALL, VOCABULARY, make
from tests.runtime.engines.native.programs import needs_library

pytestmark = [needs_library, pytest.mark.parity]
RECIPE = Recipe(engine=EngineName.NATIVE, precision=Precision.INT8_ROWWISE, options=("per-channel",))
WIDE: Mapping[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 160}
"""Widths that the kernels have, and products that are worth quantising."""
NEAR = 0.03
"""Of an answer's size: what 8 bits in every product of a small random model may change."""
ENOUGH = 40
"""Numbers to judge that by. One label's logit is small in some random models, compared with the same error."""


class MaskedRow(Row):
    """A row that knows its masks."""

    @property
    def masks(self) -> tuple[int, ...]:
        """Their positions."""
        return tuple(index for index, number in enumerate(self.ids) if number == MASK_ID)


def fields(config_class: str, **changes: Any) -> dict[str, Any]:
    """A family's smallest model with widths that fit."""
    if config_class == "DistilBertConfig":
        return {**FAMILIES[config_class], "dim": 128, "n_heads": 2, "hidden_dim": 160, **changes}
    if config_class == "ModernBertConfig":
        changes = {"num_hidden_layers": 2, **changes}  # as many as the others have: the first is global
    narrow = {"embedding_size": 32} if "embedding_size" in FAMILIES[config_class] else {}
    return {**FAMILIES[config_class], **WIDE, **narrow, **changes}


def rows(*lengths: int) -> list[Row]:
    """Tokens of the vocabulary, no padding among them, a mask or two in each."""
    rng = np.random.default_rng(len(lengths))
    made: list[Row] = []
    for length in lengths:
        ids = rng.integers(MASK_ID + 1, VOCABULARY, length)
        ids[rng.integers(0, length, 2)] = MASK_ID
        made.append(MaskedRow(ids.tolist()))
    return made


@contextmanager
def served(graph: Exported, folder: Path) -> Iterator[Engine]:
    """The graph on the native engine."""
    engine = load_engine(build(RECIPE, graph.path, graph.io, (), folder).path, graph.io, RECIPE, Threads(1, 2))
    try:
        yield engine
    finally:
        engine.close()


def answers(
    folder: Path, config_class: str, head: Head, seed: int, *, lengths: Sequence[int], **changes: Any
) -> tuple[Float, Float]:
    """All numbers that one model answers some rows with, and fp32's: the same bits for a row alone and among others."""
    made = make(folder / "model", config_class, head, seed=seed, **fields(config_class, **changes))
    graph = export(made.folder, head, folder / "graph", flavour=Flavour.FUSED)
    reference = ort.InferenceSession(str(graph.path), providers=["CPUExecutionProvider"])
    some = rows(*lengths)
    apart: list[tuple[Float, Float]] = []
    with served(graph, folder / "native") as engine:
        together = split(engine.run(collate(some)), some, graph.io)
        for row, among_others in zip(some, together, strict=True):
            batch = collate([row])
            alone = split(engine.run(batch), [row], graph.io)[0]
            true = reference.run(list(graph.io.outputs), feed(batch, graph.io.inputs))
            for (name, axes), expected in zip(graph.io.outputs.items(), true, strict=True):
                np.testing.assert_array_equal(among_others[name], alone[name])
                wanted = expected if axes is Axes.MASKS else expected[0]
                assert alone[name].shape == wanted.shape
                apart.append((alone[name].ravel(), wanted.ravel()))
    found, true = (np.concatenate(side) for side in zip(*apart, strict=True))
    return found, true


def check(
    folder: Path, config_class: str, head: Head, *, lengths: Sequence[int] = (5, 17, 2, 33, 9), **changes: Any
) -> None:
    """One model, or as many as give enough numbers: near to fp32."""
    found = true = np.empty(0, np.float32)
    for seed in range(ENOUGH):
        if found.size >= ENOUGH:
            break
        more = answers(folder / str(seed), config_class, head, seed, lengths=lengths, **changes)
        found, true = np.append(found, more[0]), np.append(true, more[1])
    assert found.size >= ENOUGH
    assert np.linalg.norm(found - true) <= NEAR * np.linalg.norm(true)


@pytest.mark.parametrize("head", ENCODER_HEADS)
@pytest.mark.parametrize("config_class", FAMILIES)
def test_every_family_and_head_is_near_fp32(config_class: str, head: Head, tmp_path: Path) -> None:
    if config_class == "AlbertConfig":
        check(tmp_path, config_class, head, hidden_act="gelu")
    else:
        check(tmp_path, config_class, head)


@pytest.mark.parametrize(
    ("config_class", "head", "changes"),
    [
        pytest.param("BertConfig", Head.SEQUENCE, {"num_labels": 1}, id="one label"),
        pytest.param("MPNetConfig", Head.SEQUENCE, {"num_labels": 1}, id="one label after a bias on the scores"),
        pytest.param("RobertaConfig", Head.TOKEN, {"num_labels": 1}, id="one label a token"),
        pytest.param("BertConfig", Head.TOKEN, {"num_labels": 150}, id="labels that fill no panel"),
        pytest.param("BertConfig", Head.SEQUENCE, {"num_labels": 160}, id="labels that fill whole panels"),
        pytest.param("BertConfig", Head.MASKED_LM, {"vocab_size": 301}, id="a vocabulary in 8 bits"),
        pytest.param("ElectraConfig", Head.MASKED_LM, {"vocab_size": 601}, id="one over narrower embeddings"),
        pytest.param("MPNetConfig", Head.MASKED_LM, {"vocab_size": 320}, id="a vocabulary that fills whole panels"),
        pytest.param("BertConfig", Head.MASKED_LM, {"tie_word_embeddings": False}, id="untied"),
        pytest.param("AlbertConfig", Head.SPAN, {"hidden_act": "gelu_new"}, id="GELU by tanh"),
        pytest.param("AlbertConfig", Head.MASKED_LM, {"hidden_act": "gelu_new"}, id="GELU by tanh, and in the head"),
        pytest.param("BertConfig", Head.ENCODER, {"hidden_act": "relu"}, id="ReLU"),
        pytest.param("BertConfig", Head.ENCODER, {"hidden_act": "tanh"}, id="tanh"),
        pytest.param("BertConfig", Head.SPAN, {"type_vocab_size": 1}, id="one type"),
        pytest.param("RobertaConfig", Head.SPAN, {"pad_token_id": 0}, id="positions from another padding id on"),
        pytest.param("RobertaConfig", Head.ENCODER, {"pad_token_id": 3}, id="positions from further on"),
        pytest.param("MPNetConfig", Head.ENCODER, {"num_attention_heads": 8}, id="heads of 16"),
        pytest.param("MPNetConfig", Head.ENCODER, {"num_attention_heads": 1}, id="a head of 128"),
        pytest.param("MPNetConfig", Head.SPAN, {"max_position_embeddings": 300}, id="more distances than buckets"),
        pytest.param("MPNetConfig", Head.ENCODER, {"num_hidden_layers": 1}, id="one layer"),
        pytest.param("ModernBertConfig", Head.SEQUENCE, {"num_labels": 1}, id="one label by one query of a window"),
        pytest.param("ModernBertConfig", Head.SEQUENCE, {"classifier_pooling": "mean"}, id="the mean of the tokens"),
        pytest.param("ModernBertConfig", Head.ENCODER, {"num_attention_heads": 8}, id="rotary heads of 16"),
        pytest.param("ModernBertConfig", Head.ENCODER, {"num_attention_heads": 1}, id="a rotary head of 128"),
        pytest.param(
            "ModernBertConfig", Head.ENCODER, {"attention_bias": True, "mlp_bias": True}, id="biases before angles"
        ),
        pytest.param("ModernBertConfig", Head.TOKEN, {"hidden_activation": "silu"}, id="SwiGLU"),
        pytest.param("ModernBertConfig", Head.SPAN, {"hidden_activation": "relu"}, id="a gate of ReLU"),
        pytest.param("ModernBertConfig", Head.MASKED_LM, {"decoder_bias": False}, id="a vocabulary without bias"),
        pytest.param(
            "MPNetConfig", Head.SEQUENCE, {"num_hidden_layers": 1}, id="one layer, of whose queries one is read"
        ),
    ],
)
def test_an_unusual_configuration_is_near_fp32(
    config_class: str, head: Head, changes: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, config_class, head, **changes)


@pytest.mark.parametrize("config_class", ["BertConfig", "MPNetConfig"])
def test_a_batch_without_masks_has_no_logits(config_class: str, tmp_path: Path) -> None:
    made = make(tmp_path / "model", config_class, Head.MASKED_LM, **fields(config_class))
    graph = export(made.folder, Head.MASKED_LM, tmp_path / "graph", flavour=Flavour.FUSED)
    with served(graph, tmp_path / "native") as engine:
        assert engine.run(collate([Row([7, 8, 9])]))["logits"].shape == (0, VOCABULARY)
        assert engine.run(collate([Row([7, MASK_ID, MASK_ID])]))["logits"].shape == (2, VOCABULARY)


def test_a_padding_token_within_a_text_takes_no_position(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "MPNetConfig", Head.ENCODER, **fields("MPNetConfig"))
    graph = export(made.folder, Head.ENCODER, tmp_path / "graph", flavour=Flavour.FUSED)
    batch = collate([Row([7, 8, PAD_ID, 9, 10])])
    reference = ort.InferenceSession(str(graph.path), providers=["CPUExecutionProvider"])
    (true,) = reference.run(None, feed(batch, graph.io.inputs))
    with served(graph, tmp_path / "native") as engine:
        (found,) = engine.run(batch).values()
    assert np.linalg.norm(found - true) <= NEAR * np.linalg.norm(true)


@pytest.mark.parametrize("activation", ["silu", "relu2", "quick_gelu", "sigmoid"])
def test_an_unsupported_activation_is_refused_with_its_operator(activation: str, tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **{**SMALL, **WIDE, "hidden_act": activation})
    graph = export(made.folder, Head.ENCODER, tmp_path / "graph", flavour=Flavour.FUSED)

    with pytest.raises(OptimizationError, match="does not know"):
        build(RECIPE, graph.path, graph.io, (), tmp_path / "native")
