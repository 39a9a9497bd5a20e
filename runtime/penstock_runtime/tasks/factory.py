"""Creates the task of a name for a model folder, and its request and response schemas."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from penstock.errors import SpecError, UnsupportedModel
from penstock.manifest import GraphIO
from penstock.resources.endpoint_parts.serving import Prompts
from penstock.tasks import HEAD_OF_TASK, Head, TaskName
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import POOLED
from penstock_runtime.tasks import fill_mask, text_generation
from penstock_runtime.tasks.base import DEFAULT_LIMITS, RequestLimits, Task
from penstock_runtime.tasks.classification import text_classification, text_ranking, zero_shot_classification
from penstock_runtime.tasks.classification.text_classification import TextClassification
from penstock_runtime.tasks.classification.text_ranking import TextRanking
from penstock_runtime.tasks.classification.zero_shot_classification import ZeroShotClassification
from penstock_runtime.tasks.embeddings import feature_extraction, sentence_similarity
from penstock_runtime.tasks.embeddings.feature_extraction import FeatureExtraction
from penstock_runtime.tasks.embeddings.multi_vectors import MultiVectors, ThreeOutputs
from penstock_runtime.tasks.embeddings.sentence_similarity import SentenceSimilarity
from penstock_runtime.tasks.embeddings.sparse_vectors import SparseVectors
from penstock_runtime.tasks.extraction import question_answering, token_classification, zero_shot_token_classification
from penstock_runtime.tasks.extraction.question_answering import QuestionAnswering
from penstock_runtime.tasks.extraction.token_classification import TokenClassification
from penstock_runtime.tasks.extraction.zero_shot_token_classification import ZeroShotTokenClassification
from penstock_runtime.tasks.fields import JsonSchema
from penstock_runtime.tasks.fill_mask import FillMask
from penstock_runtime.tasks.texts import Fitter
from penstock_runtime.tokens import Tokenizer

MODULES: dict[TaskName, ModuleType] = {
    TaskName.FEATURE_EXTRACTION: feature_extraction,
    TaskName.SENTENCE_SIMILARITY: sentence_similarity,
    TaskName.TEXT_RANKING: text_ranking,
    TaskName.TEXT_CLASSIFICATION: text_classification,
    TaskName.TOKEN_CLASSIFICATION: token_classification,
    TaskName.QUESTION_ANSWERING: question_answering,
    TaskName.FILL_MASK: fill_mask,
    TaskName.ZERO_SHOT_CLASSIFICATION: zero_shot_classification,
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: zero_shot_token_classification,
    TaskName.TEXT_GENERATION: text_generation,
}

_CLASSES: dict[TaskName, Callable[[Fitter, ModelFolder, RequestLimits], Task]] = {
    TaskName.TEXT_CLASSIFICATION: TextClassification,
    TaskName.TOKEN_CLASSIFICATION: TokenClassification,
    TaskName.QUESTION_ANSWERING: QuestionAnswering,
    TaskName.FILL_MASK: FillMask,
    TaskName.ZERO_SHOT_CLASSIFICATION: ZeroShotClassification,
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: ZeroShotTokenClassification,
}
_WITH_PROMPTS: dict[TaskName, Callable[[Fitter, ModelFolder, RequestLimits, Prompts | None], Task]] = {
    TaskName.FEATURE_EXTRACTION: FeatureExtraction,
    TaskName.SENTENCE_SIMILARITY: SentenceSimilarity,
    TaskName.TEXT_RANKING: TextRanking,
}
_OF_VECTORS: dict[TaskName, type[FeatureExtraction | SentenceSimilarity]] = {
    TaskName.FEATURE_EXTRACTION: FeatureExtraction,
    TaskName.SENTENCE_SIMILARITY: SentenceSimilarity,
}
"""Tasks for which a graph may pool."""

_PAIRS = {
    TaskName.TEXT_RANKING,
    TaskName.TEXT_CLASSIFICATION,
    TaskName.QUESTION_ANSWERING,
    TaskName.ZERO_SHOT_CLASSIFICATION,
}
"""Tasks with rows that may hold two texts."""

_ARCHITECTURES: dict[Head, tuple[str, ...]] = {
    Head.CAUSAL_LM: ("ForCausalLM", "LMHeadModel"),
    Head.SEQUENCE: ("ForSequenceClassification",),
    Head.TOKEN: ("ForTokenClassification",),
    Head.SPAN: ("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
    Head.MASKED_LM: ("ForMaskedLM", "ForPreTraining", "WithLMHeadModel"),
    Head.SPARSE: ("ForMaskedLM", "ForPreTraining", "WithLMHeadModel"),
}
"""Suffixes of the architecture names with each head. Every architecture has an encoder."""


def head_of(name: TaskName, folder: ModelFolder) -> Head:
    """The head that the task needs with this model. UnsupportedModel as `ModelFolder.sparse`."""
    if name is TaskName.FEATURE_EXTRACTION and folder.sparse is not None:
        return Head.SPARSE
    return HEAD_OF_TASK[name]


def make_task(
    name: TaskName,
    folder: ModelFolder,
    *,
    io: GraphIO | None = None,
    max_tokens: int | None = None,
    truncate: bool = True,
    limits: RequestLimits = DEFAULT_LIMITS,
    prompts: Prompts | None = None,
) -> Task:
    """The task `name` of the model in `folder`.

    `io`: of the graph that runs its rows; None: a graph with the outputs that Penstock builds.
    `max_tokens`: longer inputs are truncated, or refused if `truncate` is false; None: the model's own limit. Requests
    may override `truncate` (`parameters.truncate`). `prompts`: the endpoint's, for the tasks that have prompts.

    UnsupportedModel if the folder's model cannot do the task; SpecError if `max_tokens` is over the model's limit, or
    `prompts` names a prompt that does not exist; CorruptModel for invalid tokenizer files.
    """
    _check_head(name, folder)
    if max_tokens is not None and max_tokens > folder.max_tokens:
        raise SpecError(
            f"serving.maxInputTokens is {max_tokens}; this model takes up to {folder.max_tokens} tokens",
            field="spec.serving.maxInputTokens",
            remedy=f"Set it to {folder.max_tokens} or less, or leave it out",
        )
    tokenizer = Tokenizer.load(folder)
    fitter = Fitter(tokenizer, max_tokens or folder.max_tokens, truncate=truncate, pairs=name in _PAIRS)
    if head_of(name, folder) is Head.SPARSE:
        return SparseVectors(fitter, folder, limits, prompts)
    if name is TaskName.FEATURE_EXTRACTION and folder.multi_vector is not None:
        return MultiVectors(fitter, folder, limits, prompts)
    if name is TaskName.FEATURE_EXTRACTION and folder.heads:
        return ThreeOutputs(fitter, folder, limits, prompts)
    if name in _OF_VECTORS and io is not None and POOLED in io.outputs:
        return _OF_VECTORS[name](fitter, folder, limits, prompts, pooled=True)
    if name in _WITH_PROMPTS:
        return _WITH_PROMPTS[name](fitter, folder, limits, prompts)
    return _CLASSES[name](fitter, folder, limits)


def request_schema(name: TaskName, limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """JSON Schema of the task's request body, with examples."""
    schema: JsonSchema = MODULES[name].request_schema(limits)
    return schema


def response_schema(name: TaskName) -> JsonSchema:
    """JSON Schema of the task's answer, with examples."""
    schema: JsonSchema = MODULES[name].response_schema()
    return schema


def _check_head(name: TaskName, folder: ModelFolder) -> None:
    if folder.gliner is not None and name is not TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION:
        raise UnsupportedModel(
            f"{folder.path} is a GLiNER model, which finds entities of the labels in a request",
            remedy=f"Serve it with task: {TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION.value}",
        )
    wanted = _ARCHITECTURES.get(head_of(name, folder))
    if wanted is None or not folder.architecture or folder.architecture.endswith(wanted):
        return
    if name is TaskName.TEXT_RANKING and folder.ranks_by_words:
        return
    fitting = [
        task.value
        for task, head in HEAD_OF_TASK.items()
        if task is not TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION
        and (head not in _ARCHITECTURES or folder.architecture.endswith(_ARCHITECTURES[head]))
    ]
    raise UnsupportedModel(
        f"{folder.path} is a {folder.architecture}, which has no head for {name.value}",
        remedy=f"It can do {', '.join(fitting)}; {name.value} needs an architecture that ends in {wanted[0]}",
    )
