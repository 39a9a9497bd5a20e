"""GGUF files of tiny random models, written by the gguf package."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType, GGUFWriter, quants

from tests.runtime.tasks.texts import TRAINING

TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
SENTENCE_PIECES: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
HEADS, KEY_HEADS, HIDDEN, INNER = 4, 2, 64, 96


def tokens() -> list[str]:
    """Two control tokens, the 256 characters of byte-level BPE, and two merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + index) for index in range(256 - len(printable))]
    return ["<s>", "</s>", *map(chr, printable), *others, "ab", "abc"]


@dataclass(frozen=True)
class Pieces:
    """The vocabulary of a model of sentencepiece, as llama.cpp writes it."""

    tokens: list[str]
    scores: list[float]
    kinds: list[int]

    @classmethod
    def trained(cls, **options: Any) -> tuple[sentencepiece.SentencePieceProcessor, Pieces]:
        """A model like Llama 2's, trained on a few texts."""
        target = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TRAINING), model_writer=target, model_type="bpe", vocab_size=700,
            hard_vocab_limit=False, character_coverage=0.995, minloglevel=2, byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
            allow_whitespace_only_pieces=True, **options,
        )  # fmt: skip
        model = sentencepiece.SentencePieceProcessor(model_proto=target.getvalue())
        numbers = range(model.get_piece_size())
        kinds = [
            2 if model.is_unknown(one) else 3 if model.is_control(one) else 6 if model.is_byte(one) else 1
            for one in numbers
        ]
        return model, cls([model.id_to_piece(one) for one in numbers], [model.get_score(one) for one in numbers], kinds)


def write_gguf(
    path: Path, architecture: str = "llama", *, kind: str = "Q4_1", pieces: Pieces | None = None, **overrides: Any
) -> dict[str, Any]:
    """Write a model with one layer; returns its tensors as they were before they were rounded. `overrides` None removes
    an entry of the header. `pieces`: a vocabulary of sentencepiece instead of byte-level BPE."""
    writer = GGUFWriter(path, architecture)
    names = tokens() if pieces is None else pieces.tokens
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
        **({} if pieces is None else SENTENCE_PIECES),
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
    if pieces is None:
        writer.add_array("tokenizer.ggml.token_type", [3, 3] + [1] * (len(names) - 2))
        writer.add_array("tokenizer.ggml.merges", ["a b", "ab c"])
    else:
        writer.add_array("tokenizer.ggml.token_type", pieces.kinds)
        writer.add_array("tokenizer.ggml.scores", pieces.scores)
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
