"""Writes small GLiNER folders with the layout of the package gliner; all weights come from numpy's generator."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

TEXTS = (
    "Ada Lovelace was born in London in 1815.",
    "Apple-pie, baked by Sarah Jessica Parker (New York), costs 3.50 dollars!",
    "x",
    "Jürgen lives in 東京 and works for the well-known ACME_corp since May; he likes it there and stays for the year",
)
LABELS = ("person", "city", "a date or year", "thing")
THRESHOLD = 0.55
WIDTH, INNER = 32, 24
WORDS = ("born", "in", "london", "apple", "pie", "baked", "city", "person", "date", "year", "thing", "lives", "works")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta": ("deberta-v2", {}),
    "deberta-last": ("deberta-v2", {"subtoken_pooling": "last", "hidden_size": WIDTH, "num_rnn_layers": 0}),
    "deberta-marker": ("deberta-v2", {"span_mode": "marker", "max_width": 3}),
    "deberta-follow": ("deberta-v2", {"embed_ent_token": False, "max_len": 12, "num_rnn_layers": 2}),
    "modernbert": ("modernbert", {}),
}
"""Encoder and settings of each folder."""


def encoder_config(kind: str, vocabulary: int) -> Any:
    """A small encoder."""
    if kind == "modernbert":
        return transformers.ModernBertConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128, local_attention=16, global_attn_every_n_layers=2, pad_token_id=0,
            bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3, reference_compile=False,
        )  # fmt: skip
    return transformers.DebertaV2Config(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        type_vocab_size=0, norm_rel_ebd="layer_norm", share_att_key=True, position_buckets=16,
    )  # fmt: skip


def write_tokenizer(path: Path) -> dict[str, int]:
    """WordPiece of letters and a few words, with the tokens of GLiNER; its vocabulary."""
    letters = string.ascii_lowercase + string.digits
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters, *(f"##{one}" for one in letters)]
    backend = Tokenizer(models.WordPiece({entry: index for index, entry in enumerate(entries)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=128,
    )  # fmt: skip
    tokenizer.add_tokens(["<<ENT>>", "<<SEP>>"], special_tokens=True)
    tokenizer.save_pretrained(path)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def write_gliner(path: Path, case: str) -> Path:
    """The folder of one of `CASES`."""
    kind, more = CASES[case]
    path.mkdir(parents=True)
    vocabulary = write_tokenizer(path)
    config = encoder_config(kind, len(vocabulary))
    settings: dict[str, Any] = {
        "model_name": "none",
        "model_type": "gliner_uni_encoder_span",
        "name": "small",
        "max_width": 4,
        "hidden_size": INNER,
        "span_mode": "markerV0",
        "max_len": 40,
        "num_rnn_layers": 1,
        "subtoken_pooling": "first",
        "dropout": 0.0,
        "class_token_index": vocabulary["<<ENT>>"],
        "vocab_size": len(vocabulary),
        "ent_token": "<<ENT>>",
        "sep_token": "<<SEP>>",
        "encoder_config": config.to_dict(),
        **more,
    }
    (path / "gliner_config.json").write_text(json.dumps(settings, indent=1))
    generator = np.random.default_rng(len(case))
    shapes = {
        f"token_rep_layer.bert_layer.model.{name}": tuple(tensor.shape)
        for name, tensor in transformers.AutoModel.from_config(config).state_dict().items()
    }
    shapes |= head_shapes(settings)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        # Scores are neither all 0 nor all 1.
        values = generator.normal(size=shape) * (1.4 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1)
        is_norm = "norm" in name.lower() and name.endswith("weight")
        tensors[name] = (1 + values if is_norm else values).astype(np.float32)
    safetensors.numpy.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def head_shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that are not the encoder's."""
    width = settings["hidden_size"]
    inner = width * (2 if settings["span_mode"] == "marker" else 4)
    spans = "span_rep_layer.span_rep_layer"
    layers = {f"{spans}.{name}.0": (width, inner) for name in ("project_start", "project_end")}
    layers |= {f"{spans}.{name}.3": (inner, width) for name in ("project_start", "project_end")}
    if settings["span_mode"] == "marker":
        layers[f"{spans}.out_project"] = (2 * width, width)
    else:
        layers |= {f"{spans}.out_project.0": (2 * width, 4 * width), f"{spans}.out_project.3": (4 * width, width)}
    layers |= {"prompt_rep_layer.0": (width, 4 * width), "prompt_rep_layer.3": (4 * width, width)}
    if width != WIDTH:
        layers["token_rep_layer.projection"] = (WIDTH, width)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (width_in, width_out) in layers.items():
        shapes |= {f"{name}.weight": (width_out, width_in), f"{name}.bias": (width_out,)}
    half = width // 2
    for index in range(settings["num_rnn_layers"]):
        for direction in ("", "_reverse"):
            names = {"weight_ih": (4 * half, width), "weight_hh": (4 * half, half), "bias_ih": (4 * half,)}
            for name, shape in (*names.items(), ("bias_hh", (4 * half,))):
                shapes[f"rnn.lstm.{name}_l{index}{direction}"] = shape
    return shapes
