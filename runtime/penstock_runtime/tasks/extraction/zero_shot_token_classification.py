"""zero-shot-token-classification: entities of the caller's labels, with their positions in the text, by a GLiNER model.

The labels and the text are one row. As in the package `gliner`: words are runs of letters and digits, or single other
characters; an entity is a span of words with a score for a label over the threshold. Of spans that overlap the one
with the highest score remains (flat entities).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from penstock.errors import UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float, Outputs, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, Prepared, RequestLimits
from penstock_runtime.tasks.classification.zero_shot_classification import LabelText, labels_of
from penstock_runtime.tasks.fields import (
    Boolean,
    Either,
    FieldKind,
    JsonSchema,
    ListOf,
    Number,
    Object,
    Text,
    body_schema,
    parse_parameters,
)
from penstock_runtime.tasks.scores import finite, sigmoid
from penstock_runtime.tasks.texts import Fitter

THRESHOLD = 0.5
WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
WORD_BYTES = 400
"""Weight of a word in the size that decides whether the head runs in another thread."""
EXAMPLES = (
    {
        "inputs": "Ada Lovelace was born in London.",
        "parameters": {"candidate_labels": ["person", "city", "date"], "threshold": 0.4},
    },
    {"inputs": ["one text", "another"], "parameters": {"candidate_labels": "person, city"}},
)


def parameter_kinds(limits: RequestLimits) -> Object:
    """The parameters."""
    return Object(
        required={"candidate_labels": Either((ListOf(Text("a label"), limits.items), LabelText()))},
        optional={
            "threshold": (Number(0, 1), THRESHOLD),
            "multi_label": (Boolean(), False),
            "truncate": (Boolean(), None),
        },
        notes={
            "candidate_labels": "The labels, as a list or separated by commas.",
            "threshold": "The score that an entity must exceed.",
            "multi_label": "The same words may be entities of several labels.",
            "truncate": "Cut a text that is too long with the labels; false refuses it. Default: the endpoint's "
            "setting.",
        },
    )


def inputs(limits: RequestLimits) -> FieldKind:
    """A text or a list of texts."""
    return Either((Text(), ListOf(Text(), limits.items)))


def request_schema(limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """The request body. Refused beyond it: labels that leave no room for a text, too long without truncate."""
    return body_schema(
        inputs(limits), parameter_kinds(limits), examples=EXAMPLES, about="Entities of your labels, with their places"
    )


def response_schema() -> JsonSchema:
    """The answer for one text, or a list of them for a list."""
    element = {
        "type": "object",
        "properties": {
            "entity_group": {"type": "string"},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "word": {"type": "string"},
            "start": {"type": "integer", "minimum": 0},
            "end": {"type": "integer", "minimum": 1},
        },
        "required": ["entity_group", "score", "word", "start", "end"],
    }
    answer = {"type": "array", "items": element}
    return {
        "description": "The entities in order, start and end in characters; a list of such lists for a list of texts",
        "anyOf": [answer, {"type": "array", "items": answer}],
        "examples": [[{"entity_group": "city", "score": 0.97, "word": "London", "start": 25, "end": 31}]],
    }


@dataclass(frozen=True, slots=True)
class EntitiesRequest:
    """A checked request."""

    texts: list[str]
    single: bool
    labels: list[str]
    threshold: float
    multi_label: bool
    cut: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EntitiesRow(Row):
    """Labels and a text."""

    text: int
    """Index of the text in the request."""
    places: list[tuple[int, int]]
    """Where each word is in the text."""
    words: list[int]
    """The position of each word's token in the row; -1: it has none."""
    labels: list[int]
    """The same for each label."""


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The encoder's vectors that the head reads."""

    words: Float
    """[words with tokens, the encoder's width]"""
    labels: Float
    """[labels, the encoder's width]"""


class ZeroShotTokenClassification:
    """The task."""

    name = TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION
    head_in_assemble = True

    def __init__(self, fitter: Fitter, folder: ModelFolder, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        head = folder.gliner
        if head is None:
            raise UnsupportedModel(
                f"{folder.path} is no GLiNER model: it has no gliner_config.json",
                remedy="Use a GLiNER model, or the task token-classification for a model with labels of its own",
            )
        self.tokenizer = fitter.tokenizer
        self._fitter = fitter
        self._head = head
        separator = fitter.tokenizer.id_of(head.separator)
        if separator is None:
            raise UnsupportedModel(
                f"{folder.tokenizer} has no token {head.separator!r}, which the model needs between labels and text",
                remedy="Take the tokenizer from the same revision of the model",
            )
        self._separator = separator
        self._limits = limits
        self._inputs = inputs(limits)
        self._parameters = parameter_kinds(limits)

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> EntitiesRequest:
        """See `Task`."""
        values = parse_parameters(parameters, self._parameters)
        texts = self._inputs.parse(inputs, "inputs")
        labels = labels_of(values["candidate_labels"], self._limits)
        cut = values["truncate"]
        return EntitiesRequest(
            texts=[texts] if isinstance(texts, str) else texts,
            single=isinstance(texts, str),
            labels=list(dict.fromkeys(labels)),
            threshold=values["threshold"],
            multi_label=values["multi_label"],
            cut=self._fitter.rule.cut if cut is None else cut,
        )

    def prepare(self, request: EntitiesRequest) -> Prepared:
        """See `Task`. Only the text is truncated, after a whole word."""
        template = self.tokenizer.single
        room = self._fitter.room(template)
        prompt, labels = self._prompt(request.labels)
        if len(prompt) >= room:
            raise InvalidInput(
                f"the labels leave no room for a text ({len(prompt)} of {room} tokens)",
                field="parameters.candidate_labels",
                remedy="Send fewer or shorter labels",
            )
        self.tokenizer.require_embedded(prompt, "parameters.candidate_labels")
        first = len(template.before)
        labels = [first + place for place in labels]
        rows: list[Row] = []
        cut_at: list[int | None] = [None] * len(request.texts)
        cut = 0
        for index, text in enumerate(request.texts):
            where = "inputs" if request.single else f"inputs[{index}]"
            # One more than a row may have: a long text has a million.
            places = [found.span() for found in islice(WORD.finditer(text), self._head.longest + 1)]
            ids, words = self._words(text, places[: self._head.longest], room - len(prompt), first + len(prompt))
            if len(words) < len(places):
                if not request.cut:
                    raise InvalidInput(
                        f"{where} is too long: its first {len(words)} words fit into a row with the labels "
                        f"({room} tokens, {self._head.longest} words)",
                        field=where,
                        remedy="Send a shorter text or fewer labels, or set parameters.truncate to true",
                    )
                cut += 1
                cut_at[index] = places[len(words) - 1][1] if words else 0
            self.tokenizer.require_embedded(ids, where)
            if not words:
                continue  # white space, or a first word that is too long: there are no entities
            row = template.row([*prompt, *ids])
            kept = places[: len(words)]
            rows.append(EntitiesRow(row.ids, row.type_ids, text=index, places=kept, words=words, labels=labels))
        size = sum(len(row.words) for row in rows if isinstance(row, EntitiesRow)) * WORD_BYTES
        return Prepared(rows=rows, memo=request, truncated=cut, answer_bytes=size, cut_at=tuple(cut_at))

    def _prompt(self, labels: Sequence[str]) -> tuple[list[int], list[int]]:
        """The tokens before the text, and for each label the position of the token that represents it."""
        prompt: list[int] = []
        places = []
        for pieces in self.tokenizer.split(labels):
            places.append(len(prompt) + self._head.label_follows)
            prompt += [self._head.class_token, *pieces.ids]
        return [*prompt, self._separator], places

    def _words(
        self, text: str, places: Sequence[tuple[int, int]], room: int, first: int
    ) -> tuple[list[int], list[int]]:
        """The tokens of as many words as fit, and the position of each word's token in a row where they start at
        `first`."""
        names = [text[start:end] for start, end in places]
        distinct = list(dict.fromkeys(names))
        tokens = {name: pieces.ids for name, pieces in zip(distinct, self.tokenizer.split(distinct), strict=True)}
        ids: list[int] = []
        words = []
        for name in names:
            own = tokens[name]
            if len(ids) + len(own) > room:
                break
            at = first + len(ids) + (len(own) - 1 if self._head.last else 0)
            words.append(at if own else -1)
            ids += own
        return ids, words

    def reduce(self, row: Row, outputs: Outputs) -> States:
        """The vectors that the head reads."""
        if not isinstance(row, EntitiesRow):
            raise TypeError("zero-shot-token-classification needs the rows that its prepare made")
        states = outputs["last_hidden_state"]
        words = [place for place in row.words if place >= 0]
        return States(finite(states[words]), finite(states[row.labels]))

    def _logits(self, row: EntitiesRow, states: States) -> Float:
        """[words, widest, labels], as `GlinerHead.logits`; the vector of a word without tokens is 0."""
        labels = self._head.projected(states.labels)
        words = np.zeros((len(row.words), labels.shape[1]), np.float32)
        words[np.array(row.words) >= 0] = self._head.projected(states.words)
        return self._head.logits(words, labels)

    def judged(self, row: Row, reduced: States) -> tuple[Float, ...]:
        """See `Judged`: the scores of all spans that end in the text."""
        assert isinstance(row, EntitiesRow)  # noqa: S101 - prepare made it
        logits = self._logits(row, reduced)
        return (sigmoid(logits[np.isfinite(logits)]),)

    def assemble(self, prepared: Prepared, reduced: Sequence[States]) -> Any:
        """See `Task`."""
        wanted: EntitiesRequest = prepared.memo
        answers: list[list[dict[str, Any]]] = [[] for _ in wanted.texts]
        for row, states in zip(prepared.rows, reduced, strict=True):
            assert isinstance(row, EntitiesRow)  # noqa: S101 - prepare made it
            scores = sigmoid(self._logits(row, states))
            text = wanted.texts[row.text]
            for first, last, label, score in spans(scores, wanted.threshold, multi_label=wanted.multi_label):
                start, end = row.places[first][0], row.places[last][1]
                answers[row.text].append(
                    {
                        "entity_group": wanted.labels[label],
                        "score": score,
                        "word": text[start:end],
                        "start": start,
                        "end": end,
                    }
                )
        return answers[0] if wanted.single else answers


def spans(scores: Float, threshold: float, *, multi_label: bool) -> list[tuple[int, int, int, float]]:
    """First word, last word, label and score of the entities in `scores` [words, widths, labels], in order.

    The highest scores first: a span that overlaps with one before it is left out, except, with `multi_label`, the same
    words for another label.
    """
    firsts, widths, labels = np.nonzero(scores > threshold)
    values = scores[firsts, widths, labels]
    free = bytearray(b"\1") * len(scores)
    taken: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for index in np.argsort(-values, kind="stable").tolist():
        first, last = int(firsts[index]), int(firsts[index] + widths[index])
        if not (multi_label and (first, last) in taken):
            if not all(free[first : last + 1]):
                continue
            free[first : last + 1] = bytes(last + 1 - first)
        taken.setdefault((first, last), []).append((int(labels[index]), float(values[index])))
        if not multi_label and not any(free):
            break
    return [(first, last, label, score) for (first, last) in sorted(taken) for label, score in taken[first, last]]
