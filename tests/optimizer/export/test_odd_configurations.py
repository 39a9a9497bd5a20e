"""Unusual settings of real checkpoints: the export still equals transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.tasks import Head
from penstock_optimizer.export import export
from penstock_optimizer.export.build import graph as graph_module
from penstock_optimizer.export.transformer import BY_NAME
from tests.optimizer.export.judge import ENGINE_OF, assert_equals_torch, rows
from tests.optimizer.export.models import FAMILIES, MASK_ID, MODERN, SMALL, Made, make

pytestmark = pytest.mark.parity

ROBERTA = FAMILIES["RobertaConfig"]
DISTIL = FAMILIES["DistilBertConfig"]


def check(made: Made, out: Path, *, pad_id: int = 1) -> None:
    """Both flavours, each in the engine it is for."""
    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, made.head, out, flavour=flavour)
        assert exported.how == "builder"
        batches = rows(13, pad_id=pad_id), rows(4, 17, 9, pad_id=pad_id)
        assert_equals_torch(exported, made, *batches, engines=[engine])


@pytest.mark.parametrize("name", BY_NAME)
def test_every_activation_equals_transformers(name: str, tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **{**SMALL, "num_hidden_layers": 1, "hidden_act": name})
    check(made, tmp_path / "out")


@pytest.mark.parametrize(
    ("config_class", "head", "changes"),
    [
        pytest.param("BertConfig", Head.ENCODER, {"type_vocab_size": 1}, id="one token type"),
        pytest.param("BertConfig", Head.ENCODER, {"layer_norm_eps": 0.05}, id="large epsilon"),
        pytest.param("BertConfig", Head.SEQUENCE, {"num_labels": 1}, id="one label"),
        pytest.param("BertConfig", Head.SEQUENCE, {"num_hidden_layers": 1}, id="the first layer is the last"),
        pytest.param("BertConfig", Head.ENCODER, {"num_attention_heads": 1}, id="one attention head"),
        pytest.param("BertConfig", Head.MASKED_LM, {"tie_word_embeddings": False}, id="untied vocabulary"),
        pytest.param("BertConfig", Head.MASKED_LM, {"hidden_act": "gelu_new"}, id="another activation in the head"),
        pytest.param("RobertaConfig", Head.MASKED_LM, {"hidden_act": "relu"}, id="GELU in the head all the same"),
        pytest.param("RobertaConfig", Head.ENCODER, {"pad_token_id": 3}, id="another padding id"),
        pytest.param("RobertaConfig", Head.ENCODER, {"pad_token_id": 0}, id="padding id 0"),
        pytest.param("RobertaConfig", Head.ENCODER, {"type_vocab_size": 2}, id="two token types"),
        pytest.param("RobertaConfig", Head.MASKED_LM, {"tie_word_embeddings": False}, id="untied RoBERTa"),
        pytest.param("DistilBertConfig", Head.ENCODER, {"sinusoidal_pos_embds": True}, id="sinusoidal positions"),
        pytest.param("DistilBertConfig", Head.MASKED_LM, {"activation": "relu"}, id="DistilBERT with ReLU"),
        pytest.param("DistilBertConfig", Head.SEQUENCE, {"num_labels": 1}, id="DistilBERT with one label"),
        pytest.param("ElectraConfig", Head.ENCODER, {"embedding_size": 24}, id="nothing to project"),
        pytest.param("ElectraConfig", Head.SEQUENCE, {"hidden_act": "relu"}, id="ELECTRA's GELU head"),
        pytest.param("ElectraConfig", Head.MASKED_LM, {"tie_word_embeddings": False}, id="untied ELECTRA"),
        pytest.param("MPNetConfig", Head.ENCODER, {"relative_attention_num_buckets": 40}, id="buckets left over"),
        pytest.param("AlbertConfig", Head.SEQUENCE, {"num_hidden_groups": 2, "num_hidden_layers": 4}, id="two groups"),
        pytest.param("AlbertConfig", Head.ENCODER, {"inner_group_num": 2, "num_hidden_layers": 2}, id="groups of two"),
        pytest.param("AlbertConfig", Head.ENCODER, {"hidden_act": "gelu_new"}, id="ALBERT's own activation"),
        pytest.param("ModernBertConfig", Head.SEQUENCE, {"classifier_pooling": "mean"}, id="mean over the tokens"),
        pytest.param("ModernBertConfig", Head.SEQUENCE, {"num_hidden_layers": 3}, id="the last layer is local"),
        pytest.param("ModernBertConfig", Head.SEQUENCE, {"num_hidden_layers": 1}, id="one layer without a first norm"),
        pytest.param("ModernBertConfig", Head.ENCODER, {"local_attention": 5}, id="an odd window"),
        pytest.param("ModernBertConfig", Head.ENCODER, {"local_attention": 1}, id="a window of the token alone"),
        pytest.param("ModernBertConfig", Head.ENCODER, {"global_attn_every_n_layers": 1}, id="no local attention"),
        pytest.param("ModernBertConfig", Head.ENCODER, {"local_rope_theta": None}, id="one base of the angles"),
        pytest.param("ModernBertConfig", Head.ENCODER, {"global_rope_theta": 80.0}, id="another base"),
        pytest.param("ModernBertConfig", Head.ENCODER, {"hidden_activation": "silu"}, id="SwiGLU"),
        pytest.param("ModernBertConfig", Head.ENCODER, {"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param(
            "ModernBertConfig", Head.TOKEN, {"norm_bias": True, "classifier_bias": True}, id="biases of norms and head"
        ),
        pytest.param("ModernBertConfig", Head.TOKEN, {"classifier_activation": "relu"}, id="ReLU in ModernBERT's head"),
        pytest.param("ModernBertConfig", Head.MASKED_LM, {"decoder_bias": False}, id="a vocabulary without bias"),
        pytest.param("ModernBertConfig", Head.MASKED_LM, {"tie_word_embeddings": False}, id="untied ModernBERT"),
        pytest.param("DebertaV2Config", Head.ENCODER, {"pos_att_type": "c2p|p2c"}, id="kinds of scores as a text"),
        pytest.param("DebertaV2Config", Head.ENCODER, {"pos_att_type": ["c2p"]}, id="queries meet distances"),
        pytest.param("DebertaV2Config", Head.SEQUENCE, {"pos_att_type": ["p2c"]}, id="keys meet distances"),
        pytest.param("DebertaV2Config", Head.ENCODER, {"pos_att_type": []}, id="nothing meets distances"),
        pytest.param("DebertaV2Config", Head.ENCODER, {"relative_attention": False}, id="no distances, same scale"),
        pytest.param("DebertaV2Config", Head.TOKEN, {"share_att_key": False}, id="projections of distances"),
        pytest.param(
            "DebertaV2Config",
            Head.ENCODER,
            {"position_buckets": -1, "max_relative_positions": 6},
            id="distances without buckets",
        ),
        pytest.param("DebertaV2Config", Head.ENCODER, {"norm_rel_ebd": "none"}, id="distances without a norm"),
        pytest.param(
            "DebertaV2Config", Head.SPAN, {"position_biased_input": True, "type_vocab_size": 2}, id="tables of both"
        ),
        pytest.param("DebertaV2Config", Head.ENCODER, {"type_vocab_size": 1}, id="one type, no positions"),
        pytest.param("DebertaV2Config", Head.MASKED_LM, {"embedding_size": 16}, id="narrow embeddings of DeBERTa"),
        pytest.param(
            "DebertaV2Config",
            Head.MASKED_LM,
            {"legacy": False, "tie_word_embeddings": False},  # tied, transformers 4 replaces another weight
            id="the newer vocabulary head",
        ),
        pytest.param("DebertaV2Config", Head.MASKED_LM, {"tie_word_embeddings": False}, id="untied DeBERTa"),
        pytest.param("DebertaV2Config", Head.TOKEN, {"conv_kernel_size": 3, "conv_act": "gelu"}, id="a convolution"),
        pytest.param(
            "DebertaV2Config",
            Head.SEQUENCE,
            {"conv_kernel_size": 5, "conv_groups": 3, "num_hidden_layers": 1},
            id="a convolution next to the last layer",
        ),
        pytest.param("DebertaV2Config", Head.SEQUENCE, {"pooler_hidden_act": "tanh"}, id="tanh in DeBERTa's pooler"),
        pytest.param("DebertaV2Config", Head.SEQUENCE, {"num_hidden_layers": 1}, id="one layer of DeBERTa"),
    ],
)
def test_an_unusual_configuration_equals_transformers(
    config_class: str, head: Head, changes: dict[str, Any], tmp_path: Path
) -> None:
    made = make(tmp_path / "model", config_class, head, **{**FAMILIES[config_class], **changes})
    check(made, tmp_path / "out", pad_id=changes.get("pad_token_id", 1))


def test_the_configuration_of_modernbert_is_read_as_transformers_5_writes_it(tmp_path: Path) -> None:
    fields = {**MODERN, "global_attn_every_n_layers": 2, "global_rope_theta": 90.0, "local_rope_theta": 30.0}
    made = make(tmp_path / "model", "ModernBertConfig", Head.SEQUENCE, **fields)
    made.rewrite_config(
        global_attn_every_n_layers=3,  # layer_types are decisive
        global_rope_theta=None,
        local_rope_theta=None,
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_theta": 90.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 30.0, "rope_type": "default"},
        },
    )

    check(made, tmp_path / "out")


def test_a_padding_token_within_a_text_takes_no_position(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "XLMRobertaConfig", Head.ENCODER, **FAMILIES["XLMRobertaConfig"])
    batch = rows(9)
    batch["input_ids"][0, 4] = 1

    assert_equals_torch(export(made.folder, Head.ENCODER, tmp_path / "out"), made, batch)


def test_distances_beyond_the_last_bucket_share_it(tmp_path: Path) -> None:
    fields = {**SMALL, "num_hidden_layers": 1, "max_position_embeddings": 300}
    made = make(tmp_path / "model", "MPNetConfig", Head.ENCODER, **fields)

    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, Head.ENCODER, tmp_path / "out", flavour=flavour)
        assert_equals_torch(exported, made, rows(290), engines=[engine])


@pytest.mark.parametrize("head", [Head.ENCODER, Head.MASKED_LM])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_widths_are_served_in_float32(stored: torch.dtype, head: Head, tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", head, **SMALL)
    made.model.to(stored).save_pretrained(made.path)
    made.model.float()

    check(made, tmp_path / "out")


def test_weights_may_be_in_several_files(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "RobertaConfig", Head.SEQUENCE, shard="8KB", **ROBERTA)
    assert len(made.folder.safetensors) > 2

    check(made, tmp_path / "out")


@pytest.mark.parametrize(
    ("config_class", "head", "rename"),
    [
        pytest.param("BertConfig", Head.ENCODER, lambda name: f"bert.{name}", id="with a prefix"),
        pytest.param("BertConfig", Head.ENCODER, lambda name: f"model.{name}", id="with a prefix of its own"),
        pytest.param("BertConfig", Head.SEQUENCE, lambda name: f"model.{name}", id="within another model"),
        pytest.param("BertConfig", Head.SEQUENCE, lambda name: name.removeprefix("bert."), id="without a prefix"),
        pytest.param(
            "BertConfig",
            Head.ENCODER,
            lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ),
            id="gamma and beta",
        ),
        pytest.param(
            "RobertaConfig",
            Head.MASKED_LM,
            lambda name: name.replace("lm_head.bias", "lm_head.decoder.bias"),
            id="the bias under its second name",
        ),
    ],
)
def test_older_names_of_weights_are_accepted(config_class: str, head: Head, rename: Any, tmp_path: Path) -> None:
    made = make(tmp_path / "model", config_class, head, **FAMILIES[config_class])
    file = made.path / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)

    check(made, tmp_path / "out")


@pytest.mark.parametrize("config_class", ["BertConfig", "DistilBertConfig", "RobertaConfig", "ElectraConfig"])
def test_an_encoder_is_found_under_any_head(config_class: str, tmp_path: Path) -> None:
    made = make(tmp_path / "model", config_class, Head.TOKEN, **FAMILIES[config_class])
    encoder = Made(made.path, getattr(made.model, made.model.base_model_prefix), Head.ENCODER)

    check(encoder, tmp_path / "out")


def test_fields_that_config_json_omits_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"vocab_size": 61, "num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 12}
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **fields)
    kept = {**fields, "model_type": "bert", "architectures": ["BertModel"]}
    (made.path / "config.json").write_text(json.dumps(kept))

    check(made, tmp_path / "out")


def test_tied_word_embeddings_are_stored_once(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.MASKED_LM, **{**SMALL, "num_hidden_layers": 1})
    exported = export(made.folder, Head.MASKED_LM, tmp_path / "out")

    assert exported.parameters == sum(parameter.numel() for parameter in made.model.parameters())
    assert exported.path.stat().st_size < 4 * exported.parameters + 12_000


def test_weights_shared_by_layers_are_stored_once(tmp_path: Path) -> None:
    sizes = []
    for layers in (2, 10):
        fields = {**FAMILIES["AlbertConfig"], "num_hidden_layers": layers}
        made = make(tmp_path / f"model-{layers}", "AlbertConfig", Head.ENCODER, **fields)
        sizes.append(export(made.folder, Head.ENCODER, tmp_path / f"out-{layers}").parameters)

    assert sizes[0] == sizes[1]


def test_a_batch_without_masks_has_no_logits(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.MASKED_LM, **SMALL)
    batch = rows(6)
    batch["input_ids"][batch["input_ids"] == MASK_ID] = MASK_ID + 1

    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, Head.MASKED_LM, tmp_path / "out", flavour=flavour)
        assert engine(exported.path, exported.io)(batch)["logits"].shape == (0, SMALL["vocab_size"])


def test_large_weights_are_in_a_separate_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_module, "SINGLE_FILE_BYTES", 1000)
    made = make(tmp_path / "model", "RobertaConfig", Head.MASKED_LM, **ROBERTA)

    check(made, tmp_path / "out")

    graph, data = tmp_path / "out" / "model.onnx", tmp_path / "out" / "model.onnx.data"
    assert graph.stat().st_size < data.stat().st_size


def test_a_smaller_graph_leaves_no_old_weight_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(graph_module, "SINGLE_FILE_BYTES", 1000)
        export(made.folder, Head.ENCODER, tmp_path / "out")

    export(made.folder, Head.ENCODER, tmp_path / "out")

    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.onnx"]


def test_answers_do_not_depend_on_padding(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "MPNetConfig", Head.SEQUENCE, **SMALL)
    batch = rows(5, 12)
    alone = {name: array[:1, :5] for name, array in batch.items()}

    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, Head.SEQUENCE, tmp_path / "out", flavour=flavour)
        run = engine(exported.path, exported.io)
        np.testing.assert_allclose(run(batch)["logits"][0], run(alone)["logits"][0], rtol=0, atol=2e-6)
