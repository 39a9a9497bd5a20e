"""What feature-extraction and sentence-similarity share: prompts, rows, pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from penstock_runtime.errors import InvalidInput
from penstock_runtime.rows import POOLED, Float, Outputs, Pooling, Row
from penstock_runtime.tasks.fields import Kind, Text, near
from penstock_runtime.tasks.fitting import Fitter, Truncation
from penstock_runtime.tasks.pooling import pool
from penstock_runtime.tasks.scores import finite
from penstock_runtime.tokens import Pieces

PROMPT: dict[str, tuple[Kind, Any]] = {"prompt_name": (Text("the name of a prompt"), None)}
PROMPT_NOTES = {
    "prompt_name": "The prompt of the model (config_sentence_transformers.json) to put before each text. "
    "Default: the model's default prompt, mostly none."
}


@dataclass(frozen=True)
class Embedding:
    """Texts to rows with the model's prompts, and the outputs of rows to vectors."""

    fitter: Fitter
    prompts: Mapping[str, str]
    default_prompt: str

    def prompt(self, name: str | None) -> str:
        """The prefix of this name; InvalidInput when the model has none such."""
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            raise InvalidInput(
                f"parameters.prompt_name: this model has no prompt {name[:100]!r}",
                field="parameters.prompt_name",
                remedy=near(name, list(self.prompts)) if self.prompts else "Leave it out: the model has no prompts",
            )
        return self.prompts[name]

    def rows(
        self, texts: Sequence[str] | Sequence[Pieces], where: Sequence[str], rule: Truncation, pooling: Pooling | None
    ) -> tuple[list[Row], int]:
        """One row for each text and how many were cut; InvalidInput for over-long texts that may not be."""
        if texts and isinstance(texts[0], Pieces):
            return self.fitter.rows(cast("Sequence[Pieces]", texts), where, rule, pooling)
        return self.fitter.singles(cast("Sequence[str]", texts), where, rule, pooling)

    @staticmethod
    def reduce(row: Row, outputs: Outputs) -> Float:
        """[width] when the row is to be pooled, whose values `shorten` looks at; else [tokens, width]. Its own memory.

        InferenceFailed when one of the latter is not a number.
        """
        pooled = outputs.get(POOLED)
        if pooled is not None:
            return pooled.copy()
        vectors = outputs["last_hidden_state"]
        return finite(np.array(vectors)) if row.pooling is None else pool(vectors, row.pooling)
