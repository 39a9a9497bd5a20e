"""Model folders compared with transformers and sentence-transformers, which wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Pooling
from tests.runtime.models.folders import TOKENIZER

pytestmark = pytest.mark.parity

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 40,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 24,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Bert", SMALL),
    ("Electra", {**SMALL, "embedding_size": 8}),
    ("Roberta", {**SMALL, "pad_token_id": 1}),
    ("Roberta", {**SMALL, "pad_token_id": 4}),
    ("XLMRoberta", {**SMALL, "pad_token_id": 1}),
    ("Camembert", {**SMALL, "pad_token_id": 1}),
    ("MPNet", {**SMALL, "pad_token_id": 1}),
    ("MPNet", {**SMALL, "pad_token_id": 3}),
    ("RobertaPreLayerNorm", {**SMALL, "pad_token_id": 1}),
    ("Data2VecText", {**SMALL, "pad_token_id": 1}),
    ("DistilBert", {"vocab_size": 40, "dim": 8, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 24}),
    ("Albert", {**SMALL, "embedding_size": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), MODELS, ids=[f"{kind}-{o.get('pad_token_id')}" for kind, o in MODELS])
def test_the_longest_sequence_runs_and_one_token_more_does_not(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**options)).eval()
    model.save_pretrained(tmp_path, safe_serialization=True)
    folder = ModelFolder.open(tmp_path)
    assert folder.architecture == f"{kind}Model"
    with torch.no_grad():
        model(torch.full((1, folder.max_tokens), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, folder.max_tokens + 1), 7))


def test_labels_and_problem_type_are_those_of_transformers(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        **SMALL, id2label={0: "sad", 1: "glad", 2: "mad"}, problem_type="multi_label_classification"
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    folder = ModelFolder.open(tmp_path)
    assert folder.labels == ("sad", "glad", "mad")
    assert folder.problem_type == "multi_label_classification"
    assert folder.tensors["classifier.weight"].shape == (3, 8)


def test_shards_that_transformers_writes_hold_all_its_tensors(tmp_path: Path) -> None:
    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    folder = ModelFolder.open(tmp_path)
    assert len(folder.safetensors) > 2
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in folder.tensors.items()} == expected


def test_pickles_that_transformers_writes_are_refused(tmp_path: Path) -> None:
    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    model.save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises(Exception, match=r"holds pytorch_model\.bin, which is a pickle"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("mode", "normalize", "limit", "expected"),
    [
        ("cls", True, 16, Pooling.CLS),
        ("mean", False, None, Pooling.MEAN),
        ("max", True, None, Pooling.MAX),
        ("lasttoken", False, 20, Pooling.LAST),
    ],
)
def test_files_written_by_sentence_transformers_are_read_with_the_same_meaning(
    mode: str, normalize: bool, limit: int | None, expected: Pooling, tmp_path: Path
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    plain = tmp_path / "plain"
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(plain)
    (plain / "tokenizer.json").write_text(TOKENIZER)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(plain / "tokenizer.json"), unk_token="[UNK]", pad_token="[UNK]", model_max_length=22
    ).save_pretrained(plain)
    transformer = modules.Transformer(str(plain), max_seq_length=limit)
    steps = [transformer, modules.Pooling(8, pooling_mode=mode), *([modules.Normalize()] if normalize else [])]
    model = sentence_transformers.SentenceTransformer(
        modules=steps, prompts={"query": "query: "}, default_prompt_name="query", device="cpu"
    )
    model.save_pretrained(str(tmp_path / "saved"))
    folder = ModelFolder.open(tmp_path / "saved")
    assert (folder.pooling, folder.normalize, folder.max_tokens) == (expected, normalize, model.max_seq_length)
    assert folder.default_prompt == "query: "


@pytest.mark.parametrize(
    "settings",
    [
        {"max_seq_length": 12},
        {"processing_kwargs": {"text": {"max_length": 8}}},
        {"processing_kwargs": {"text": {"max_length": 8}, "common": {"max_length": 9}}, "max_seq_length": 6},
        {"processor_kwargs": {"model_max_length": 10}, "max_seq_length": 6},
        {"tokenizer_args": {"model_max_length": 11}, "processor_kwargs": {"model_max_length": 7}},
    ],
    ids=str,
)
def test_lengths_are_those_that_sentence_transformers_cuts_to(settings: dict[str, Any], tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    plain, saved = tmp_path / "plain", tmp_path / "saved"
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(plain)
    words = json.loads(TOKENIZER) | {"pre_tokenizer": {"type": "Whitespace"}}
    (plain / "tokenizer.json").write_text(json.dumps(words))
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(plain / "tokenizer.json"), unk_token="[UNK]", pad_token="[UNK]", model_max_length=22
    ).save_pretrained(plain)
    steps = [modules.Transformer(str(plain)), modules.Pooling(8)]
    sentence_transformers.SentenceTransformer(modules=steps, device="cpu").save_pretrained(str(saved))
    file = saved / "sentence_bert_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | settings))
    judge = sentence_transformers.SentenceTransformer(str(saved), device="cpu")
    cut = judge.preprocess([" ".join(["a"] * 40)])["input_ids"]
    assert ModelFolder.open(saved).max_tokens == cut.shape[1]
