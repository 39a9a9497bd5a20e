"""Text embeddings: prompts, pooling, modules after it, normalisation.

Shared by feature-extraction and sentence-similarity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import CorruptModel
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.vector_modules import DenseModule, LayerNormModule, VectorModule
from penstock_runtime.rows import POOLED, AnyPooling, Float, Outputs, Pooling, Poolings, Row
from penstock_runtime.tasks.scores import finite
from penstock_runtime.tasks.texts import Fitter, PromptTexts


@dataclass(frozen=True)
class Embedding:
    """The model's prompts, and the outputs of rows to vectors."""

    fitter: Fitter
    prompts: PromptTexts
    own_pooling: AnyPooling | None
    """By the model's files; None: a plain transformers model."""
    include_prompt: bool
    """The tokens of a prompt count in the model's own pooling."""
    modules: tuple[VectorModule, ...]
    """Between the model's own pooling and normalisation."""
    width: int | None
    """Values of a token's vector, or of a text's if the graph pools, if the model's files have it."""
    pooled: bool = False
    """The graph gives one vector for each text, and none for tokens."""

    @classmethod
    def of(cls, fitter: Fitter, folder: ModelFolder, prompts: PromptTexts, *, pooled: bool = False) -> Embedding:
        """Of a model folder; `pooled`: with a graph that pools. Errors as of the folder's `pooling` and
        `vector_modules`; CorruptModel if widths do not fit."""
        own, hidden = folder.pooling, width(folder.config)
        if pooled:
            # The pooling only has to be one: the graph's vector, which has passed all modules, replaces it.
            return cls(fitter, prompts, Pooling.MEAN, True, (), folder.final_width or hidden, pooled)
        modules = () if folder.graph_has_modules else folder.vector_modules
        made = cls(fitter, prompts, own, folder.include_prompt, modules, hidden)
        made._check_widths(folder.path)
        return made

    def _check_widths(self, path: Path) -> None:
        last = self.pooled_width(self.own_pooling)
        for module in self.modules:
            taken = module.weight.shape[-1] if isinstance(module, DenseModule | LayerNormModule) else last
            if last is not None and taken != last:
                raise CorruptModel(
                    f"{path}/modules.json: a {module.kind} takes {taken} values, and gets {last}",
                    remedy="Take all files from the same revision of the model",
                )
            last = last if module.width is None else module.width

    def pooled_width(self, pooling: AnyPooling | None) -> int | None:
        """Values of a pooled vector, before the modules; None if it is not known."""
        joined = len(pooling.kinds) if isinstance(pooling, Poolings) else 1
        return None if self.width is None else self.width * joined

    @property
    def own_width(self) -> int | None:
        """Values of a vector of the model's own pooling, after the modules; None if it is not known."""
        known = [module.width for module in self.modules if module.width is not None]
        return known[-1] if known else self.pooled_width(self.own_pooling)

    def own_pooling_after(self, prompt: str) -> AnyPooling:
        """The model's own pooling of texts that begin with `prompt`; the mean for a plain model."""
        pooling = self.own_pooling or Pooling.MEAN
        if self.include_prompt or not prompt:
            return pooling
        template = self.fitter.tokenizer.single
        tokens = len(template.before) + len(self.fitter.tokenizer.split([prompt])[0])
        # As sentence-transformers counts: the prompt as a separate text, without the last special token.
        tokens += max(len(template.after) - 1, 0)
        return Poolings(pooling.kinds if isinstance(pooling, Poolings) else (pooling,), skip=tokens)

    def finish(self, pooled: Float) -> Float:
        """A vector of the model's own pooling through the modules. InferenceFailed if it is not finite."""
        vector = finite(pooled) if self.modules else pooled
        for module in self.modules:
            vector = module(vector)
        return vector

    @staticmethod
    def reduce(row: Row, outputs: Outputs) -> Float:
        """[width] if the row is to be pooled, else [tokens, width]; in separate memory.

        InferenceFailed if a value of the latter is not finite (`shorten` checks the former).
        """
        pooled = outputs.get(POOLED)
        if pooled is not None:
            return pooled.copy()
        vectors = outputs["last_hidden_state"]
        return finite(np.array(vectors)) if row.pooling is None else pool(vectors, row.pooling)


def pool(vectors: Float, pooling: AnyPooling) -> Float:
    """[tokens, width] -> [width], in separate memory; of several poolings joined. The row has no padding: every token
    counts, except those that the poolings skip."""
    if isinstance(pooling, Poolings):
        # At least one token: a text that was cut may end within its prompt.
        skip = min(pooling.skip, len(vectors) - 1)
        return np.concatenate([_pool(vectors[skip:], kind, first=skip) for kind in pooling.kinds])
    return _pool(vectors, pooling)


def _pool(vectors: Float, pooling: Pooling, *, first: int = 0) -> Float:
    """`first`: the position of the first of these tokens in the row."""
    match pooling:
        case Pooling.CLS:
            token: Float = vectors[0].copy()
            return token
        case Pooling.LAST:
            last: Float = vectors[-1].copy()
            return last
        case Pooling.MAX:
            highest: Float = np.maximum.reduce(vectors, axis=0)
            return highest
        case Pooling.MEAN:
            # Not the array's method, which is Python code: slower for short rows, and bitwise equal.
            mean: Float = np.add.reduce(vectors, axis=0) / len(vectors)
            return mean
        case Pooling.MEAN_SQRT_LEN:
            scaled: Float = np.add.reduce(vectors, axis=0) / np.float32(math.sqrt(len(vectors)))
            return scaled
        case Pooling.WEIGHTED_MEAN:
            weights = np.arange(first + 1, first + len(vectors) + 1, dtype=np.float32)
            weighted: Float = weights @ vectors / weights.sum()
            return weighted


def width(config: Mapping[str, Any]) -> int | None:
    """Values of a token's vector, by config.json; None if it has no such field."""
    for key in ("hidden_size", "dim", "d_model", "n_embd"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return None


def normalise(vector: Float) -> Float:
    """Scale to length 1; a zero vector stays as it is. InferenceFailed if a value is not finite."""
    square = float(vector.dot(vector))
    if not math.isfinite(square):  # a value is not finite, or its square is not
        square = float(np.square(finite(vector), dtype=np.float64).sum())
    length = math.sqrt(square)
    scaled: Float = vector / length if length > 0 else vector
    return scaled


def shorten(vector: Float, dimensions: int | None, *, normalised: bool) -> Float:
    """The first `dimensions` values (Matryoshka), scaled to length 1 if `normalised`.

    InferenceFailed if one of them is not finite.
    """
    head = vector if dimensions is None else vector[:dimensions]
    return normalise(head) if normalised else np.ascontiguousarray(finite(head))
