"""Writes a language model with the shape of Qwen2.5-0.5B and random weights, for measurements of speed.

    python -m benchmarks.generation_model --tokenizer FOLDER --to FOLDER

The tokenizer comes from another folder, such as the one that SmolLM2's GGUF file is expanded to
(`~/.cache/penstock/models/gguf`); its vocabulary may be smaller than the model's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click
import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from benchmarks.program import Program

SEED = 20261127
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
DEVIATION = 0.02
EMBEDDING_DEVIATION = 0.002
"""So small that the next token's distribution is nearly flat: the guard then accepts 4 bits of random weights."""


def weights() -> dict[str, Any]:
    """All tensors, [outputs, inputs], in bfloat16."""
    generator = np.random.default_rng(SEED)
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    keys = width // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]

    def random(*shape: int, deviation: float = DEVIATION) -> Any:
        return (deviation * generator.standard_normal(shape, np.float32)).astype(bfloat16)

    ones = np.ones(width, bfloat16)
    embeddings = random(CONFIG["vocab_size"], width, deviation=EMBEDDING_DEVIATION)
    found = {"model.embed_tokens.weight": embeddings, "model.norm.weight": ones}
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        found |= {f"{layer}.{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
        for name, outputs in (("q", width), ("k", keys), ("v", keys)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = random(outputs, width)
            found[f"{layer}.self_attn.{name}_proj.bias"] = random(outputs)
        found[f"{layer}.self_attn.o_proj.weight"] = random(width, width)
        found |= {f"{layer}.mlp.{name}_proj.weight": random(inner, width) for name in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = random(width, inner)
    return found


@click.command(cls=Program, help=__doc__)
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), required=True, help="A model's folder.")
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True)
def main(tokenizer: Path, folder: Path) -> None:
    """Write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
