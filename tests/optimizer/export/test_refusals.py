"""A model that cannot be exported is refused with the file, the tensor or field, and a remedy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.activations import ACT2FN

from penstock.errors import CorruptModel, ModelError, UnsupportedModel
from penstock.tasks import Head
from penstock_optimizer.export import export
from penstock_optimizer.export.transformer import BY_NAME, THROUGH_TORCH
from tests.optimizer.export.models import FAMILIES, SMALL, Made, make, write_tokenizer


@pytest.fixture
def bert(tmp_path: Path) -> Made:
    return make(tmp_path / "model", "BertConfig", Head.SEQUENCE, **SMALL)


def refusal(made: Made, head: Head = Head.SEQUENCE, kind: type[ModelError] = CorruptModel) -> ModelError:
    """The error of an export; it always has a remedy."""
    with pytest.raises(kind) as caught:
        export(made.folder, head, made.path.parent / "out")
    assert caught.value.remedy
    return caught.value


def change_tensors(made: Made, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the file; None removes one."""
    file = made.path / "model.safetensors"
    kept = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


@pytest.mark.parametrize(
    "name",
    [
        "bert.embeddings.position_embeddings.weight",
        "bert.encoder.layer.1.attention.self.key.bias",
        "bert.encoder.layer.0.output.LayerNorm.weight",
        "bert.pooler.dense.weight",
        "classifier.bias",
    ],
)
def test_a_missing_tensor_is_named(bert: Made, name: str) -> None:
    change_tensors(bert, **{name: None})

    assert name in refusal(bert).message


def test_a_tensor_of_another_shape_is_named_with_its_file(bert: Made) -> None:
    change_tensors(bert, **{"bert.encoder.layer.0.intermediate.dense.weight": torch.zeros(7, 24)})

    message = refusal(bert).message

    assert str(bert.path / "model.safetensors") in message
    assert "'bert.encoder.layer.0.intermediate.dense.weight' has shape [7, 24]" in message
    assert "[40, 24]" in message


def test_labels_that_do_not_fit_the_head_are_refused(bert: Made) -> None:
    bert.rewrite_config(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})

    assert "'classifier.weight' has shape [3, 24], but config.json asks for [2, 24]" in refusal(bert).message
    bert.rewrite_config(id2label={str(index): "abc"[index] for index in range(3)}, label2id=None)
    assert export(bert.folder, Head.SEQUENCE, bert.path.parent / "other").how == "builder"


def test_a_truncated_file_is_named(bert: Made) -> None:
    file = bert.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    assert str(file) in refusal(bert).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "24"),
        ("hidden_size", 0),
        ("num_hidden_layers", 2.5),
        ("num_attention_heads", True),
        ("layer_norm_eps", -1),
        ("layer_norm_eps", "small"),
        ("hidden_act", 3),
        ("hidden_act", "foo"),
        ("num_attention_heads", 7),
        ("type_vocab_size", -1),
    ],
)
def test_an_invalid_field_of_config_json_is_named(bert: Made, field: str, value: Any) -> None:
    bert.rewrite_config(**{field: value})

    message = refusal(bert).message

    assert "config.json" in message
    assert f"{field} is {value!r}" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "chunked", "full_attention", "full_attention"]),
        ("rope_parameters", 3),
        ("rope_parameters", {"full_attention": 3}),
        ("global_rope_theta", -1),
        ("classifier_pooling", "max"),
        ("attention_bias", "no"),
        ("local_attention", 0),
    ],
)
def test_an_invalid_field_of_a_modernbert_is_named(field: str, value: Any, tmp_path: Path) -> None:
    made = make(tmp_path / "model", "ModernBertConfig", Head.SEQUENCE, **FAMILIES["ModernBertConfig"])
    made.rewrite_config(**{field: value})

    message = refusal(made).message

    assert "config.json" in message
    assert f"{field} is {value!r}" in message or f"{field}.full_attention is 3" in message


def test_a_distilbert_whose_heads_do_not_divide_its_width_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "DistilBertConfig", Head.ENCODER, **FAMILIES["DistilBertConfig"])
    made.rewrite_config(n_heads=5)

    error = refusal(made, Head.ENCODER)

    assert "config.json: n_heads is 5" in error.message
    assert "divides the dim of 24" in error.remedy
    made.rewrite_config(n_heads=3)
    assert export(made.folder, Head.ENCODER, tmp_path / "other").how == "builder"


def test_the_names_of_all_activations_are_known() -> None:
    assert set(ACT2FN) == set(BY_NAME) | THROUGH_TORCH


def test_integer_weights_are_refused(bert: Made) -> None:
    name = "bert.encoder.layer.0.output.dense.weight"
    change_tensors(bert, **{name: torch.zeros(24, 40, dtype=torch.int8)})

    error = refusal(bert, kind=UnsupportedModel)
    change_tensors(bert, **{name: torch.zeros(24, 40)})

    assert name in error.message
    assert "I8" in error.message
    assert "as it was before quantisation" in error.remedy
    assert export(bert.folder, Head.SEQUENCE, bert.path.parent / "other").how == "builder"


@pytest.mark.parametrize(
    ("made_for", "asked", "fits"),
    [
        (Head.ENCODER, Head.SEQUENCE, "feature-extraction"),
        (Head.TOKEN, Head.SEQUENCE, "token-classification"),
        (Head.SEQUENCE, Head.SPAN, "text-classification"),
        (Head.MASKED_LM, Head.TOKEN, "fill-mask"),
    ],
)
def test_a_head_that_the_model_does_not_have_is_refused(made_for: Head, asked: Head, fits: str, tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", made_for, **SMALL)

    error = refusal(made, asked, UnsupportedModel)

    assert f"without a {asked.value} head" in error.message
    assert fits in error.remedy
    assert export(made.folder, made_for, tmp_path / "other").how == "builder"


def test_a_masked_language_model_whose_tokenizer_has_no_mask_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.MASKED_LM, **SMALL)
    write_tokenizer(made.path, mask="<something-else>")

    error = refusal(made, Head.MASKED_LM, UnsupportedModel)
    write_tokenizer(made.path)

    assert "no mask token" in error.message
    assert "State it as mask_token" in error.remedy
    assert export(made.folder, Head.MASKED_LM, tmp_path / "other").how == "builder"


@pytest.mark.parametrize(
    ("config_class", "changes", "why"),
    [
        ("BertConfig", {"position_embedding_type": "relative_key"}, "position_embedding_type is relative_key"),
        ("BertConfig", {"hidden_act": "mish"}, "hidden_act is mish"),
        ("BertConfig", {"is_decoder": True}, "decoder"),
        ("BertConfig", {"pruned_heads": {"0": [1]}}, "pruned"),
        ("ErnieConfig", {"use_task_id": True}, "task ids"),
        ("ModernBertConfig", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "positions are scaled (yarn)"),
        ("ModernBertConfig", {"max_position_embeddings": 10**9}, "1000000000 positions"),
        ("MPNetConfig", {"relative_attention_num_buckets": 16}, "16 distance buckets"),
        ("BertConfig", {"model_type": "no-such-type", "architectures": ["NoSuchModel"]}, "model_type is no-such-type"),
    ],
)
def test_an_unsupported_architecture_requires_torch(
    config_class: str, changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "model", config_class, Head.ENCODER, **FAMILIES[config_class])
    made.rewrite_config(**changes)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))

    error = refusal(made, Head.ENCODER, UnsupportedModel)

    assert why in error.message
    assert "pip install 'penstock[torch]'" in error.remedy


def test_two_encoders_in_one_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **SMALL)
    tensors = load_file(made.path / "model.safetensors")
    both = {f"{tower}.{name}": tensor.clone() for tower in ("query", "document") for name, tensor in tensors.items()}
    save_file(both, made.path / "model.safetensors")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert "several encoders (document., query.)" in refusal(made, Head.ENCODER, UnsupportedModel).message
