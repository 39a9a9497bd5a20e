"""Tiny random decoders of each family, saved by transformers, and their fp32 logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 96
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama with biases and a head of its own": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": False},
    ),
    "llama 3": ("LlamaConfig", {"rope_scaling": _LLAMA_3, "rope_theta": 5000.0}),
    "llama with linear scaling": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama with a factor for long texts": (
        "LlamaConfig",
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            }
        },
    ),
    "qwen2 with yarn": (
        "Qwen2Config",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2 with windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3 with one key head, windows and biases": (
        "Qwen3Config",
        {
            "head_dim": 24,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "mistral with heads wider than the model": ("MistralConfig", {"head_dim": 48, "sliding_window": None}),
    "phi3": ("Phi3Config", {"sliding_window": 11, "tie_word_embeddings": False}),
    "phi4 mini": (
        "Phi3Config",
        {
            "partial_rotary_factor": 0.75,
            "rope_scaling": _LONG,
            "original_max_position_embeddings": 128,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3 with as many key heads": (
        "Gemma3TextConfig",
        {
            "head_dim": 20,
            "query_pre_attn_scalar": 20,
            "num_key_value_heads": 4,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
        },
    ),
    "gpt2 with a head of its own": (
        "GPT2Config",
        {
            "n_embd": 96,
            "n_head": 4,
            "n_layer": 2,
            "n_inner": 64,
            "n_positions": 64,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 256, "scale_attn_by_inverse_layer_idx": True},
    ),
}
"""Name -> class of transformers' configuration, and its fields. Windows are shorter than the texts of the tests."""


def save_tiny(name: str, folder: Path, *, seed: int = 0, **changed: Any) -> Any:
    """Save a random model of this family in `folder`; returns it. `changed`: other fields of its configuration."""
    import torch
    import transformers

    kind, fields = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**(_SIZES | fields | changed))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Normalisations and biases are saved as ones and zeros, which would hide that they are ignored.
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + float("norm" in parameter_name))
    model.save_pretrained(folder)
    return model


def expected_logits(model: Any, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """The fp32 logits [tokens, vocabulary] of one text."""
    import torch

    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
    return np.asarray(logits.float().numpy())
