"""Rows through compiled shapes: padded to one that holds them, and back."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import HostError
from penstock.hardware import NeuronGeneration
from penstock.manifest import GRAPH_OUTPUTS, Axes, GraphIO
from penstock.neuron_artefact import NeuronBucket
from penstock.tasks import Head
from penstock_optimizer.neuron.session import NeuronToolchain, SourceModel, at_masks, padded, trimmed
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Batch, Row, collate
from tests.neuron_standin_env import StandIn
from tests.optimizer.end_to_end.small_model import write_small_bert

SHAPES = tuple(
    NeuronBucket(file=f"b{rows}-t{tokens}.pt", batch=rows, tokens=tokens) for tokens in (8, 32) for rows in (1, 6)
)


def _batch(rows: int, tokens: int) -> Batch:
    return collate([Row([*range(1 + row, tokens + 1 + row)]) for row in range(rows)])


@given(rows=st.integers(1, 20), tokens=st.integers(1, 32))
def test_parts_have_a_compiled_shape_and_give_the_batch_back(rows: int, tokens: int) -> None:
    batch = _batch(rows, tokens)
    parts = list(padded(batch, SHAPES))
    assert all(whole.input_ids.shape in {(one.batch, one.tokens) for one in SHAPES} for _, whole in parts)
    back = [trimmed(whole.input_ids, Axes.TOKENS, part) for part, whole in parts]
    np.testing.assert_array_equal(np.concatenate(back), batch.input_ids)
    assert all(not whole.attention_mask[len(part.input_ids) :].any() for part, whole in parts)


def test_a_batch_takes_the_smallest_shape_that_holds_it() -> None:
    ((_, whole),) = padded(_batch(2, 5), SHAPES)
    assert whole.input_ids.shape == (6, 8)
    ((_, whole),) = padded(_batch(1, 9), SHAPES)
    assert whole.input_ids.shape == (1, 32)


def test_logits_of_mask_tokens_are_kept_row_by_row() -> None:
    batch = collate([Row([1, 9, 3]), Row([9, 2, 9])])
    logits = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    io = GraphIO(inputs=("input_ids",), outputs={"logits": Axes.MASKS})
    kept = at_masks({"logits": logits}, io, batch, 9)["logits"]
    np.testing.assert_array_equal(kept, [logits[0, 1], logits[1, 0], logits[1, 2]])
    io = GraphIO(inputs=("input_ids",), outputs={"logits": Axes.TOKENS})
    assert at_masks({"logits": logits}, io, batch, None)["logits"].shape == logits.shape


@pytest.mark.parametrize(
    ("head", "class_name"),
    [
        (Head.ENCODER, "AutoModel"),
        (Head.SEQUENCE, "AutoModelForSequenceClassification"),
        (Head.TOKEN, "AutoModelForTokenClassification"),
        (Head.SPAN, "AutoModelForQuestionAnswering"),
        (Head.MASKED_LM, "AutoModelForMaskedLM"),
        (Head.SPARSE, "AutoModelForMaskedLM"),
    ],
)
def test_each_head_is_loaded_as_its_class(head: Head, class_name: str, tmp_path: Path) -> None:
    folder = ModelFolder.open(write_small_bert(tmp_path / "model"))
    io = GraphIO(inputs=("input_ids", "attention_mask"), outputs=dict(GRAPH_OUTPUTS[head]))
    arguments = SourceModel(folder, head, io).arguments
    assert arguments["model_class"] == class_name
    assert arguments["outputs"] == list(GRAPH_OUTPUTS[head])
    assert (arguments["sparse"] is not None) == (head is Head.SPARSE)


def test_an_interpreter_without_the_sdk_is_an_error_that_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="compiling for inf2 needs torch-neuronx, neuronx-cc") as error:
        NeuronToolchain.read(NeuronGeneration.INF2, Path(sys.executable))
    assert "optimizer-neuron" in error.value.remedy
    with pytest.raises(HostError, match="does not start"):
        NeuronToolchain.read(NeuronGeneration.INF2, tmp_path / "nothing")


def test_a_package_for_other_devices_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin = StandIn.make(tmp_path, "inf2", torch_neuronx="2.13.0.1")
    for name, value in standin.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HostError, match=r"torch-neuronx 2\.13\.0\.1 does not support Inf2"):
        NeuronToolchain.read(NeuronGeneration.INF2, Path(sys.executable))
