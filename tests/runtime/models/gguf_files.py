"""GGUF files of tiny random models, written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
HEADS, KEY_HEADS, HIDDEN, INNER = 4, 2, 64, 96


def tokens() -> list[str]:
    """Two control tokens, the 256 characters of byte-level BPE, and two merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + index) for index in range(256 - len(printable))]
    return ["<s>", "</s>", *map(chr, printable), *others, "ab", "abc"]


def write_gguf(path: Path, architecture: str = "llama", *, kind: str = "Q4_1", **overrides: Any) -> dict[str, Any]:
    """Write a model with one layer; returns its tensors as they were before they were rounded. `overrides` None removes
    an entry of the header."""
    writer = GGUFWriter(path, architecture)
    names = tokens()
    entries = {
        f"{architecture}.block_count": 1,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KEY_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **overrides,
    }
    for key, value in entries.items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case _:
                writer.add_string(key, value)
    writer.add_array("tokenizer.ggml.tokens", names)
    writer.add_array("tokenizer.ggml.token_type", [3, 3] + [1] * (len(names) - 2))
    writer.add_array("tokenizer.ggml.merges", ["a b", "ab c"])
    random = np.random.default_rng(0)
    width = HIDDEN // HEADS
    shapes = {
        "token_embd.weight": (len(names), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KEY_HEADS * width, HIDDEN),
        "blk.0.attn_v.weight": (KEY_HEADS * width, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, array in arrays.items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            form = GGMLQuantizationType[kind]
            writer.add_tensor(name, quants.quantize(array, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def written(path: Path, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A tensor as the gguf package reads it."""
    tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == name)
    return np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
