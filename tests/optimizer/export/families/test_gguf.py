"""Families in GGUF files against the same weights in safetensors. The gguf package names and stores the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from penstock_optimizer.export import read_decoder
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.gguf_folder import unpack
from penstock_runtime.rows import Float
from tests.optimizer.quantise.decoder.random_decoders import exact_logits
from tests.optimizer.quantise.decoder.tiny import VOCABULARY, expected_logits, save_tiny

pytestmark = pytest.mark.parity

ARCHITECTURES: dict[str, tuple[str, gguf.MODEL_ARCH, dict[str, Any]]] = {
    "llama": ("llama", gguf.MODEL_ARCH.LLAMA, {}),
    "qwen2": ("qwen2", gguf.MODEL_ARCH.QWEN2, {}),
    "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3, {}),
    "phi3": ("phi3", gguf.MODEL_ARCH.PHI3, {}),
    "phi4 mini": ("phi3", gguf.MODEL_ARCH.PHI3, {}),
    "gemma3": (
        "gemma3",
        gguf.MODEL_ARCH.GEMMA3,
        # Files have no pattern and no scale of queries: llama.cpp knows those of the published models.
        {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16},
    ),
}
"""Name of a tiny model -> name of the architecture in the file, the package's name of it, and other fields."""


def write_model(path: Path, name: str, model: Any, kind: GGMLQuantizationType) -> None:
    """Write the model as llama.cpp's converter does; its matrices become what the file has."""
    architecture, known, _ = ARCHITECTURES[name]
    writer = GGUFWriter(path, architecture)
    write_settings(writer, architecture, model.config)
    write_vocabulary(writer)
    names = gguf.get_tensor_name_map(known, model.config.num_hidden_layers)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        array = value.numpy().astype(np.float32)
        if array.ndim == 1 or array.shape[1] % 32:
            # Gemma's normalisations are stored as factors.
            is_factor = architecture == "gemma3" and key.endswith("norm.weight")
            writer.add_tensor(stored, array + np.float32(1) if is_factor else array)
            continue
        round_weights(value, kind)
        if architecture == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = model.config.num_attention_heads if "q_proj" in key else model.config.num_key_value_heads
            array = array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(stored, quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def round_weights(value: Any, kind: GGMLQuantizationType) -> None:
    """Give a parameter the numbers that it has in this form."""
    import torch

    rounded = quants.dequantize(quants.quantize(value.numpy().astype(np.float32), kind), kind)
    with torch.no_grad():
        value.copy_(torch.from_numpy(rounded.copy()))


def write_settings(writer: GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling["factor"])
    if architecture != "phi3":
        writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        return
    original = config.original_max_position_embeddings
    turned = int(config.partial_rotary_factor * config.hidden_size) // config.num_attention_heads
    writer.add_rope_dimension_count(turned)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config.sliding_window or 0)
    if config.rope_scaling:
        growth = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(growth) / np.log(original))))
        for length in ("long", "short"):
            factors = np.array(config.rope_scaling[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def write_vocabulary(writer: GGUFWriter) -> None:
    """Tokens that no test reads."""
    tokens = ["<s>", "</s>", *(chr(code) for code in range(33, 33 + VOCABULARY - 3)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def numbers(folder: Path, ids: Any) -> Float:
    return np.asarray(exact_logits(read_decoder(ModelFolder.open(folder)), ids), np.float32)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_has_the_logits_of_the_same_weights_in_safetensors(name: str, kind: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path / "tensors", **ARCHITECTURES[name][2])
    write_model(tmp_path / "model.gguf", name, model, GGMLQuantizationType[kind])
    model.save_pretrained(tmp_path / "tensors")
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 45).astype(np.int32)

    found = numbers(unpack(tmp_path / "model.gguf", tmp_path / "cache"), ids)
    # The factors of Gemma's normalisations are rounded once more.
    np.testing.assert_allclose(found, numbers(tmp_path / "tensors", ids), rtol=0, atol=1e-4)
    assert np.abs(found - expected_logits(model, ids)).max() < 1e-3
