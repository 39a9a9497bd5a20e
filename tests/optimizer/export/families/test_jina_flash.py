"""Jina's XLM-RoBERTa equals what its authors publish of it: RoBERTa's layers, with rotary positions or RoBERTa's, and
with adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from penstock.errors import CorruptModel, UnsafeModel
from penstock.manifest import Axes
from penstock.tasks import Head
from penstock_optimizer.export import export
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.limits import LONGEST_ROW
from tests.optimizer.export.judge import ENGINE_OF, Arrays, rows
from tests.optimizer.export.models import MASK_ID, PAD_ID, VOCABULARY, write_tokenizer

HIDDEN, HEADS, INNER, LAYERS, RANK, ALPHA, EPSILON = 24, 3, 40, 2, 4, 1.0, 1e-5
THETA = 20_000.0
ADAPTERS = ("retrieval.query", "retrieval.passage", "text-matching")
CODE = "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaModel"
CONFIG: dict[str, Any] = {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "auto_map": {"AutoModel": CODE, "AutoConfig": CODE.replace("XLMRobertaModel", "XLMRobertaFlashConfig")},
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 42,
    "type_vocab_size": 1,
    "layer_norm_eps": EPSILON,
    "pad_token_id": PAD_ID,
    "hidden_act": "gelu",
    "position_embedding_type": "rotary",
    "rotary_emb_base": THETA,
    "use_flash_attn": True,
    "id2label": {"0": "a", "1": "b", "2": "c"},
}
ADAPTED = {
    "auto_map": {"AutoModel": CODE.replace("modeling_xlm_roberta.XLMRobertaModel", "modeling_lora.XLMRobertaLoRA")},
    "lora_adaptations": list(ADAPTERS),
    "lora_rank": RANK,
    "lora_alpha": ALPHA,
}
Weights = dict[str, NDArray[np.float32]]


def tensors(head: Head, *, is_rotary: bool, adapted: bool) -> Weights:
    """Random weights under the names of the authors' code."""
    generator = np.random.default_rng(4)

    def random(*shape: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = (generator.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)
        return found

    found: Weights = {}
    matrices = {"embeddings.word_embeddings": (VOCABULARY, HIDDEN), "embeddings.token_type_embeddings": (1, HIDDEN)}
    if not is_rotary:
        matrices["embeddings.position_embeddings"] = (42, HIDDEN)
    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        shapes = {
            "mixer.Wqkv": (3 * HIDDEN, HIDDEN), "mixer.out_proj": (HIDDEN, HIDDEN),
            "mlp.fc1": (INNER, HIDDEN), "mlp.fc2": (HIDDEN, INNER),
        }  # fmt: skip
        matrices |= {f"{layer}.{name}": shape for name, shape in shapes.items()}
        for norm in ("norm1", "norm2"):
            found |= {f"{layer}.{norm}.weight": 1 + random(HIDDEN), f"{layer}.{norm}.bias": random(HIDDEN)}
    found |= {"emb_ln.weight": 1 + random(HIDDEN), "emb_ln.bias": random(HIDDEN)}
    for name, (rows_, width) in matrices.items():
        is_table = name.startswith("embeddings")
        if not is_table:
            found[f"{name}.bias"] = random(rows_)
        if not adapted:
            found[f"{name}.weight"] = random(rows_, width)
            continue
        lora = f"{name}.parametrizations.weight.0.lora_"
        found[f"{name}.parametrizations.weight.original"] = random(rows_, width)
        found[f"{lora}A"] = random(len(ADAPTERS), *((rows_, RANK) if is_table else (RANK, width)))
        found[f"{lora}B"] = random(len(ADAPTERS), *((RANK, width) if is_table else (rows_, RANK)))
    found = {f"roberta.{name}": value for name, value in found.items()}
    tops = {
        Head.SEQUENCE: {"classifier.dense": (HIDDEN, HIDDEN), "classifier.out_proj": (3, HIDDEN)},
        Head.MASKED_LM: {"lm_head.dense": (HIDDEN, HIDDEN)},
    }
    for name, shape in tops.get(head, {}).items():
        found |= {f"{name}.weight": random(*shape), f"{name}.bias": random(shape[0])}
    if head is Head.MASKED_LM:
        found |= {"lm_head.layer_norm.weight": 1 + random(HIDDEN), "lm_head.layer_norm.bias": random(HIDDEN)}
        found |= {"lm_head.bias": random(VOCABULARY)}
    return found


def model(path: Path, head: Head = Head.ENCODER, *, adapted: bool = False, **changes: Any) -> Path:
    path.mkdir()
    config = {**CONFIG, **(ADAPTED if adapted else {}), **changes}
    endings = {Head.ENCODER: "Model", Head.SEQUENCE: "ForSequenceClassification", Head.MASKED_LM: "ForMaskedLM"}
    config = {
        "architectures": [f"XLMRoberta{endings[head]}"],
        **{k: v for k, v in config.items() if k != "architectures"},
    }
    (path / "config.json").write_text(json.dumps(config))
    is_rotary = config["position_embedding_type"] == "rotary"
    save_file(tensors(head, is_rotary=is_rotary, adapted=adapted), path / "model.safetensors")
    (path / "modeling_xlm_roberta.py").write_text("raise RuntimeError('this code must not run')")
    write_tokenizer(path)
    return path


def choose(path: Path, adapter: str) -> None:
    (path / "sentence_bert_config.json").write_text(json.dumps({"model_args": {"default_task": adapter}}))


class Definition:
    """The computation that the authors publish, in float64."""

    def __init__(self, path: Path, adapter: str | None = None) -> None:
        self.config: Mapping[str, Any] = json.loads((path / "config.json").read_text())
        self._tensors = {
            name: value.astype(np.float64) for name, value in load_file(path / "model.safetensors").items()
        }
        self._adapter = adapter

    def weight(self, name: str) -> Any:
        """W, or W + alpha / rank B A of the adapter: A B for tables."""
        if f"{name}.weight" in self._tensors:
            return self._tensors[f"{name}.weight"]
        original = self._tensors[f"{name}.parametrizations.weight.original"]
        if self._adapter is None:
            return original
        index = ADAPTERS.index(self._adapter)
        a, b = (self._tensors[f"{name}.parametrizations.weight.0.lora_{letter}"][index] for letter in "AB")
        return original + (a @ b if "embeddings" in name else b @ a) * ALPHA / RANK

    def dense(self, x: NDArray[Any], name: str) -> Any:
        return x @ self.weight(name).T + self._tensors[f"{name}.bias"]

    def norm(self, x: NDArray[Any], name: str) -> Any:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPSILON)
        return scaled * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"]

    def rotated(self, x: NDArray[Any]) -> Any:
        """[batch, tokens, heads, width]: pairs of a value and that half the width after it, turned by the position."""
        if self.config["position_embedding_type"] != "rotary":
            return x
        half = x.shape[-1] // 2
        angles = np.arange(x.shape[1])[:, None] / THETA ** (np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def states(self, batch: Arrays) -> Any:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        x = self.weight("roberta.embeddings.word_embeddings")[ids]
        x = x + self.weight("roberta.embeddings.token_type_embeddings")[0]
        if self.config["position_embedding_type"] == "absolute":
            counted = ids != PAD_ID
            places = np.cumsum(counted, axis=1) * counted + PAD_ID
            x = x + self.weight("roberta.embeddings.position_embeddings")[places]
        x = self.norm(x, "roberta.emb_ln")
        for index in range(LAYERS):
            layer = f"roberta.encoder.layers.{index}"
            split = self.dense(x, f"{layer}.mixer.Wqkv").reshape(*x.shape[:2], 3, HEADS, -1)
            query, key, value = self.rotated(split[:, :, 0]), self.rotated(split[:, :, 1]), split[:, :, 2]
            scores = np.einsum("bqhw,bkhw->bhqk", query, key) / np.sqrt(query.shape[-1])
            scores = np.where(mask[:, None, None] == 1, scores, -np.inf)
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            shares /= shares.sum(axis=-1, keepdims=True)
            mixed = np.einsum("bhqk,bkhw->bqhw", shares, value).reshape(x.shape)
            x = self.norm(x + self.dense(mixed, f"{layer}.mixer.out_proj"), f"{layer}.norm1")
            x = self.norm(x + self.dense(gelu(self.dense(x, f"{layer}.mlp.fc1")), f"{layer}.mlp.fc2"), f"{layer}.norm2")
        return x

    def answers(self, batch: Arrays, head: Head) -> Any:
        states = self.states(batch)
        if head is Head.ENCODER:
            return states * batch["attention_mask"][..., None]
        if head is Head.SEQUENCE:
            return self.dense(np.tanh(self.dense(states[:, 0], "classifier.dense")), "classifier.out_proj")
        states = states[batch["input_ids"] == MASK_ID]
        words = self.weight("roberta.embeddings.word_embeddings")
        return (
            self.norm(gelu(self.dense(states, "lm_head.dense")), "lm_head.layer_norm") @ words.T
            + self._tensors["lm_head.bias"]
        )


def gelu(x: NDArray[Any]) -> Any:
    return x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2


def assert_equals_definition(path: Path, head: Head, adapter: str | None = None) -> None:
    definition = Definition(path, adapter)
    for flavour, engine in ENGINE_OF.items():
        exported = export(ModelFolder.open(path), head, path.parent / flavour, flavour=flavour)
        assert exported.how == "builder"
        for batch in (rows(13), rows(4, 17, 9)):
            (output, axes), *_ = exported.io.outputs.items()
            found = engine(exported.path, exported.io)(batch)[output]
            seen = batch["attention_mask"][..., None] if axes is Axes.TOKENS else 1
            np.testing.assert_allclose(found * seen, definition.answers(batch, head), rtol=0, atol=2e-5)


@pytest.mark.parametrize("head", [Head.ENCODER, Head.SEQUENCE, Head.MASKED_LM])
@pytest.mark.parametrize("positions", ["rotary", "absolute"])
def test_it_equals_its_definition(positions: str, head: Head, tmp_path: Path) -> None:
    assert_equals_definition(model(tmp_path / "model", head, position_embedding_type=positions), head)


@pytest.mark.parametrize("adapter", [None, *ADAPTERS[:2]])
def test_the_chosen_adapter_is_part_of_the_weights(adapter: str | None, tmp_path: Path) -> None:
    path = model(tmp_path / "model", adapted=True)
    if adapter is not None:
        choose(path, adapter)

    assert_equals_definition(path, Head.ENCODER, adapter)

    (note,) = export(ModelFolder.open(path), Head.ENCODER, tmp_path / "out").notes
    assert (adapter or "No adapter (retrieval.query, retrieval.passage, text-matching) is applied") in note


def test_an_adapter_that_does_not_exist_is_refused_and_the_remedy_works(tmp_path: Path) -> None:
    path = model(tmp_path / "model", adapted=True)
    choose(path, "retrieval")

    with pytest.raises(
        CorruptModel, match=r"default task is 'retrieval'.*retrieval\.query, retrieval\.passage"
    ) as caught:
        export(ModelFolder.open(path), Head.ENCODER, tmp_path / "out")

    assert "Name one of these in sentence_bert_config.json" in caught.value.remedy
    choose(path, ADAPTERS[1])
    assert export(ModelFolder.open(path), Head.ENCODER, tmp_path / "out").how == "builder"


def test_its_module_is_read_without_its_code(tmp_path: Path) -> None:
    """modules.json names a class of the model's own for the Transformer."""
    path = model(tmp_path / "model", adapted=True, max_position_embeddings=LONGEST_ROW + 2)
    kinds = {"": "custom_st.Transformer", "1_Pooling": "sentence_transformers.models.Pooling"}
    kinds["2_Normalize"] = "sentence_transformers.models.Normalize"
    entries = [{"path": where, "type": kind, "kwargs": ["task"]} for where, kind in kinds.items()]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    prompts = {ADAPTERS[0]: "query: ", ADAPTERS[1]: ""}
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))

    folder = ModelFolder.open(path)

    assert (str(folder.pooling), folder.normalize, folder.max_tokens) == ("mean", True, LONGEST_ROW)
    assert folder.prompts == prompts

    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "lora_adaptations"}))
    with pytest.raises(UnsafeModel, match=r"custom_st\.Transformer"):
        ModelFolder.open(path)


def test_a_colbert_model_of_this_layout_has_its_projection(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    weight = np.random.default_rng(1).normal(size=(8, HIDDEN)).astype(np.float32)
    save_file({**load_file(path / "model.safetensors"), "linear.weight": weight}, path / "model.safetensors")
    (path / "artifact.metadata").write_text('{"query_token_id": "a", "doc_token_id": "b", "query_maxlen": 9}')

    folder = ModelFolder.open(path)

    assert folder.multi_vector is not None
    np.testing.assert_array_equal(folder.multi_vector.projections[0].weight, weight)
    assert_equals_definition(path, Head.ENCODER)


def test_other_weights_with_code_of_this_name_are_refused_and_the_remedy_works(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    save_file(
        {"embeddings.word_embeddings.weight": np.zeros((VOCABULARY, HIDDEN), np.float32)}, path / "model.safetensors"
    )

    with pytest.raises(
        UnsafeModel, match=r"names code of the model's own.*layout of jina-embeddings-v3 only"
    ) as caught:
        export(ModelFolder.open(path), Head.ENCODER, tmp_path / "out")

    assert "put model.onnx into the folder" in caught.value.remedy
    whole = export(ModelFolder.open(model(tmp_path / "other")), Head.ENCODER, tmp_path / "graph")
    whole.path.rename(path / "model.onnx")
    assert export(ModelFolder.open(path), Head.ENCODER, tmp_path / "out").how == "own-onnx"
