"""Tiny models of every family with random weights, as transformers makes and saves them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from penstock.tasks import Head
from penstock_runtime.models.folder import ModelFolder

MASK_ID = 5
PAD_ID = 1
VOCABULARY = 61
AUTO_CLASS = {
    Head.ENCODER: "AutoModel",
    Head.SEQUENCE: "AutoModelForSequenceClassification",
    Head.TOKEN: "AutoModelForTokenClassification",
    Head.SPAN: "AutoModelForQuestionAnswering",
    Head.MASKED_LM: "AutoModelForMaskedLM",
}
SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "num_labels": 3,
}
SPECIAL_TOKENS: Mapping[str, Any] = {
    "pad_token_id": PAD_ID,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
"""Within the vocabulary, for families whose defaults are not."""
MODERN: Mapping[str, Any] = {**SMALL, "num_hidden_layers": 4, "local_attention": 8, **SPECIAL_TOKENS}
"""Its second and third layers attend to four tokens on each side, the others to all."""
DEBERTA: Mapping[str, Any] = {
    **SMALL,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "BertConfig": SMALL,
    "ErnieConfig": SMALL,
    "RobertaConfig": {**SMALL, "type_vocab_size": 1},
    "XLMRobertaConfig": {**SMALL, "type_vocab_size": 1},
    "CamembertConfig": {**SMALL, "type_vocab_size": 1},
    "Data2VecTextConfig": {**SMALL, "type_vocab_size": 1},
    "DistilBertConfig": {
        "vocab_size": VOCABULARY,
        "dim": 24,
        "n_layers": 2,
        "n_heads": 3,
        "hidden_dim": 40,
        "max_position_embeddings": 40,
        "num_labels": 3,
    },
    "MPNetConfig": SMALL,
    "ElectraConfig": {**SMALL, "embedding_size": 16},
    "AlbertConfig": {**SMALL, "num_hidden_layers": 3, "embedding_size": 16},
    "ModernBertConfig": MODERN,
    "DebertaV2Config": DEBERTA,
}
"""Configuration class to the fields of the smallest model that has all that the family has."""

DECODER: Mapping[str, Any] = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, **SPECIAL_TOKENS}
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "LlamaConfig": DECODER,
    "MistralConfig": {**DECODER, "sliding_window": 6},
    "Qwen2Config": {**DECODER, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3Config": {**DECODER, "head_dim": 8},
    "Gemma3TextConfig": {
        **DECODER,
        "head_dim": 8,
        "query_pre_attn_scalar": 5,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
    },
    "Phi3Config": {**DECODER, "sliding_window": 6},
    "GPT2Config": {**DECODER, "n_inner": 20, "scale_attn_by_inverse_layer_idx": True},
}
"""The same for decoders."""
ENCODER_HEADS = (Head.ENCODER, Head.SEQUENCE, Head.TOKEN, Head.SPAN, Head.MASKED_LM)
HEADS: Mapping[str, Sequence[Head]] = {
    **dict.fromkeys(FAMILIES, ENCODER_HEADS),
    **dict.fromkeys(DECODERS, (Head.ENCODER, Head.SEQUENCE, Head.TOKEN, Head.SPAN)),
    "Gemma3TextConfig": (Head.ENCODER, Head.SEQUENCE),
    "Phi3Config": (Head.ENCODER, Head.SEQUENCE, Head.TOKEN),
}
"""The heads that transformers has for a family."""


@dataclass(frozen=True)
class Made:
    """A model of transformers on disk and in memory."""

    path: Path
    model: Any
    head: Head

    @property
    def folder(self) -> ModelFolder:
        """The folder, opened anew."""
        return ModelFolder.open(self.path)

    def rewrite_config(self, **changes: Any) -> None:
        """Change config.json; None removes a field."""
        path = self.path / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def make(
    path: Path, config_class: str, head: Head, *, seed: int = 0, shard: str = "5GB", auto: str = "", **fields: Any
) -> Made:
    """A model with random weights, saved to `path`; `auto`: a class for it, if not that of the head."""
    if head is Head.SPAN:
        fields["num_labels"] = 2  # start and end
    config = getattr(transformers, config_class)(**fields)
    with warnings.catch_warnings():
        # transformers' DeBERTa uses it when it is imported.
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", FutureWarning)
        make_model = (
            getattr(transformers, auto)._from_config if auto else getattr(transformers, AUTO_CLASS[head]).from_config
        )
        model = make_model(config, attn_implementation="eager").eval()
    shake(model, seed)
    model.save_pretrained(path, max_shard_size=shard)
    write_tokenizer(path)
    return Made(path, model, head)


def shake(model: Any, seed: int) -> None:
    """Random weights that every part of a graph shows in: transformers starts norms at 1 and biases at 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.mul_(1 + 0.2 * noise).add_(0.2 * torch.randn(parameter.shape, generator=generator))


def write_tokenizer(path: Path, mask: str = "<mask>") -> None:
    """Words of one letter and the mask token, under a name."""
    words = {chr(97 + index): index for index in range(VOCABULARY) if index != MASK_ID}
    tokenizer = Tokenizer(WordLevel({**words, mask: MASK_ID}, unk_token="a"))
    tokenizer.add_special_tokens([mask])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<mask>"}))
