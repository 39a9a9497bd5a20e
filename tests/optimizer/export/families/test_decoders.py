"""Decoders with unusual settings of real checkpoints equal transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import CorruptModel, UnsafeModel, UnsupportedModel
from penstock.manifest import GraphIO
from penstock.tasks import Head
from penstock_optimizer.export import export
from penstock_runtime.models.folder import ModelFolder
from tests.optimizer.export.judge import ENGINE_OF, assert_equals_torch, in_onnxruntime, rows
from tests.optimizer.export.models import DECODERS, PAD_ID, Made, make

pytestmark = pytest.mark.parity

LINEAR = {"rope_type": "linear", "factor": 4.0}


def check(made: Made, out: Path) -> None:
    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, made.head, out / flavour, flavour=flavour)
        assert exported.how == "builder"
        assert_equals_torch(exported, made, rows(13), rows(4, 17, 9), engines=[engine])


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        pytest.param("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, id="biases of Llama"),
        pytest.param("LlamaConfig", {"num_key_value_heads": 1, "num_hidden_layers": 1}, id="one head of keys"),
        pytest.param("LlamaConfig", {"num_key_value_heads": 4, "rms_norm_eps": 0.01}, id="as many heads of keys"),
        pytest.param("LlamaConfig", {"rope_scaling": LINEAR}, id="angles divided by a factor"),
        pytest.param("LlamaConfig", {"hidden_act": "gelu", "rope_theta": 90.0}, id="another base and activation"),
        pytest.param(
            "MistralConfig", {"sliding_window": None, "head_dim": 10}, id="no window, heads of their own width"
        ),
        pytest.param("MistralConfig", {"sliding_window": 1}, id="a window of the token alone"),
        pytest.param("Qwen2Config", {"use_sliding_window": False}, id="a window that is not used"),
        pytest.param(
            "Qwen2Config", {"layer_types": ["sliding_attention", "full_attention"]}, id="kinds of attention by layer"
        ),
        pytest.param("Qwen3Config", {"attention_bias": True, "head_dim": 6}, id="biases of Qwen3"),
        pytest.param("Gemma3TextConfig", {"attention_bias": True, "rope_scaling": LINEAR}, id="Gemma with biases"),
        pytest.param("Gemma3TextConfig", {"rope_theta": 90.0, "rope_local_base_freq": 30.0}, id="bases of Gemma"),
        pytest.param("Gemma3TextConfig", {"hidden_activation": "silu", "sliding_window": 1}, id="SwiGLU in Gemma"),
    ],
)
def test_an_unusual_configuration_equals_transformers(
    config_class: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    made = make(tmp_path / "model", config_class, Head.ENCODER, **{**DECODERS[config_class], **changes})

    check(made, tmp_path / "out")


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}, id="yarn"),
        pytest.param({"type": "yarn", "factor": 2.0}, id="yarn by the older key, from the stated positions on"),
        pytest.param(
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, "truncate": False, "beta_fast": 3.0},
            id="yarn with a factor for the scores, and edges between pairs",
        ),
        pytest.param({"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5}, id="yarn of DeepSeek"),
        pytest.param({"rope_type": "yarn", "factor": 1.0, "beta_fast": 1.0, "beta_slow": 1.0}, id="yarn of no effect"),
        pytest.param(
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 20},
            id="llama3",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("config_class", ["LlamaConfig", "Qwen3Config"])
def test_scaled_rotary_positions_equal_transformers(config_class: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    fields = {**DECODERS[config_class], "head_dim": 8, "rope_theta": 100.0, "rope_scaling": scaling}
    made = make(tmp_path / "model", config_class, Head.ENCODER, **fields)

    check(made, tmp_path / "out")


def test_a_scaling_without_its_factor_is_an_error(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "LlamaConfig", Head.ENCODER, **DECODERS["LlamaConfig"])
    made.rewrite_config(rope_scaling={"rope_type": "llama3", "factor": 2.0})

    with pytest.raises(CorruptModel, match="low_freq_factor is None"):
        export(made.folder, Head.ENCODER, tmp_path / "out")


@pytest.mark.parametrize("window", [2, 7, 8])
def test_gemma_with_attention_to_both_sides_equals_transformers(window: int, tmp_path: Path) -> None:
    fields = {**DECODERS["Gemma3TextConfig"], "use_bidirectional_attention": True, "sliding_window": window}
    made = make(tmp_path / "model", "Gemma3TextConfig", Head.ENCODER, **fields)
    made.rewrite_config(sliding_window=window)  # transformers 4 writes the half that it uses

    check(made, tmp_path / "out")


@pytest.mark.parametrize("stated", [{"is_causal": False}, {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}])
def test_qwen2_that_is_not_causal_attends_to_all_tokens(stated: dict[str, Any], tmp_path: Path) -> None:
    """gte-Qwen2: transformers' model with a mask of the padding alone."""
    fields = {**DECODERS["Qwen2Config"], "use_sliding_window": False}
    made = make(tmp_path / "model", "Qwen2Config", Head.ENCODER, **fields)
    made.rewrite_config(**stated)
    (made.path / "modeling_qwen.py").write_text("raise RuntimeError('this code must not run')")
    batch = rows(4, 17, 9)
    mask = batch["attention_mask"]
    padding = torch.from_numpy((1.0 - mask) * -1e4).float()[:, None, None, :].expand(-1, -1, mask.shape[1], -1)
    with torch.no_grad():
        expected = made.model(torch.from_numpy(batch["input_ids"]), attention_mask=padding).last_hidden_state.numpy()

    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, Head.ENCODER, tmp_path / flavour, flavour=flavour)
        found = engine(exported.path, exported.io)(batch)["last_hidden_state"]
        np.testing.assert_allclose(found * mask[..., None], expected * mask[..., None], rtol=0, atol=2e-5)


def test_the_classifier_reads_the_last_token_that_is_not_the_padding_token(tmp_path: Path) -> None:
    """As transformers does, also where a text ends with it; without a stated padding token, the last of the text."""
    made = make(tmp_path / "model", "Qwen3Config", Head.SEQUENCE, **DECODERS["Qwen3Config"])
    batch = rows(6, 9)
    batch["input_ids"][1, 7:] = PAD_ID

    exported = export(made.folder, Head.SEQUENCE, tmp_path / "out")
    assert_equals_torch(exported, made, batch, engines=[in_onnxruntime])

    made.rewrite_config(pad_token_id=None)
    made.model.config.pad_token_id = None
    batch = {name: array[1:] for name, array in batch.items()}
    exported = export(made.folder, Head.SEQUENCE, tmp_path / "out")
    assert_equals_torch(exported, made, batch, engines=[in_onnxruntime])


def test_answers_do_not_depend_on_padding(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "Gemma3TextConfig", Head.ENCODER, **DECODERS["Gemma3TextConfig"])
    batch = rows(5, 12)
    alone = {name: array[:1, :5] for name, array in batch.items()}

    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, Head.ENCODER, tmp_path / flavour, flavour=flavour)
        run = engine(exported.path, exported.io)
        padded, single = run(batch)["last_hidden_state"][0, :5], run(alone)["last_hidden_state"][0]
        np.testing.assert_allclose(padded, single, rtol=0, atol=2e-6)


def test_the_number_of_positions_is_that_of_the_longest_text(tmp_path: Path) -> None:
    """Not that of config.json, which may be hundreds of thousands."""
    made = make(tmp_path / "model", "Qwen3Config", Head.ENCODER, **{**DECODERS["Qwen3Config"], "rope_theta": 1e6})
    made.rewrite_config(max_position_embeddings=1_000_000)
    (made.path / "tokenizer_config.json").write_text('{"model_max_length": 24}')

    exported = export(made.folder, Head.ENCODER, tmp_path / "out")

    assert_equals_torch(exported, made, rows(24, 9), engines=[in_onnxruntime])
    assert exported.io == GraphIO(inputs=("input_ids", "attention_mask"), outputs=exported.io.outputs)
    assert exported.path.stat().st_size < 200_000


@pytest.mark.parametrize(
    ("config_class", "changes", "why"),
    [
        ("LlamaConfig", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"positions are scaled \(dynamic\)"),
        ("Gemma3TextConfig", {"attn_logit_softcapping": 50.0}, "its attn_logit_softcapping is not null"),
        ("Phi3Config", {"partial_rotary_factor": 0.7}, "only a part of each head has rotary positions"),
        (
            "Phi3Config",
            {
                "rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 2], "long_factor": [1, 2, 3]},
                "original_max_position_embeddings": 16,
            },
            "its rotary positions change in texts of more than 16 tokens",
        ),
    ],
)
def test_what_the_builder_does_not_know_is_named(
    config_class: str, changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "model", config_class, Head.ENCODER, **DECODERS[config_class])
    made.rewrite_config(**changes)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    with pytest.raises(UnsupportedModel, match=why):
        export(made.folder, Head.ENCODER, tmp_path / "out")


def test_heads_of_keys_that_do_not_divide_those_of_queries_are_an_error(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "LlamaConfig", Head.ENCODER, **DECODERS["LlamaConfig"])
    made.rewrite_config(num_key_value_heads=3)

    with pytest.raises(CorruptModel, match="num_key_value_heads is 3"):
        export(made.folder, Head.ENCODER, tmp_path / "out")


def test_heads_of_gpt2_that_do_not_divide_its_width_are_an_error(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "GPT2Config", Head.ENCODER, **DECODERS["GPT2Config"])
    made.rewrite_config(n_head=5)
    with pytest.raises(CorruptModel, match=r"n_head is 5\. Make it a number that divides the n_embd of 24"):
        export(made.folder, Head.ENCODER, tmp_path / "out")


def test_a_language_model_has_no_masked_head(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "LlamaConfig", Head.ENCODER, **DECODERS["LlamaConfig"])

    with pytest.raises(UnsupportedModel, match="without a masked-lm head"):
        export(made.folder, Head.MASKED_LM, tmp_path / "out")


def test_other_code_in_a_folder_of_a_known_family_is_still_refused(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "Qwen2Config", Head.ENCODER, **DECODERS["Qwen2Config"])
    made.rewrite_config(auto_map={"AutoModel": "modeling_other.OtherModel"})

    with pytest.raises(UnsafeModel, match="modeling_other"):
        ModelFolder.open(made.path)
