"""`neuron.json`: its longest bucket, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from penstock.hardware import NeuronGeneration
from penstock.neuron_artefact import CompiledModel, NeuronBucket, NeuronFence


def compiled(*shapes: tuple[int, int]) -> CompiledModel:
    return CompiledModel(
        target=NeuronGeneration.INF2,
        sdk="2.31.1",
        packages={"torch-neuronx": "2.9.0.2.15.32035"},
        flags=("--model-type", "transformer"),
        model_digest="0" * 64,
        inputs=("input_ids", "attention_mask"),
        outputs=("logits",),
        weights_bytes=1,
        buckets=tuple(NeuronBucket(file=f"b{b}-t{t}.pt", batch=b, tokens=t) for b, t in shapes),
        fence=NeuronFence(max_relative_error=0.05),
    )


def test_the_longest_row_is_that_of_the_longest_bucket() -> None:
    assert compiled((4, 32), (1, 512)).longest == 512


def test_two_buckets_of_one_shape_are_refused() -> None:
    with pytest.raises(ValidationError, match="same shape"):
        compiled((1, 32), (1, 32))


@pytest.mark.parametrize("file", ["../b.pt", "/b.pt", "b.so", ".pt", "a/b.pt"])
def test_a_bucket_file_outside_the_folder_is_refused(file: str) -> None:
    with pytest.raises(ValidationError):
        NeuronBucket(file=file, batch=1, tokens=1)
