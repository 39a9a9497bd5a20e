"""Each refusal of a folder with weights is followed to a model that answers as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.errors import ModelError
from penstock.tasks import Head
from penstock_optimizer.export import export
from penstock_runtime.models.folder import ModelFolder

pytestmark = pytest.mark.parity
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Followed:
    """A fault, words of the error and of its advice, and what follows the advice."""

    error: str
    advice: str
    make: Change
    follow: Change
    asked: Head = Head.SEQUENCE
    """The head that is asked for first."""
    has: Head = Head.SEQUENCE
    """The head of the model, which is asked for once the advice was followed."""
    config_class: str = "BertConfig"


def fields(**changes: Any) -> Change:
    """Change fields of config.json; None removes one."""

    def change(path: Path) -> None:
        file = path / "config.json"
        values = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))

    return change


def original(name: str) -> Change:
    """Put back the file of the model's own revision."""
    return lambda path: (path / name).write_bytes((path.parent / "original" / name).read_bytes())


def tensor(name: str, change: Callable[[Any], Any]) -> Change:
    def write(path: Path) -> None:
        file = path / "model.safetensors"
        tensors = load_file(file)
        save_file({**tensors, name: change(tensors[name])}, file)

    return write


def without(name: str) -> Change:
    def write(path: Path) -> None:
        file = path / "model.safetensors"
        save_file({one: values for one, values in load_file(file).items() if one != name}, file)

    return write


def as_pickle(path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    torch.save(load_torch(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def with_graph(path: Path) -> None:
    """An ONNX export, made where the model is whole."""
    exported = export(ModelFolder.open(path.parent / "original"), Head.SEQUENCE, path.parent / "graph")
    (path / "model.onnx").write_bytes(exported.path.read_bytes())


def instead_of_weights(name: str) -> Change:
    def change(path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        (path / name).write_bytes(b"{}")

    return change


def whole(path: Path) -> None:
    """Another folder, which the advice names."""
    for file in (path.parent / "original").iterdir():
        original(file.name)(path)


CONFIG, WEIGHTS = original("config.json"), original("model.safetensors")
REVISION, MENDED = "from the same revision", "as it was in the model's own config.json"
CASES = (
    Followed("but config.json asks for [2, 24]", REVISION, fields(id2label={"0": "a", "1": "b"}), CONFIG),
    Followed("has shape [61, 24], but config.json asks for [99, 24]", REVISION, fields(vocab_size=99), CONFIG),
    Followed("num_attention_heads is 5", MENDED, fields(num_attention_heads=5), CONFIG),
    Followed("num_hidden_layers is 1000000000", "from 1 to 1000", fields(num_hidden_layers=10**9), CONFIG),
    Followed("hidden_act is 'swish9'", MENDED, fields(hidden_act="swish9"), CONFIG),
    Followed("encoder.layer.2.attention", "of one model", fields(num_hidden_layers=3), CONFIG),
    Followed("model_type is not stated", "write model_type: bert", fields(model_type=None), fields(model_type="bert")),
    Followed(
        "has no tensor 'bert.encoder.layer.0.attention.self.distance_embedding.weight'", "of one model",
        fields(position_embedding_type="relative_key"), CONFIG,
    ),
    Followed(
        "its weights are quantised (gptq)", "as it was before quantisation",
        fields(quantization_config={"quant_method": "gptq"}), whole,
    ),
    Followed(
        "is stored as I8", "as it was before quantisation",
        tensor("classifier.weight", lambda values: values.astype(np.int8)), whole,
    ),
    Followed("has no tensor 'classifier.bias'", "Fetch the model again", without("classifier.bias"), WEIGHTS),
    Followed("code of the model's own", "export it to ONNX", fields(auto_map={"AutoModel": "a.B"}), with_graph),
    Followed("is a pickle", "Convert it to safetensors", as_pickle, WEIGHTS),
    Followed("is an adapter", "merge_and_unload", instead_of_weights("adapter_config.json"), whole),
    Followed("has no config.json", "save_pretrained", instead_of_weights("notes.txt"), whole),
    Followed(
        "without a sequence-classification head", "this one fits feature-extraction", lambda _: None, lambda _: None,
        has=Head.ENCODER,
    ),
    Followed(
        "its rotary positions are scaled (odd)", "Use a model that transformers loads",
        fields(rope_scaling={"rope_type": "odd", "factor": 2.0}), CONFIG, Head.ENCODER, Head.ENCODER, "LlamaConfig",
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.error for case in CASES])
def test_the_advice_leads_to_a_model_that_answers(case: Followed, tmp_path: Path) -> None:
    from tests.optimizer.export.judge import assert_equals_torch, in_onnxruntime, rows
    from tests.optimizer.export.models import DECODERS, FAMILIES, make

    made = make(tmp_path / "original", case.config_class, case.has, **{**FAMILIES, **DECODERS}[case.config_class])
    path = tmp_path / "model"
    path.mkdir()
    whole(path)
    case.make(path)

    with pytest.raises(ModelError) as caught:
        export(ModelFolder.open(path), case.asked, tmp_path / "refused")
    assert case.error in caught.value.message
    assert case.advice in caught.value.remedy
    case.follow(path)

    exported = export(ModelFolder.open(path), case.has, tmp_path / "out")
    assert_equals_torch(exported, made, rows(5, 9), engines=[in_onnxruntime])
