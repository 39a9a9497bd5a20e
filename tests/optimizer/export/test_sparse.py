"""Sparse models: graphs and answers are those of sentence-transformers' SparseEncoder with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import sentence_transformers
import torch
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from penstock.errors import UnsupportedModel
from penstock.manifest import Axes
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import Head, TaskName
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.guard.gate import observe
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import run_rows
from penstock_runtime.tasks.factory import head_of, make_task
from tests.optimizer.export.judge import ENGINES, rows
from tests.optimizer.export.models import FAMILIES, Made, make
from tests.runtime.tasks.families import BERT, ROBERTA, XLM_ROBERTA, Family, build

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
NAME = TaskName.FEATURE_EXTRACTION
TEXTS = ["Clara lives in Berkeley.", "I like you. I love you.", "a", "Was ist das? 東京 😀"]
POOLINGS = [("max", "relu"), ("max", "log1p_relu"), ("sum", "relu"), ("sum", "log1p_relu")]


def with_modules(path: Path, strategy: str = "max", activation: str = "relu", **pooling: Any) -> Path:
    """The folder of a masked language model with the modules of a SparseEncoder, as version 5.0 wrote them."""
    values = {"pooling_strategy": strategy, "activation_function": activation, **pooling}
    modules = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": folder,
            "type": f"sentence_transformers.sparse_encoder.models.{kind}",
        }
        for index, (folder, kind) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_SpladePooling").mkdir()
    (path / "1_SpladePooling" / "config.json").write_text(json.dumps(values))
    return path


def expected_weights(made: Made, batch: dict[str, Any], strategy: Any = "max", activation: Any = "relu") -> Any:
    several_types = getattr(made.model.config, "type_vocab_size", 0) > 1
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if several_types else [])]
    tensors = {name: torch.from_numpy(batch[name]) for name in names}
    with torch.no_grad():
        logits = made.model(**tensors).logits
        features = {"token_embeddings": logits, "attention_mask": tensors["attention_mask"]}
        return SpladePooling(strategy, activation).eval()(features)["sentence_embedding"].numpy()


@pytest.mark.parametrize("config_class", FAMILIES)
def test_each_family_gives_the_weights_of_splade_pooling(config_class: str, tmp_path: Path) -> None:
    made = make(tmp_path / "model", config_class, Head.MASKED_LM, **FAMILIES[config_class])
    with_modules(made.path)
    batch = rows(13, 4, 9)
    for flavour, engine in zip(Flavour, ENGINES, strict=True):
        exported = export(made.folder, Head.SPARSE, tmp_path / flavour.value, flavour=flavour)

        assert exported.how == "builder"
        assert exported.io.outputs == {"weights": Axes.ROW}
        actual = engine(exported.path, exported.io)(batch)["weights"]
        np.testing.assert_allclose(actual, expected_weights(made, batch), atol=2e-5)


@pytest.mark.parametrize(("strategy", "activation"), POOLINGS)
def test_poolings(strategy: str, activation: str, tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.MASKED_LM, **FAMILIES["BertConfig"])
    with_modules(made.path, strategy, activation)
    batch = rows(5, 12)
    expected = expected_weights(made, batch, strategy, activation)

    exported = export(made.folder, Head.SPARSE, tmp_path / "out")

    for engine in ENGINES:
        actual = engine(exported.path, exported.io)(batch)["weights"]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("strategy", "activation"), POOLINGS)
@pytest.mark.parametrize("opset", [17, 18])
def test_an_onnx_file_with_logits_is_pooled(strategy: str, activation: str, opset: int, tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.MASKED_LM, **FAMILIES["BertConfig"])
    with_modules(made.path, strategy, activation)
    batch = rows(5, 12)
    torch.onnx.export(
        made.model,
        tuple(torch.from_numpy(array) for array in batch.values()),
        str(made.path / "model.onnx"),
        input_names=list(batch),
        output_names=["output"],
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in [*batch, "output"]},
        opset_version=opset,
        dynamo=False,
    )
    (made.path / "model.safetensors").unlink()

    exported = export(made.folder, Head.SPARSE, tmp_path / "out")

    assert exported.how == "own-onnx"
    onnx.checker.check_model(str(exported.path), full_check=True)
    expected = expected_weights(made, batch, strategy, activation)
    for engine in ENGINES:
        actual = engine(exported.path, exported.io)(batch)["weights"]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.extended
def test_a_model_that_torch_exports_is_pooled(tmp_path: Path) -> None:
    fields = {**FAMILIES["RobertaConfig"], "model_type": "roberta-prelayernorm"}
    made = make(tmp_path / "model", "RobertaPreLayerNormConfig", Head.MASKED_LM, **fields)
    with_modules(made.path)
    batch = rows(5, 12)

    # The other flavour would leave sys.path changed: ONNX Runtime's optimiser does so.
    exported = export(made.folder, Head.SPARSE, tmp_path / "out", flavour=Flavour.PLAIN)

    assert exported.how == "torch"
    actual = ENGINES[0](exported.path, exported.io)(batch)["weights"]
    np.testing.assert_allclose(actual, expected_weights(made, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [BERT, ROBERTA, XLM_ROBERTA], ids=lambda family: family.name)
def test_answers_are_those_of_a_sparse_encoder(family: Family, tmp_path: Path) -> None:
    built = build(family, Head.MASKED_LM, tmp_path / "masked")
    modules = [Transformer(str(built.path), transformer_task="fill-mask"), SpladePooling()]
    whole = sentence_transformers.SparseEncoder(modules=modules, device="cpu", prompts={"query": "who "})
    whole.save(str(tmp_path / "sparse"))
    judge = sentence_transformers.SparseEncoder(str(tmp_path / "sparse"), device="cpu")
    folder = ModelFolder.open(tmp_path / "sparse")
    task = make_task(NAME, folder)
    assert head_of(NAME, folder) is Head.SPARSE
    assert head_of(TaskName.FILL_MASK, folder) is Head.MASKED_LM
    exported = export(folder, head_of(NAME, folder), tmp_path / "out")
    recipe = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32)
    engine = load_engine(exported.path, exported.io, recipe, Threads(1, 1), max_tokens=folder.max_tokens)

    def ask(inputs: Any, **parameters: Any) -> Any:
        prepared = task.prepare(task.parse(inputs, parameters))
        return observe(task, lambda some: run_rows(engine.run, exported.io, some), prepared).answer

    for prompt in (None, "query"):
        expected = judge.encode(TEXTS, prompt_name=prompt, convert_to_sparse_tensor=False, batch_size=2).numpy()
        named = {} if prompt is None else {"prompt_name": prompt}
        np.testing.assert_allclose(ask(TEXTS, sparse_format="dense", **named), expected, atol=1e-4)
    expected = judge.encode(TEXTS[0], convert_to_sparse_tensor=False).numpy()
    (pairs,) = ask(TEXTS[0])
    assert [pair["index"] for pair in pairs] == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose([pair["value"] for pair in pairs], expected[expected > 0], atol=1e-4)
    (arrays,) = ask(TEXTS[0], sparse_format="arrays")
    assert arrays["indices"].tolist() == np.flatnonzero(expected).tolist()
    (tokens,) = ask(TEXTS[0], sparse_format="tokens")
    decoded = dict(judge.decode(judge.encode(TEXTS[0])))
    assert {name: pytest.approx(value, abs=1e-4) for name, value in decoded.items()} == tokens
    with pytest.raises(InvalidInput, match="gives sparse vectors"):
        ask(TEXTS[0], normalize=True)
    with pytest.raises(UnsupportedModel, match="dense ones are needed here"):
        make_task(TaskName.SENTENCE_SIMILARITY, folder)
    engine.close()
