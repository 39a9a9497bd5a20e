"""BART with both of its halves, and the encoders of T5, equal transformers' own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.errors import UnsupportedModel
from penstock.tasks import Head, TaskName
from penstock_optimizer.export import export
from penstock_runtime.engines.grid import feed
from penstock_runtime.rows import collate
from penstock_runtime.tasks import make_task
from tests.optimizer.export.judge import ENGINE_OF, Arrays, assert_equals_torch, rows
from tests.optimizer.export.models import SPECIAL_TOKENS, VOCABULARY, Made, make
from tests.runtime.tasks.families import roberta_tokenizer

pytestmark = pytest.mark.parity

BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "num_labels": 3,
    **SPECIAL_TOKENS,
    "decoder_start_token_id": 3,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 40,
    "num_layers": 3,
    "num_heads": 3,
    "num_labels": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "decoder_start_token_id": 0,
}
END = 3


def ended(*lengths: int, seed: int = 7) -> Arrays:
    """Rows that end in the end-of-text token."""
    batch = rows(*lengths, seed=seed)
    batch["input_ids"][np.arange(len(lengths)), np.array(lengths) - 1] = END
    return batch


def check(made: Made, judge: Made, out: Path, *batches: Arrays) -> None:
    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, made.head, out / flavour, flavour=flavour)
        assert exported.how == "builder"
        assert_equals_torch(exported, judge, *batches, engines=[engine])


@pytest.mark.parametrize("changes", [{}, {"scale_embedding": True, "activation_function": "relu"}])
@pytest.mark.parametrize("head", [Head.ENCODER, Head.SEQUENCE, Head.SPAN, Head.MASKED_LM])
def test_bart_equals_transformers(head: Head, changes: dict[str, Any], tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BartConfig", head, **BART, **changes)

    check(made, made, tmp_path / "out", ended(13), ended(4, 17, 9))


def test_bart_classifies_texts_with_different_numbers_of_end_tokens_in_one_batch(tmp_path: Path) -> None:
    """As each alone; transformers refuses the batch."""
    made = make(tmp_path / "model", "BartConfig", Head.SEQUENCE, **BART)
    batch = ended(8, 12)
    batch["input_ids"][1, 5:7] = END  # a pair of texts
    with torch.no_grad():
        expected = [
            made.model(input_ids=torch.from_numpy(batch["input_ids"][row : row + 1, :length])).logits.numpy()
            for row, length in enumerate((8, 12))
        ]

    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, Head.SEQUENCE, tmp_path / flavour, flavour=flavour)
        found = engine(exported.path, exported.io)(batch)["logits"]
        np.testing.assert_allclose(found, np.concatenate(expected), rtol=0, atol=2e-5)


def test_bart_answers_zero_shot_classification_as_transformers(tmp_path: Path) -> None:
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    fields = {**BART, "vocab_size": 600, "id2label": labels, "label2id": {name: at for at, name in labels.items()}}
    fields |= {"eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2, "num_labels": 3}
    made = make(tmp_path / "model", "BartConfig", Head.SEQUENCE, **fields)
    tokenizer = roberta_tokenizer()
    tokenizer.save_pretrained(made.path)
    judge = transformers.pipeline("zero-shot-classification", model=made.model, tokenizer=tokenizer, device="cpu")
    text, options = "The train to London is late.", {"candidate_labels": ["travel", "food"], "multi_label": True}
    expected = judge(text, **options)
    task = make_task(TaskName.ZERO_SHOT_CLASSIFICATION, made.folder)
    prepared = task.prepare(task.parse(text, options))

    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, Head.SEQUENCE, tmp_path / flavour, flavour=flavour)
        logits = engine(exported.path, exported.io)(feed(collate(prepared.rows), exported.io.inputs))["logits"]
        reduced = [task.reduce(row, {"logits": one}) for row, one in zip(prepared.rows, logits, strict=True)]
        found = task.assemble(prepared, reduced)
        assert found["labels"] == expected["labels"]
        np.testing.assert_allclose(found["scores"], expected["scores"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", [Head.SEQUENCE, Head.TOKEN])
def test_a_bart_without_the_head_is_refused(head: Head, tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BartConfig", Head.MASKED_LM, **BART)

    with pytest.raises(UnsupportedModel, match="without a"):
        export(made.folder, head, tmp_path / "out")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("config_class", "encoder_class", "changes"),
    [
        ("T5Config", "T5EncoderModel", {}),
        ("T5Config", "T5EncoderModel", {"feed_forward_proj": "gated-gelu", "num_layers": 1}),
        ("T5Config", "T5EncoderModel", {"feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 32}),
        ("MT5Config", "MT5EncoderModel", {}),
        ("UMT5Config", "UMT5EncoderModel", {}),
    ],
)
def test_the_encoder_of_t5_equals_transformers(
    config_class: str, encoder_class: str, changes: dict[str, Any], whole: bool, tmp_path: Path
) -> None:
    """Of a folder with both halves, and of one with the encoder alone, as those of sentence-t5."""
    made = make(tmp_path / "model", config_class, Head.ENCODER, **{**T5, **changes})
    encoder_type = getattr(transformers, encoder_class)
    encoder = encoder_type.from_pretrained(made.path, attn_implementation="eager").eval()
    if not whole:
        encoder.save_pretrained(made.path)

    check(made, Made(made.path, encoder, Head.ENCODER), tmp_path / "out", rows(13), rows(4, 37, 9))


def test_token_classification_by_the_encoder_of_t5_equals_transformers(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "T5Config", Head.TOKEN, **T5)

    check(made, made, tmp_path / "out", rows(13), rows(4, 17, 9))
