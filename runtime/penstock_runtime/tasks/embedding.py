"""Text embeddings: prompts, pooling, normalisation. Shared by feature-extraction and sentence-similarity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_runtime.errors import InvalidInput
from penstock_runtime.rows import POOLED, Float, Outputs, Pooling, Row
from penstock_runtime.tasks.fields import FieldKind, Text, near
from penstock_runtime.tasks.fitting import Fitter
from penstock_runtime.tasks.scores import finite

PROMPT: dict[str, tuple[FieldKind, Any]] = {"prompt_name": (Text("the name of a prompt"), None)}
PROMPT_NOTES = {
    "prompt_name": "The prompt of the model (config_sentence_transformers.json) to put before each text. "
    "Default: the model's default prompt, mostly none."
}


@dataclass(frozen=True)
class Embedding:
    """The model's prompts, and the outputs of rows to vectors."""

    fitter: Fitter
    prompts: Mapping[str, str]
    default_prompt: str

    def prompt(self, name: str | None) -> str:
        """The prompt of this name; InvalidInput if the model has none."""
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            raise InvalidInput(
                f"parameters.prompt_name: this model has no prompt {name[:100]!r}",
                field="parameters.prompt_name",
                remedy=near(name, list(self.prompts)) if self.prompts else "Leave it out: the model has no prompts",
            )
        return self.prompts[name]

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


def pool(vectors: Float, pooling: Pooling) -> Float:
    """[tokens, width] -> [width], in separate memory. The row has no padding: every token counts."""
    match pooling:
        case Pooling.CLS:
            first: Float = vectors[0].copy()
            return first
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
