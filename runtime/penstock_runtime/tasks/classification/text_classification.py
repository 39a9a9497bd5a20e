"""text-classification: labels with scores for a text, or for a pair of texts.

Always nested, as the hosted API answers (its client takes the first entry): a list of labels for each text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float, Outputs, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, Prepared, RequestLimits
from penstock_runtime.tasks.fields import (
    Boolean,
    Choice,
    Either,
    FieldKind,
    Integer,
    JsonSchema,
    ListOf,
    Object,
    Text,
    body_schema,
    near,
    parse_parameters,
)
from penstock_runtime.tasks.scores import descending, finite, sigmoid, softmax
from penstock_runtime.tasks.texts import TRUNCATION, TRUNCATION_NOTES, WINDOW_NOTES, WINDOWS, Fitter, Truncation


class Function(StrEnum):
    """The activation function from logits to scores."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    NONE = "none"

    def apply(self, logits: Float) -> Float:
        """Scores of the same shape."""
        match self:
            case Function.SIGMOID:
                return sigmoid(logits)
            case Function.SOFTMAX:
                return softmax(logits)
            case Function.NONE:
                return logits

    @classmethod
    def of(cls, folder: ModelFolder) -> Function:
        """The choice of transformers: by the model's problem type, otherwise by the number of labels."""
        match folder.problem_type:
            case "regression":
                return cls.NONE
            case "multi_label_classification":
                return cls.SIGMOID
            case _:
                return cls.SIGMOID if folder.num_labels == 1 else cls.SOFTMAX


PARAMETERS = Object(
    required={},
    optional={
        "top_k": (Integer(1, 1_000_000), None),
        "function_to_apply": (Choice(tuple(str(function) for function in Function)), None),
        "raw_scores": (Boolean(), None),
        **WINDOWS,
        "window_labels": (ListOf(Text("a label"), 1000, words="a list of labels"), None),
        **TRUNCATION,
    },
    notes={
        "top_k": "Only this many labels, the best first. Default: all.",
        "function_to_apply": "What turns logits into scores. Default: none for regression, sigmoid for one label or "
        "several true at once, else softmax.",
        "raw_scores": "true: logits, as function_to_apply none; of text-embeddings-inference.",
        "stride": "Read a long text in windows that share this many tokens. A label's score is its highest one of all "
        "windows, so that scores need not add up to 1. Default: only the beginning of a long text.",
        **WINDOW_NOTES,
        "window_labels": "With stride and scores by softmax: all scores are those of one window, which has the highest "
        "score of any of these labels, so that they add up to 1.",
        **TRUNCATION_NOTES,
    },
)
LABEL_BYTES = 36
"""JSON bytes of a label in the answer, without its name."""

EXAMPLES = (
    {"inputs": "I like you. I love you."},
    {"inputs": {"text": "A man plays.", "text_pair": "A person is playing."}, "parameters": {"top_k": 1}},
    {"inputs": "a long text", "parameters": {"stride": 16}},
    {"inputs": ["one text", "another"], "parameters": {"function_to_apply": "sigmoid"}},
    {"inputs": [["a text"], ["a text", "and its pair"]], "parameters": {"raw_scores": True}},
)


def inputs(limits: RequestLimits) -> FieldKind:
    """A text, a pair, or a list of these; in a list also lists of a text or a pair, as text-embeddings-inference takes
    a batch."""
    pair = Object(
        required={"text": Text()}, optional={"text_pair": (Text(), None)}, words="an object with text and text_pair"
    )
    one = Either((Text(), pair))
    entry = Either((*one.kinds, ListOf(Text(), 2, words="a list of a text, or of two that are a pair")))
    return Either((*one.kinds, ListOf(entry, limits.items, words="a list of these")))


def _texts(item: str | list[str] | Mapping[str, str | None]) -> tuple[str, str | None]:
    """The text and its pair, of a checked input."""
    if isinstance(item, str):
        return item, None
    if isinstance(item, list):
        return item[0], item[1] if len(item) > 1 else None
    return str(item["text"]), item["text_pair"]


def request_schema(limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """The request body. Refused beyond it: too long without truncate, labels and texts that make a very large
    answer."""
    return body_schema(inputs(limits), PARAMETERS, examples=EXAMPLES, about="Labels for texts or pairs of texts")


def response_schema() -> JsonSchema:
    """The answer: for each text its labels, the best first."""
    element = {
        "type": "object",
        "properties": {"label": {"type": ["string", "number", "boolean", "null"]}, "score": {"type": "number"}},
        "required": ["label", "score"],
    }
    return {
        "type": "array",
        "description": "For each text its labels, the best first (one list in a list for one text)",
        "items": {"type": "array", "items": element},
        "examples": [[[{"label": "joy", "score": 0.9983}, {"label": "love", "score": 0.0009}]]],
    }


@dataclass(frozen=True, slots=True)
class TextClassificationRequest:
    """A checked request."""

    texts: list[tuple[str, str | None]]
    where: list[str]
    """The path of each text in the request, for errors."""
    top_k: int | None
    function: Function
    rule: Truncation
    answer_bytes: int
    stride: int | None
    most_windows: int | None
    deciding: tuple[int, ...]
    """Labels by which a window is chosen; empty: each label has its highest score."""


class _ForAnswer(NamedTuple):
    """What `assemble` needs of a request. It may stay in the cache, without the texts."""

    function: Function
    top_k: int | None
    windows: tuple[int, ...] = ()
    """The number of rows of each text; empty: one."""
    deciding: tuple[int, ...] = ()


class TextClassification:
    """The task."""

    name = TaskName.TEXT_CLASSIFICATION

    def __init__(self, fitter: Fitter, folder: ModelFolder, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        self.tokenizer = fitter.tokenizer
        self._fitter = fitter
        self._labels = folder.label_values
        self._names = {label: index for index, label in enumerate(folder.labels)}
        self._longest_label = max(map(len, folder.labels))
        self._limits = limits
        self._function = Function.of(folder)
        self._inputs = inputs(limits)

    @property
    def gives_shares(self) -> bool:
        """Scores are from 0 to 1, unless a request has another function."""
        return self._function is not Function.NONE

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> TextClassificationRequest:
        """See `Task`."""
        values = parse_parameters(parameters, PARAMETERS)
        given = self._inputs.parse(inputs, "inputs")
        items = given if isinstance(given, list) else [given]
        function = values["function_to_apply"]
        if values["raw_scores"] is not None and function is not None:
            raise InvalidInput(
                "raw_scores and function_to_apply both say how scores are made",
                field="parameters.raw_scores",
                remedy="Send only one of them",
            )
        function = Function.NONE if values["raw_scores"] else function
        self._fitter.check_windows(values)
        texts = [_texts(item) for item in items]
        if values["stride"] is not None and any(second is not None for _, second in texts):
            raise InvalidInput(
                "parameters.stride is for single texts, and the request has a pair",
                field="parameters.stride",
                remedy="Leave it out: the longer text of a pair is cut",
            )
        labels = min(values["top_k"] or len(self._labels), len(self._labels))
        answer_bytes = len(items) * labels * (LABEL_BYTES + self._longest_label)
        self._limits.check_answer(answer_bytes, "inputs", "Send fewer texts at a time, or a smaller parameters.top_k")
        return TextClassificationRequest(
            texts=texts,
            where=[f"inputs[{index}]" for index in range(len(items))] if isinstance(given, list) else ["inputs"],
            top_k=values["top_k"],
            function=self._function if function is None else Function(function),
            rule=self._fitter.rule.asked(values["truncate"], values["truncation_direction"]),
            answer_bytes=answer_bytes,
            stride=values["stride"],
            most_windows=values["max_windows"],
            deciding=tuple(map(self._index, values["window_labels"] or ())),
        )

    def _index(self, label: str) -> int:
        if label not in self._names:
            raise InvalidInput(
                f"parameters.window_labels: the model has no label {label[:100]!r}",
                field="parameters.window_labels",
                remedy=near(label, list(self._names)),
            )
        return self._names[label]

    def prepare(self, request: TextClassificationRequest) -> Prepared:
        """See `Task`."""
        fitter, rule = self._fitter, request.rule
        if request.stride is not None:
            return self._windows(request, request.stride)
        paired = [index for index, (_, second) in enumerate(request.texts) if second is not None]
        alone = [index for index, (_, second) in enumerate(request.texts) if second is None]
        rows: dict[int, Row] = {}
        singles, cut = fitter.singles(
            [request.texts[index][0] for index in alone], [request.where[index] for index in alone], rule
        )
        rows.update(zip(alone, singles, strict=True))
        both = [text for index in paired for text in request.texts[index] if text is not None]
        pieces = iter(fitter.split(both, fitter.tokenizer.pair, rule.side))
        for index in paired:
            rows[index], was_cut = fitter.pair(next(pieces), next(pieces), request.where[index], rule)
            cut += was_cut
        return Prepared(
            rows=[rows[index] for index in range(len(request.texts))],
            memo=_ForAnswer(request.function, request.top_k),
            truncated=cut,
            answer_bytes=request.answer_bytes,
        )

    def _windows(self, request: TextClassificationRequest, stride: int) -> Prepared:
        fitter = self._fitter
        found, cut_at = fitter.windows(
            [text for text, _ in request.texts],
            request.where,
            stride,
            most=request.most_windows,
            rows=self._limits.rows,
        )
        rows = []
        for parts, where in zip(found, request.where, strict=True):
            for part in parts:
                fitter.tokenizer.require_embedded(part.ids, where)
                rows.append(fitter.require_tokens(fitter.tokenizer.single.row(part.ids), where))
        return Prepared(
            rows=rows,
            memo=_ForAnswer(request.function, request.top_k, tuple(map(len, found)), request.deciding),
            truncated=len(cut_at) - cut_at.count(None),
            answer_bytes=request.answer_bytes,
            cut_at=tuple(cut_at),
        )

    def reduce(self, row: Row, outputs: Outputs) -> Float:  # noqa: ARG002 - the contract of Task
        """The logits [labels]."""
        return finite(np.array(outputs["logits"]))

    def assemble(self, prepared: Prepared, reduced: Sequence[Float]) -> list[list[dict[str, Any]]]:
        """See `Task`."""
        wanted: _ForAnswer = prepared.memo
        answer = []
        scored = map(wanted.function.apply, reduced)
        for scores in _of_texts(scored, wanted) if wanted.windows else scored:
            values = scores.tolist()
            best = descending(scores)[: wanted.top_k]
            answer.append([{"label": self._labels[index], "score": values[index]} for index in best])
        return answer


def _of_texts(scored: Iterator[Float], wanted: _ForAnswer) -> Iterator[Float]:
    """The scores of each text [labels], of those of its windows."""
    for count in wanted.windows:
        windows = np.stack(list(islice(scored, count)))
        if wanted.deciding and wanted.function is Function.SOFTMAX:
            yield windows[windows[:, wanted.deciding].max(axis=1).argmax()]
        else:
            yield windows.max(axis=0)
