"""Writes models with random weights of the names and shapes that the builder of the optimiser reads, without a
framework."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.tasks import Head
from penstock_bench.subject import everyday_tokenizer
from penstock_optimizer.export import family_of
from penstock_optimizer.export.reader import Tensors, Weights
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.safetensors import SINGLE, write_pieces
from penstock_runtime.rows import Float

SEED = 20261127


class _RandomWeights(Weights):
    """Makes every tensor that is read."""

    def __init__(self, folder: ModelFolder, *, seed: int, deviation: float) -> None:
        super().__init__(folder)
        self._random = np.random.default_rng(seed)
        self._deviation = deviation
        self.made: dict[str, Float] = {}

    def take(self, name: str, shape: Sequence[int]) -> Float:
        """A matrix around 0, a norm's weight around 1, a bias around 0."""
        if name not in self.made:
            centre = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
            noise = self._random.standard_normal(tuple(shape), np.float32)
            self.made[name] = np.float32(centre) + np.float32(self._deviation) * noise
        return self.made[name]


def write_model(
    path: Path,
    config: Mapping[str, Any],
    *,
    head: Head = Head.ENCODER,
    seed: int = SEED,
    deviation: float = 0.02,
    tokenizer: Callable[[Path], None] | None = None,
) -> ModelFolder:
    """A folder with this config.json and random weights. `deviation`: of the weights. `tokenizer` as `write_family`.

    NotBuildable for a family that the builder does not know.
    """
    path.mkdir(parents=True, exist_ok=True)
    (tokenizer or _write_tokenizer)(path)
    (path / "config.json").write_text(json.dumps(dict(config), indent=2))
    _save(path, {"none": np.zeros(1, np.float32)})
    folder = ModelFolder.open(path)
    family_class = family_of(folder)
    if family_class is None:
        raise ValueError(f"{folder.model_type} is no family of the builder")
    family = family_class(folder)
    weights = _RandomWeights(folder, seed=seed, deviation=deviation)
    family.reader.weights = weights
    family.reader.body = Tensors(weights, f"{family.base}." if head is not Head.ENCODER else "")
    family.reader.top = Tensors(weights, "")
    family.top(head, family.encoder())
    _save(path, weights.made)
    return ModelFolder.open(path)


def _write_tokenizer(path: Path) -> None:
    everyday_tokenizer(("[PAD]", "[MASK]")).save(str(path / "tokenizer.json"))


def _save(path: Path, tensors: Mapping[str, Float]) -> None:
    write_pieces(path / SINGLE, {name: (tensor.shape, partial(iter, [tensor])) for name, tensor in tensors.items()})


def write_pooling(path: Path, *, width: int, last_token: bool) -> None:
    """The files of a sentence-transformers model: pooling and normalisation."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    pooling = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_mean_tokens": not last_token,
        "pooling_mode_lasttoken": last_token,
    }
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
