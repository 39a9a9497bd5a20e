"""sentence-similarity: the cosine similarity of a sentence to each of several sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import UnsupportedModel
from penstock.resources.endpoint_parts.serving import Prompts
from penstock.tasks import TaskName
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import AnyPooling, Float, Outputs, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, Prepared, RequestLimits
from penstock_runtime.tasks.embeddings.embedding import Embedding, shorten
from penstock_runtime.tasks.fields import JsonSchema, ListOf, Object, Text, body_schema, parse_parameters
from penstock_runtime.tasks.texts import (
    PROMPT,
    PROMPT_NOTES,
    TRUNCATION,
    TRUNCATION_NOTES,
    Fitter,
    PromptedTask,
    Truncation,
)

PARAMETERS = Object(required={}, optional={**PROMPT, **TRUNCATION}, notes={**PROMPT_NOTES, **TRUNCATION_NOTES})
EXAMPLES = (
    {
        "inputs": {
            "source_sentence": "That is a happy person",
            "sentences": ["That is a happy dog", "That is a very happy person", "Today is a sunny day"],
        }
    },
)


def inputs(limits: RequestLimits) -> Object:
    """A sentence and those to compare with it."""
    return Object(
        required={"source_sentence": Text(), "sentences": ListOf(Text(), limits.items)},
        words="an object with source_sentence and sentences",
    )


def request_schema(limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """The request body. Refused beyond it: unknown prompts, too long without truncate."""
    return body_schema(inputs(limits), PARAMETERS, examples=EXAMPLES, about="How alike a sentence is to others")


def response_schema() -> JsonSchema:
    """The answer: a cosine for each sentence, in their order."""
    return {
        "type": "array",
        "description": "The cosine of each sentence to the source sentence",
        "items": {"type": "number", "minimum": -1, "maximum": 1},
        "examples": [[0.6946, 0.9430, 0.2569]],
    }


@dataclass(frozen=True, slots=True)
class SimilarityRequest:
    """A checked request: the source sentence first."""

    texts: list[str]
    pooling: AnyPooling
    rule: Truncation


class SentenceSimilarity(PromptedTask):
    """The task. A model without pooling settings uses the mean, as in sentence-transformers."""

    name = TaskName.SENTENCE_SIMILARITY

    def __init__(
        self,
        fitter: Fitter,
        folder: ModelFolder,
        limits: RequestLimits = DEFAULT_LIMITS,
        prompts: Prompts | None = None,
        *,
        pooled: bool = False,
    ) -> None:
        """`pooled`: the graph gives one vector for each text, and none for tokens."""
        super().__init__(fitter, folder, limits, prompts)
        if folder.multi_vector is not None:
            raise UnsupportedModel(
                f"{folder.path} has a vector for each token of a text (ColBERT), not one for the text",
                remedy="Serve it with task: feature-extraction, which ranks texts for a query",
            )
        self._embedding = Embedding.of(fitter, folder, self._prompts, pooled=pooled)
        self._dimensions = folder.dimensions
        self._inputs = inputs(limits)

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> SimilarityRequest:
        """See `Task`."""
        values = parse_parameters(parameters, PARAMETERS)
        given = self._inputs.parse(inputs, "inputs")
        prefix = self._embedding.prompts.text(values["prompt_name"])
        texts = [given["source_sentence"], *given["sentences"]]
        return SimilarityRequest(
            texts=[prefix + text for text in texts] if prefix else texts,
            pooling=self._embedding.own_pooling_after(prefix),
            rule=self._rule.asked(values["truncate"], values["truncation_direction"]),
        )

    def prepare(self, request: SimilarityRequest) -> Prepared:
        """See `Task`."""
        others = [f"inputs.sentences[{index}]" for index in range(len(request.texts) - 1)]
        rows, cut = self._embedding.fitter.singles(
            request.texts, ["inputs.source_sentence", *others], request.rule, request.pooling
        )
        return Prepared(rows=rows, memo=None, truncated=cut)

    def reduce(self, row: Row, outputs: Outputs) -> Float:
        """The sentence's pooled vector."""
        return self._embedding.reduce(row, outputs)

    def assemble(self, prepared: Prepared, reduced: Sequence[Float]) -> list[float]:  # noqa: ARG002 - of Task
        """See `Task`."""
        vectors = [shorten(self._embedding.finish(one), self._dimensions, normalised=True) for one in reduced]
        source, *others = vectors
        cosines: list[float] = np.clip(np.stack(others) @ source, -1, 1).tolist()
        return cosines
