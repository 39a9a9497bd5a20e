"""Small models of four kinds with random weights and real fast tokenizers, saved as transformers saves them.

The judge of these tests is transformers itself, running the same weights in torch.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.tasks import HEAD_OF_TASK, Head, TaskName
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Outputs, Row
from penstock_runtime.tasks import RequestLimits, Task, make_task
from tests.runtime.tasks.texts import TRAINING

POSITIONS = 48
"""The longest sequence of the small models: short texts make several windows."""

VOCABULARY = 600
ALPHABET = 120
"""Fewer characters than the texts have, so that some are unknown."""

NER = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
NLI = ("contradiction", "neutral", "entailment")


def bert_tokenizer(*, lowercase: bool = True) -> Any:
    """WordPiece as BERT has it."""
    backend = _word_piece(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), "[UNK]", lowercase=lowercase)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return transformers.BertTokenizerFast(tokenizer_object=backend, do_lower_case=lowercase, model_max_length=POSITIONS)


def distilbert_tokenizer() -> Any:
    """WordPiece with capitals; its models have no token types."""
    cased = bert_tokenizer(lowercase=False)
    return transformers.DistilBertTokenizerFast(
        tokenizer_object=cased.backend_tokenizer, do_lower_case=False, model_max_length=POSITIONS
    )


def mpnet_tokenizer() -> Any:
    """WordPiece between <s> and </s>, two of which part a pair."""
    specials = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
    backend = _word_piece(specials, "[UNK]", lowercase=True)
    backend.post_processor = processors.RobertaProcessing(
        sep=("</s>", backend.token_to_id("</s>")), cls=("<s>", backend.token_to_id("<s>")), trim_offsets=True
    )
    return transformers.MPNetTokenizerFast(
        tokenizer_object=backend,
        mask_token=tokenizers.AddedToken("<mask>", lstrip=True, special=True),
        model_max_length=POSITIONS,
    )


def roberta_tokenizer() -> Any:
    """Byte-level BPE: spaces belong to tokens, offsets are trimmed."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "<pad>", "</s>", "<unk>", tokenizers.AddedToken("<mask>", lstrip=True, special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING, trainer)
    backend.post_processor = processors.RobertaProcessing(
        sep=("</s>", 2), cls=("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return transformers.RobertaTokenizerFast(tokenizer_object=backend, model_max_length=POSITIONS)


def unigram_tokenizer() -> Any:
    """Unigram with a metaspace, as XLM-RoBERTa has it."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return transformers.XLMRobertaTokenizerFast(tokenizer_object=backend, model_max_length=POSITIONS)


def _word_piece(specials: tuple[str, ...], unknown: str, *, lowercase: bool) -> Any:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    # The trainer's own choice among characters that are as frequent differs from run to run.
    counts = Counter("".join(backend.normalizer.normalize_str(" ".join(TRAINING)).split()))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:ALPHABET]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(specials),
        show_progress=False,
        limit_alphabet=ALPHABET,
        initial_alphabet=alphabet,
    )
    backend.train_from_iterator(TRAINING, trainer)
    return backend


@dataclass(frozen=True, eq=False)
class Family:
    """One kind of model."""

    name: str
    prefix: str
    """Of the classes of transformers: `Bert` of `BertForMaskedLM`."""
    tokenizer: Callable[[], Any]
    sizes: dict[str, int]
    """The names that its configuration has for the sizes."""


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
}
OFFSET_SIZES = SIZES | {"max_position_embeddings": POSITIONS + 2}
DISTIL_SIZES = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": POSITIONS
}  # fmt: skip

BERT = Family("bert", "Bert", bert_tokenizer, SIZES)
DISTILBERT = Family("distilbert", "DistilBert", distilbert_tokenizer, DISTIL_SIZES)
ROBERTA = Family("roberta", "Roberta", roberta_tokenizer, OFFSET_SIZES | {"type_vocab_size": 1})
MPNET = Family("mpnet", "MPNet", mpnet_tokenizer, OFFSET_SIZES)
XLM_ROBERTA = Family("xlm-roberta", "XLMRoberta", unigram_tokenizer, OFFSET_SIZES | {"type_vocab_size": 1})

FAMILIES = (BERT, DISTILBERT, ROBERTA, MPNET)
"""The kinds that every task is judged with."""

HEADS = {
    Head.ENCODER: "Model",
    Head.SEQUENCE: "ForSequenceClassification",
    Head.TOKEN: "ForTokenClassification",
    Head.SPAN: "ForQuestionAnswering",
    Head.MASKED_LM: "ForMaskedLM",
}


@dataclass(frozen=True)
class Built:
    """A model in its folder, and the same weights in torch."""

    family: Family
    path: Path
    model: Any
    tokenizer: Any

    def folder(self) -> ModelFolder:
        """What is under test reads this."""
        return ModelFolder.open(self.path)

    def task(self, name: TaskName, **options: Any) -> Runner:
        """The task under test, on torch."""
        return Runner(make_task(name, self.folder(), **options), self)

    def pipeline(self, name: TaskName) -> Any:
        """The judge. Skips the test if this transformers has none for the task (`tests/golden/pipeline.py`)."""
        if name.value not in transformers.pipelines.SUPPORTED_TASKS | transformers.pipelines.TASK_ALIASES:
            pytest.skip(f"transformers {transformers.__version__} has no pipeline for {name.value}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.pipeline(name.value, model=self.model, tokenizer=self.tokenizer, device="cpu")

    def forward(self, row: Row, *, all_tokens: bool = False) -> Outputs:
        """One row through torch, in the shape of our graphs: no batch axis, masks only for a masked-lm."""
        ids = torch.tensor([row.ids])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if row.type_ids is not None:
            given["token_type_ids"] = torch.tensor([row.type_ids])
        with torch.inference_mode():
            output = self.model(**given)
        found = {name: np.array(value[0].numpy()) for name, value in output.items()}
        if type(self.model).__name__.endswith(HEADS[Head.MASKED_LM]) and not all_tokens:
            found["logits"] = found["logits"][np.asarray(row.ids) == self.tokenizer.mask_token_id]
        return found


def giving_up_the_left(model: Built, path: Path) -> Built:
    """The same with `truncation_side` left, in the folder `path`."""
    shutil.copytree(model.path, path, dirs_exist_ok=True)
    settings = json.loads((path / "tokenizer_config.json").read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"truncation_side": "left"}))
    return Built(model.family, path, model.model, transformers.AutoTokenizer.from_pretrained(path))


@dataclass(frozen=True)
class Runner:
    """A task with a model behind it."""

    task: Task
    built: Built
    all_tokens: bool = False

    def __call__(self, inputs: Any, **parameters: Any) -> Any:
        prepared = self.task.prepare(self.task.parse(inputs, parameters))
        reduced = [self.task.reduce(row, self.built.forward(row, all_tokens=self.all_tokens)) for row in prepared.rows]
        return self.task.assemble(prepared, reduced)


@cache
def tokenizer_of(family: Family) -> Any:
    """The family's tokenizer, trained once."""
    return family.tokenizer()


def build(family: Family, head: Head, path: Path, *, labels: tuple[str, ...] = NER, **config: Any) -> Built:
    """A model with seeded random weights, saved to `path`. Its logits are spread out, so that no arg-max is a tie."""
    tokenizer = tokenizer_of(family)
    options: dict[str, Any] = family.sizes | config
    if head in {Head.SEQUENCE, Head.TOKEN}:
        options["id2label"] = dict(enumerate(labels))
        options["label2id"] = {str(label): index for index, label in enumerate(labels)}
    configuration = getattr(transformers, f"{family.prefix}Config")(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **options
    )
    torch.manual_seed(len(family.name) * 31 + len(head))
    model = getattr(transformers, family.prefix + HEADS[head])(configuration).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                # Words differ much, layers mix little: neighbouring tokens get labels of their own.
                loud = "word_embeddings" in name or name.startswith(("classifier", "qa_outputs"))
                weight.normal_(0, 1.0 if loud else 0.12)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Built(family, path, model, tokenizer)


def build_for(name: TaskName, family: Family, path: Path, **options: Any) -> Built:
    """A model that the task fits."""
    labels = NLI if name is TaskName.ZERO_SHOT_CLASSIFICATION else ("score",) if name is TaskName.TEXT_RANKING else NER
    return build(family, HEAD_OF_TASK[name], path, **({"labels": labels} | options))


SMALL = RequestLimits(items=64, rows=256)
"""For tests that are to meet the limits."""
