"""token-classification: entities, parts of speech and the like, with their offsets in the text.

A text that is too long for the model is truncated, unless `stride` sets overlapping windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float, Outputs, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, SPAN_TOKEN_BYTES, Prepared, RequestLimits
from penstock_runtime.tasks.extraction.entities import Aggregation, Window, entities, merge_windows
from penstock_runtime.tasks.fields import (
    Boolean,
    Choice,
    Either,
    FieldKind,
    JsonSchema,
    ListOf,
    Object,
    Text,
    body_schema,
    parse_parameters,
)
from penstock_runtime.tasks.scores import finite, softmax
from penstock_runtime.tasks.texts import WINDOW_NOTES, WINDOWS, Fitter, end_of
from penstock_runtime.tokens import Pieces, Tokenizer

IGNORED = ("O",)
ENTITY_BYTES = 85
"""JSON bytes of a token in the answer."""
EXAMPLES = (
    {
        "inputs": "My name is Sarah Jessica Parker but you can call me Jessica",
        "parameters": {"aggregation_strategy": "simple"},
    },
    {"inputs": ["one text", "another"], "parameters": {"aggregation_strategy": "first", "stride": 16}},
)


@dataclass(frozen=True)
class Label(Text):
    """A label name; the empty text is allowed, and matches no label."""

    words: str = "a label"

    def parse(self, value: Any, where: str) -> str:
        """The name."""
        return "" if value == "" else super().parse(value, where)

    def schema(self) -> JsonSchema:
        """Any string."""
        return {"type": "string"}


def parameter_kinds(limits: RequestLimits) -> Object:
    """The parameters."""
    labels = ListOf(Label(), limits.items, at_least=0, words="a list of labels")
    return Object(
        required={},
        optional={
            "aggregation_strategy": (Choice(tuple(str(way) for way in Aggregation)), str(Aggregation.NONE)),
            "ignore_labels": (labels, list(IGNORED)),
            **WINDOWS,
            "truncate": (Boolean(), None),
        },
        notes={
            "aggregation_strategy": "How tokens become entities: none gives each token, simple joins neighbours, "
            "first, average and max give each word one label before that.",
            "ignore_labels": "Labels to leave out.",
            "stride": "Look at a long text in windows that share this many tokens. Needs an aggregation_strategy other "
            "than none. Default: only the beginning of a long text.",
            **WINDOW_NOTES,
            "truncate": "Without stride: cut a text that is too long; false refuses it. Default: the endpoint's "
            "setting.",
        },
    )


def inputs(limits: RequestLimits) -> FieldKind:
    """A text or a list of texts."""
    return Either((Text(), ListOf(Text(), limits.items)))


def request_schema(limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """The request body. Refused beyond it: stride without aggregation or too large for the model, too many windows,
    too long without truncate."""
    return body_schema(inputs(limits), parameter_kinds(limits), examples=EXAMPLES, about="Entities with their places")


def response_schema() -> JsonSchema:
    """The answer for one text, or a list of them for a list."""
    element = {
        "type": "object",
        "properties": {
            "entity_group": {"type": "string"},
            "entity": {"type": ["string", "number", "boolean", "null"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "index": {"type": "integer"},
            "word": {"type": "string"},
            "start": {"type": "integer", "minimum": 0},
            "end": {"type": "integer", "minimum": 0},
        },
        "required": ["score", "word", "start", "end"],
    }
    answer = {"type": "array", "items": element}
    return {
        "description": "The entities in order, start and end in characters; a list of such lists for a list of texts",
        "anyOf": [answer, {"type": "array", "items": answer}],
        "examples": [[{"entity_group": "PER", "score": 0.9985, "word": "Jessica", "start": 52, "end": 59}]],
    }


@dataclass(frozen=True, slots=True)
class TokenClassificationRequest:
    """A checked request."""

    texts: list[str]
    single: bool
    aggregation: Aggregation
    ignored: frozenset[str]
    stride: int | None
    most_windows: int | None
    cut: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WindowRow(Row):
    """A part of a text, or all of it."""

    text: int
    """Index of the text in the request."""
    pieces: Pieces
    start: int
    """Position in the row of the window's first token."""


class TokenClassification:
    """The task."""

    name = TaskName.TOKEN_CLASSIFICATION

    def __init__(self, fitter: Fitter, folder: ModelFolder, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        self.tokenizer = fitter.tokenizer
        self._fitter = fitter
        self._labels = folder.labels
        pairs = zip(folder.labels, folder.label_values, strict=True)
        self._numbers = {name: value for name, value in pairs if name != value}
        self._limits = limits
        self._inputs = inputs(limits)
        self._parameters = parameter_kinds(limits)

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> TokenClassificationRequest:
        """See `Task`."""
        values = parse_parameters(parameters, self._parameters)
        texts = self._inputs.parse(inputs, "inputs")
        aggregation, stride = Aggregation(values["aggregation_strategy"]), values["stride"]
        if stride is not None and aggregation is Aggregation.NONE:
            raise InvalidInput(
                "parameters.stride needs entities to merge where windows overlap, and aggregation_strategy is none",
                field="parameters.stride",
                remedy="Set parameters.aggregation_strategy to simple, first, average or max",
            )
        self._fitter.check_windows(values)
        cut = values["truncate"]
        return TokenClassificationRequest(
            texts=[texts] if isinstance(texts, str) else texts,
            single=isinstance(texts, str),
            aggregation=aggregation,
            ignored=frozenset(values["ignore_labels"]),
            stride=stride,
            most_windows=values["max_windows"],
            cut=self._fitter.rule.cut if cut is None else cut,
        )

    def prepare(self, request: TokenClassificationRequest) -> Prepared:
        """See `Task`."""
        fitter, template = self._fitter, self._fitter.tokenizer.single
        rule, room = fitter.rule.asked(request.cut, None), fitter.room(template)
        where = ["inputs"] if request.single else [f"inputs[{index}]" for index in range(len(request.texts))]
        if request.stride is not None:
            found, cut_at = fitter.windows(
                request.texts, where, request.stride, most=request.most_windows, rows=self._limits.rows
            )
        else:
            found, cut_at = [], []
            for pieces, field in zip(
                fitter.split(request.texts, template, rule.side, offsets=True), where, strict=True
            ):
                kept = pieces
                if len(pieces) > room:
                    fitter.refuse_unless(rule, pieces, template, field)
                    kept = pieces.keep(room, rule.side)
                found.append([kept])
                cut_at.append(None if kept is pieces else end_of(kept, rule.side))
        rows: list[Row] = []
        for index, parts in enumerate(found):
            for part in parts:
                fitter.tokenizer.require_embedded(part.ids, where[index])
                row = template.row(part.ids)
                if not row.ids:
                    continue  # a text without tokens has no entities
                rows.append(WindowRow(row.ids, row.type_ids, text=index, pieces=part, start=len(template.before)))
        prepared = Prepared(
            rows=rows,
            memo=request,
            truncated=len(cut_at) - cut_at.count(None),
            token_bytes=SPAN_TOKEN_BYTES,
            cut_at=tuple(cut_at),
        )
        prepared.answer_bytes = prepared.tokens * ENTITY_BYTES
        return prepared

    def reduce(self, row: Row, outputs: Outputs) -> Float:
        """Scores of the window's own tokens [tokens, labels]."""
        if not isinstance(row, WindowRow):
            raise TypeError("token-classification needs the rows that its prepare made")
        return finite(softmax(outputs["logits"][row.start : row.start + len(row.pieces)]))

    def assemble(self, prepared: Prepared, reduced: Sequence[Float]) -> Any:
        """See `Task`."""
        wanted: TokenClassificationRequest = prepared.memo
        tokenizer = self._fitter.tokenizer
        found: list[list[dict[str, Any]]] = [[] for _ in wanted.texts]
        count = [0] * len(wanted.texts)
        for row, scores in zip(prepared.rows, reduced, strict=True):
            assert isinstance(row, WindowRow)  # noqa: S101 - prepare made it
            window = _window(tokenizer, wanted.texts[row.text], row, scores)
            some = entities(window, wanted.aggregation, self._labels, ignored=wanted.ignored, join=tokenizer.join)
            if self._numbers and wanted.aggregation is Aggregation.NONE:
                for entity in some:
                    entity["entity"] = self._numbers.get(entity["entity"], entity["entity"])
            found[row.text] += some
            count[row.text] += 1
        answers = [merge_windows(one) if parts > 1 else one for one, parts in zip(found, count, strict=True)]
        return answers[0] if wanted.single else answers


def _window(tokenizer: Tokenizer, text: str, row: WindowRow, scores: Float) -> Window:
    """The window's tokens for the aggregation strategies, with transformers' rules for words and their parts."""
    words, continues = [], []
    places = row.pieces.offsets or []
    for number, (start, end) in zip(row.pieces.ids, places, strict=True):
        if number == tokenizer.unk_id:
            words.append(text[start:end])
            continues.append(False)
            continue
        word = tokenizer.token(number)
        words.append(word)
        if tokenizer.continuing_prefix:
            # A part of a word has the prefix, so that it is longer than the text that it covers.
            continues.append(len(word) != end - start)
        else:
            # Without a prefix, a token that does not follow a space continues the previous word.
            continues.append(start > 0 and " " not in text[start - 1 : start + 1])
    return Window(words, scores, places, continues, first=row.start)
