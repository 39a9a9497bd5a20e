"""Names of the tasks in the `task` field of a ModelEndpoint (the names of Hugging Face), and the heads they need."""

from __future__ import annotations

from enum import StrEnum


class TaskName(StrEnum):
    """The tasks of an endpoint."""

    FEATURE_EXTRACTION = "feature-extraction"
    SENTENCE_SIMILARITY = "sentence-similarity"
    TEXT_RANKING = "text-ranking"
    TEXT_CLASSIFICATION = "text-classification"
    TOKEN_CLASSIFICATION = "token-classification"  # noqa: S105 - not a password
    QUESTION_ANSWERING = "question-answering"
    FILL_MASK = "fill-mask"
    ZERO_SHOT_CLASSIFICATION = "zero-shot-classification"
    ZERO_SHOT_TOKEN_CLASSIFICATION = "zero-shot-token-classification"  # noqa: S105 - not a password
    TEXT_GENERATION = "text-generation"


class Head(StrEnum):
    """The part of the graph on top of the encoder, which decides its outputs.

    `GRAPH_OUTPUTS` of `penstock.manifest` gives their names and axes.
    """

    ENCODER = "encoder"
    SEQUENCE = "sequence-classification"
    TOKEN = "token-classification"  # noqa: S105 - not a password
    SPAN = "question-answering"
    MASKED_LM = "masked-lm"
    CAUSAL_LM = "causal-lm"
    SPARSE = "sparse"
    """A masked language model with pooled scores: a weight for each token of the vocabulary (SPLADE)."""


HEAD_OF_TASK = {
    TaskName.FEATURE_EXTRACTION: Head.ENCODER,
    TaskName.SENTENCE_SIMILARITY: Head.ENCODER,
    TaskName.TEXT_RANKING: Head.SEQUENCE,
    TaskName.TEXT_CLASSIFICATION: Head.SEQUENCE,
    TaskName.TOKEN_CLASSIFICATION: Head.TOKEN,
    TaskName.QUESTION_ANSWERING: Head.SPAN,
    TaskName.FILL_MASK: Head.MASKED_LM,
    TaskName.ZERO_SHOT_CLASSIFICATION: Head.SEQUENCE,
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: Head.ENCODER,
    TaskName.TEXT_GENERATION: Head.CAUSAL_LM,
}
"""The head that a task needs; feature-extraction with a sparse model needs `Head.SPARSE`."""

ENCODER_TASKS = tuple(task for task in TaskName if task is not TaskName.TEXT_GENERATION)
"""Tasks that run each text once, in batches; text-generation runs a step for each token."""
