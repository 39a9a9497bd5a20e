"""Makes a model folder of a GGUF file: config.json, safetensors in float32, tokenizer and chat template.

The folder is written once into the cache, under the digest of the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.files import write_once
from penstock_runtime.models.gguf import GgufFile
from penstock_runtime.models.gguf_tokenizer import Vocabulary, byte_level, is_splitting, sentence_pieces
from penstock_runtime.models.safetensors import SINGLE, Pieces, write_pieces
from penstock_runtime.rows import Float

SUFFIX = ".gguf"


def unpack(path: Path, cache: Path, check_size: Callable[[int], None] = lambda _: None) -> Path:
    """The folder that holds the model of a GGUF file, written now or before.

    `check_size` is called with the bytes of its tensors before they are written, up to eight times those of the file,
    and raises if they are too many. CorruptModel for a damaged file; UnsupportedModel for architectures, tensors and
    tokenizers that are not read here.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache / "gguf" / digest[:32]
    if target.is_dir():
        return target
    model = _Model(GgufFile.open(path))
    model.check_whole()
    check_size(sum(4 * math.prod(shape) for shape, _ in model.tensors().values()))

    def write(draft: Path) -> None:
        for name, content in model.settings().items():
            (draft / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        write_pieces(draft / SINGLE, model.tensors())

    return write_once(target, write)


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""Architectures that are read: the name in the file, and the class of transformers."""
_OWN_NAMES = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
"""Names of layers that differ from `_LAYER_NAMES`, by architecture."""
_FREQUENCIES = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_DIVISORS = {_FREQUENCIES, _SHORT_FACTORS, _LONG_FACTORS}
"""Divisors of the frequencies of rotary positions: of Llama 3, and of LongRoPE (Phi-3)."""
GEMMA_PATTERN, GEMMA_LOCAL_BASE = 6, 10_000.0
"""Each sixth layer of Gemma 3 has no window; the base of rotary positions in layers with one. Files lack both."""
GEMMA_27B_LAYERS = 62
"""The only size with queries that are not scaled by the width of a head."""


@dataclass(frozen=True)
class _Model:
    """The model of a file, under the names of transformers."""

    file: GgufFile

    def settings(self) -> dict[str, Any]:
        """The JSON files of the folder, by name."""
        return {
            "config.json": self.config(),
            "tokenizer.json": self.tokenizer(),
            "tokenizer_config.json": self._tokenizer_config(),
            "generation_config.json": {**self._token_ids(), "eos_token_id": self._ends()},
        }

    def check_whole(self) -> None:
        """UnsupportedModel for one of several files that have the tensors together."""
        parts = self.file.metadata.get("split.count", 1)
        if parts != 1:
            raise UnsupportedModel(
                f"{self.file.path} is one of {parts} files, which have the tensors together",
                remedy="Join them with llama-gguf-split --merge",
            )

    @property
    def architecture(self) -> str:
        name = self._text("general.architecture")
        if name not in _CLASSES:
            raise UnsupportedModel(
                f"{self.file.path} has the architecture {name}, which is not read from GGUF",
                remedy=f"Use its safetensors, or a model of one of {', '.join(sorted(_CLASSES))}",
            )
        return name

    def config(self) -> dict[str, Any]:
        """config.json"""
        name = self.architecture
        heads = self._number(f"{name}.attention.head_count")
        hidden = self._number(f"{name}.embedding_length")
        tokens = self._list("tokenizer.ggml.tokens")
        size = self._number(f"{name}.attention.key_length", hidden // max(heads, 1))
        context = self._number(f"{name}.context_length")
        embeddings = self.file.tensors.get("token_embd.weight")
        config = {
            "architectures": [_CLASSES[name]],
            "model_type": "gemma3_text" if name == "gemma3" else name,
            # Some models have more rows than tokens.
            "vocab_size": len(tokens) if embeddings is None else embeddings.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._number(f"{name}.feed_forward_length"),
            "num_hidden_layers": self._number(f"{name}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number(f"{name}.attention.head_count_kv", heads),
            "head_dim": size,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": self._decimal(f"{name}.attention.layer_norm_rms_epsilon"),
            "rope_theta": self._decimal(f"{name}.rope.freq_base", 10_000.0),
            "attention_bias": name == "qwen2",
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "torch_dtype": "float32",
            **self._token_ids(),
            **self._own_settings(hidden // max(heads, 1), size),
        }
        scaling = self._rope_scaling(context)
        return config if scaling is None else config | {"rope_scaling": scaling}

    def _own_settings(self, share: int, size: int) -> dict[str, Any]:
        """Of Phi-3 and Gemma 3. `share`: hidden width for each head; `size`: width of a head."""
        name = self.architecture
        if name == "phi3":
            context = self._number(f"{name}.context_length")
            turned = self._number(f"{name}.rope.dimension_count", size)
            return {
                "original_max_position_embeddings": self._number(
                    f"{name}.rope.scaling.original_context_length", context
                ),
                "partial_rotary_factor": turned / size,
                # 0: none.
                "sliding_window": self.file.metadata.get(f"{name}.attention.sliding_window") or None,
            }
        if name == "gemma3":
            is_27b = self._number(f"{name}.block_count") == GEMMA_27B_LAYERS
            return {
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": share if is_27b else size,
                "sliding_window": self._number(f"{name}.attention.sliding_window"),
                "sliding_window_pattern": GEMMA_PATTERN,
                "rope_local_base_freq": self._decimal(f"{name}.rope.freq_base_swa", GEMMA_LOCAL_BASE),
                "rope_theta": self._decimal(f"{name}.rope.freq_base", 1_000_000.0),
            }
        return {}

    def _rope_scaling(self, context: int) -> dict[str, Any] | None:
        name = self.architecture
        kind = self.file.metadata.get(f"{name}.rope.scaling.type", "none")
        if _FREQUENCIES in self.file.tensors:
            # The file has the divisors themselves, not the rule that made them.
            return {
                "rope_type": "longrope",
                "short_factor": self.file.read(_FREQUENCIES).tolist(),
                "original_max_position_embeddings": context,
                "attention_factor": 1.0,
            }
        if _SHORT_FACTORS in self.file.tensors:
            factors = {
                "rope_type": "longrope",
                "short_factor": self.file.read(_SHORT_FACTORS).tolist(),
                "long_factor": self.file.read(_LONG_FACTORS).tolist() if _LONG_FACTORS in self.file.tensors else [],
            }
            magnitude = f"{name}.rope.scaling.attn_factor"
            has_own = magnitude in self.file.metadata
            return factors | ({"attention_factor": self._decimal(magnitude)} if has_own else {})
        if kind == "linear":
            return {"rope_type": "linear", "factor": self._decimal(f"{name}.rope.scaling.factor")}
        return None if kind == "none" else {"rope_type": kind}

    def tensors(self) -> Mapping[str, Pieces]:
        """Each tensor under its name in transformers."""
        return {
            self._renamed(name): (tensor.shape, partial(self._pieces, name))
            for name, tensor in self.file.tensors.items()
            if name not in _DIVISORS
        }

    def _renamed(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        parts, names = name.split("."), _LAYER_NAMES | _OWN_NAMES.get(self.architecture, {})
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in names:
            return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"
        raise UnsupportedModel(
            f"{self.file.path} has a tensor {name}, which models of this architecture do not have",
            remedy="Use the model's safetensors",
        )

    def _pieces(self, name: str) -> Iterator[Float]:
        yield self._read(name)

    def _read(self, name: str) -> Float:
        """A tensor. llama.cpp stores queries and keys of Llama with the two numbers of a rotation side by side;
        transformers has them half a head apart."""
        array = self.file.read(name)
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            # llama.cpp stores the factor, transformers its difference from 1.
            return array - np.float32(1)
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if self.architecture != "llama" or part not in {"attn_q", "attn_k"}:
            return array
        config = self.config()
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if len(array) % (2 * heads):
            raise self._corrupt(f"{name} has {len(array)} rows for {heads} heads")
        paired = array.reshape(heads, len(array) // heads // 2, 2, *array.shape[1:])
        return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(array.shape))

    def tokenizer(self) -> dict[str, Any]:
        """tokenizer.json"""
        metadata = self.file.metadata
        kind = self._text("tokenizer.ggml.model")
        tokens = self._list("tokenizer.ggml.tokens")
        kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        if len(kinds) != len(tokens):
            raise self._corrupt(f"it has {len(tokens)} tokens and {len(kinds)} types of tokens")
        vocabulary = Vocabulary(tokens, kinds)
        ids = self._token_ids()
        first = ids.get("bos_token_id") if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") else None
        last = ids.get("eos_token_id") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
        if kind == "gpt2":
            name = self._text("tokenizer.ggml.pre", "default")
            if not is_splitting(name):
                raise UnsupportedModel(
                    f"{self.file.path} splits texts as {name}, which is not read from GGUF",
                    remedy="Use the model's safetensors, with its tokenizer.json",
                )
            merges = [tuple(merge.split(" ", 1)) for merge in self._list("tokenizer.ggml.merges")]
            return byte_level(vocabulary, merges, name, first=first, last=last)
        if kind == "llama":
            scores = metadata.get("tokenizer.ggml.scores")
            if not isinstance(scores, list) or len(scores) != len(tokens):
                raise self._corrupt("tokenizer.ggml.scores is not a list with a number for each token")
            prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
            unknown = ids.get("unk_token_id", 0)
            return sentence_pieces(vocabulary, scores, unknown, prefix=bool(prefix), first=first, last=last)
        raise UnsupportedModel(
            f"{self.file.path} has a tokenizer of the kind {kind}, which is not read from GGUF",
            remedy="Use the model's safetensors, with its tokenizer.json",
        )

    def _tokenizer_config(self) -> dict[str, Any]:
        tokens, ids = self._list("tokenizer.ggml.tokens"), self._token_ids()
        template = self.file.metadata.get("tokenizer.chat_template")
        named = {key.removesuffix("_id"): tokens[number] for key, number in ids.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "model_max_length": self._number(f"{self.architecture}.context_length"),
            "clean_up_tokenization_spaces": False,
            **({"chat_template": template} if isinstance(template, str) else {}),
        }

    def _token_ids(self) -> dict[str, int]:
        names = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}
        count = len(self._list("tokenizer.ggml.tokens"))
        ids = {key: self.file.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
        for key, value in ids.items():
            if value is not None and not (isinstance(value, int) and 0 <= value < count):
                raise self._corrupt(f"{key} is {value!r}, of {count} tokens")
        return {key: value for key, value in ids.items() if value is not None}

    def _ends(self) -> list[int]:
        """The tokens that end an answer: of the text and, in chat models, of a message."""
        turn = self.file.metadata.get("tokenizer.ggml.eot_token_id")
        ends = [self._token_ids().get("eos_token_id"), turn]
        return sorted({end for end in ends if isinstance(end, int)})

    def _number(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._corrupt(f"{key} is {value!r}, not a number from 1")
        return value

    def _decimal(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._corrupt(f"{key} is {value!r}, not a positive number")
        # float32 in the file: 1e-5 is read as 9.999999747378752e-06, which torch rounds to the same float32.
        return float(value)

    def _text(self, key: str, default: str = "") -> str:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._corrupt(f"{key} is {value!r}, not a text")
        return value

    def _list(self, key: str) -> list[str]:
        value = self.file.metadata.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
            raise self._corrupt(f"{key} is not a list of texts")
        return value

    def _corrupt(self, what: str) -> CorruptModel:
        return CorruptModel(f"{self.file.path}: {what}", remedy="Fetch the model again")
