"""JinaBERT equals what its authors publish of it: BERT with gated networks, and scores that fall with the distance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from penstock.errors import UnsafeModel
from penstock.tasks import Head
from penstock_optimizer.export import export
from penstock_optimizer.export.families.jina import slopes
from penstock_runtime.models.folder import ModelFolder
from tests.optimizer.export.judge import ENGINE_OF, Arrays, rows
from tests.optimizer.export.models import FAMILIES, MASK_ID, make

pytestmark = pytest.mark.parity

CODE = "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"
FIELDS: dict[str, Any] = {
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "auto_map": {"AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig", "AutoModel": CODE},
}
INNER, HEADS, EPSILON = 40, 3, 1e-12
ALIBI_OF_3_HEADS = [2**-4, 2**-8, 2**-2]
"""Those of 2 heads, then every second one of 4 heads."""


def jina(path: Path, head: Head, **changes: Any) -> ModelFolder:
    """A BERT of transformers, with Jina's networks in its layers and without positions."""
    made = make(path, "BertConfig", head, **FAMILIES["BertConfig"])
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in list(tensors):
        if "position_embeddings" in name or ".intermediate." in name:
            del tensors[name]
        elif ".output.dense.weight" in name and ".attention." not in name:
            stem = name.removesuffix("output.dense.weight")
            tensors[f"{stem}mlp.wo.weight"] = tensors.pop(name)
            tensors[f"{stem}mlp.wo.bias"] = tensors.pop(f"{stem}output.dense.bias")
            for part in ("weight", "bias"):
                tensors[f"{stem}mlp.layernorm.{part}"] = tensors.pop(f"{stem}output.LayerNorm.{part}")
            tensors[f"{stem}mlp.gated_layers.weight"] = torch.randn(2 * INNER, 24, generator=generator) / 5
    save_file(tensors, path / "model.safetensors")
    config = {**json.loads((path / "config.json").read_text()), **FIELDS, **changes}
    (path / "config.json").write_text(json.dumps(config))
    (path / "modeling_bert.py").write_text("raise RuntimeError('this code must not run')")
    return ModelFolder.open(made.path)


def hidden_states(folder: ModelFolder, batch: Arrays, prefix: str) -> torch.Tensor:
    """By the definition, in float64."""
    weights = {name: tensor.double() for name, tensor in load_file(folder.path / "model.safetensors").items()}

    def dense(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale, shift = weights[f"{prefix}{name}.weight"], weights[f"{prefix}{name}.bias"]
        return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, shift, EPSILON)

    words, types = (weights[f"{prefix}embeddings.{part}_embeddings.weight"] for part in ("word", "token_type"))
    x = words[torch.from_numpy(batch["input_ids"])] + types[torch.from_numpy(batch["token_type_ids"])]
    x = norm(x, "embeddings.LayerNorm")
    mask = torch.from_numpy(batch["attention_mask"])
    places = torch.arange(x.shape[1])
    bias = -(places[:, None] - places[None]).abs() * torch.tensor(ALIBI_OF_3_HEADS)[:, None, None]
    bias = bias[None] + (1 - mask)[:, None, None] * -1e9
    for index in range(2):
        layer = f"encoder.layer.{index}"
        query, key, value = (
            dense(x, f"{layer}.attention.self.{part}").unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        shares = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5 + bias, -1)
        mixed = dense((shares @ value).transpose(1, 2).flatten(2), f"{layer}.attention.output.dense")
        x = norm(mixed + x, f"{layer}.attention.output.LayerNorm")
        gated, plain = dense(x, f"{layer}.mlp.gated_layers").split(INNER, -1)
        x = norm(dense(torch.nn.functional.gelu(gated) * plain, f"{layer}.mlp.wo") + x, f"{layer}.mlp.layernorm")
    return x


def answers(folder: ModelFolder, batch: Arrays, head: Head) -> NDArray[Any]:
    states = hidden_states(folder, batch, "" if head is Head.ENCODER else "bert.")
    if head is Head.ENCODER:
        return np.asarray(states * torch.from_numpy(batch["attention_mask"])[..., None])
    weights = {name: tensor.double() for name, tensor in load_file(folder.path / "model.safetensors").items()}
    pooled = torch.tanh(states[:, 0] @ weights["bert.pooler.dense.weight"].T + weights["bert.pooler.dense.bias"])
    return np.asarray(pooled @ weights["classifier.weight"].T + weights["classifier.bias"])


@pytest.mark.parametrize("head", [Head.ENCODER, Head.SEQUENCE])
def test_jinabert_equals_its_definition(head: Head, tmp_path: Path) -> None:
    folder = jina(tmp_path / "model", head)

    for flavour, engine in ENGINE_OF.items():
        exported = export(folder, head, tmp_path / flavour, flavour=flavour)
        assert exported.how == "builder"
        for batch in (rows(13), rows(4, 17, 9)):
            found = engine(exported.path, exported.io)(batch)
            seen = batch["attention_mask"][..., None] if head is Head.ENCODER else 1
            (output,) = exported.io.outputs
            np.testing.assert_allclose(found[output] * seen, answers(folder, batch, head), rtol=0, atol=2e-5)


def test_the_masked_language_model_reads_the_same_hidden_states(tmp_path: Path) -> None:
    folder, batch = jina(tmp_path / "model", Head.MASKED_LM), rows(4, 9)
    weights = {name: tensor.double() for name, tensor in load_file(folder.path / "model.safetensors").items()}
    head = "cls.predictions.transform"
    x = hidden_states(folder, batch, "bert.")[torch.from_numpy(batch["input_ids"] == MASK_ID)]
    x = torch.nn.functional.gelu(x @ weights[f"{head}.dense.weight"].T + weights[f"{head}.dense.bias"])
    scale, shift = weights[f"{head}.LayerNorm.weight"], weights[f"{head}.LayerNorm.bias"]
    x = torch.nn.functional.layer_norm(x, x.shape[-1:], scale, shift, EPSILON)
    expected = x @ weights["bert.embeddings.word_embeddings.weight"].T + weights["cls.predictions.bias"]

    for flavour, engine in ENGINE_OF.items():
        exported = export(folder, Head.MASKED_LM, tmp_path / flavour, flavour=flavour)
        found = engine(exported.path, exported.io)(batch)["logits"]
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-5)


def test_slopes_are_a_geometric_series() -> None:
    np.testing.assert_allclose(slopes(8), [2.0**-power for power in range(1, 9)])
    np.testing.assert_allclose(slopes(3), ALIBI_OF_3_HEADS)
    assert len(slopes(12)) == 12


def test_the_later_layout_is_refused_for_its_code(tmp_path: Path) -> None:
    later = CODE.replace("jina-bert-implementation", "jina-bert-v2-qk-post-norm")

    with pytest.raises(UnsafeModel, match="jina-bert-v2-qk-post-norm"):
        jina(tmp_path / "model", Head.ENCODER, auto_map={"AutoModel": later})
