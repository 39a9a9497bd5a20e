"""zero-shot-classification: scores of the caller's labels for a text, by a model of entailment.

Each label becomes a hypothesis in a separate row. The answer has the shape of transformers' pipeline,
`{sequence, labels, scores}`; `output_format: list` gives `[{label, score}]`, as the hosted API of Hugging Face answers
today.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import UnsupportedModel
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
    JsonSchema,
    ListOf,
    Object,
    Text,
    body_schema,
    parse_parameters,
)
from penstock_runtime.tasks.scores import finite, softmax
from penstock_runtime.tasks.texts import Fitter

TEMPLATE = "This example is {}."
LONGEST_TEMPLATE = 1000
"""Characters. Each label gets a copy."""
EXAMPLES = (
    {
        "inputs": "I have a problem with my iphone that needs to be resolved asap!!",
        "parameters": {"candidate_labels": ["urgent", "not urgent", "phone", "tablet", "computer"]},
    },
    {
        "inputs": ["The team won.", "Prices rise."],
        "parameters": {"candidate_labels": "sports, economy", "multi_label": True, "output_format": "list"},
    },
)


@dataclass(frozen=True)
class HypothesisTemplate(Text):
    """A hypothesis with `{}` where the label goes."""

    words: str = "a text with {} in place of the label"

    def parse(self, value: Any, where: str) -> str:
        """The template; str.format is not used on it, which would give a client access to far more than a label."""
        text = super().parse(value, where)
        try:
            fields = [field for _, field, spec, conversion in string.Formatter().parse(text) if field is not None]
            plain = not any(spec or conversion for _, _, spec, conversion in string.Formatter().parse(text))
        except ValueError:
            fields, plain = [], False
        if len(text) > LONGEST_TEMPLATE:
            raise InvalidInput(
                f"{where} has {len(text)} characters; at most {LONGEST_TEMPLATE} are one sentence",
                field=where,
                remedy="Shorten it: every label gets a separate hypothesis",
            )
        if not plain or not fields or not set(fields) <= {"", "0"}:
            raise InvalidInput(
                f"{where} has no plain {{}} in place of the label",
                field=where,
                remedy=f"Write it like {TEMPLATE!r}, other braces doubled",
            )
        return text

    def schema(self) -> JsonSchema:
        """A string with `{}` and no other brace (doubled ones are valid too, but not in the schema)."""
        return {"type": "string", "pattern": r"^[^{}]*\{\}[^{}]*$", "minLength": 2, "maxLength": LONGEST_TEMPLATE}


@dataclass(frozen=True)
class LabelText(Text):
    """Labels as one text, separated by commas."""

    words: str = "a text of labels separated by commas"

    def schema(self) -> JsonSchema:
        """A string with at least one character that is neither a comma nor white space."""
        return {"type": "string", "pattern": r"[^,\s]", "maxLength": 100_000}


def parameter_kinds(limits: RequestLimits) -> Object:
    """The parameters."""
    return Object(
        required={"candidate_labels": Either((ListOf(Text("a label"), limits.items), LabelText()))},
        optional={
            "hypothesis_template": (HypothesisTemplate(), TEMPLATE),
            "multi_label": (Boolean(), False),
            "output_format": (Choice(("pipeline", "list")), "pipeline"),
            "truncate": (Boolean(), None),
        },
        notes={
            "candidate_labels": "The labels, as a list or separated by commas.",
            "hypothesis_template": "The sentence that a label is put into.",
            "multi_label": "Judge each label by itself (several may fit); false shares one whole among them.",
            "output_format": "pipeline: {sequence, labels, scores}; list: [{label, score}].",
            "truncate": "Cut a text that is too long with the longest hypothesis; false refuses it. Default: the "
            "endpoint's setting.",
        },
    )


def inputs(limits: RequestLimits) -> FieldKind:
    """A text or a list of texts."""
    return Either((Text(), ListOf(Text(), limits.items)))


def request_schema(limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """The request body. Refused beyond it: texts times labels over the limit of rows, too long without truncate."""
    return body_schema(
        inputs(limits), parameter_kinds(limits), examples=EXAMPLES, about="Which of your labels fit a text"
    )


def response_schema() -> JsonSchema:
    """The answer for one text, or a list of them for a list."""
    score = {"type": "number", "minimum": 0, "maximum": 1}
    pipeline = {
        "type": "object",
        "properties": {
            "sequence": {"type": "string"},
            "labels": {"type": "array", "items": {"type": "string"}},
            "scores": {"type": "array", "items": score},
        },
        "required": ["sequence", "labels", "scores"],
    }
    element = {
        "type": "object",
        "properties": {"label": {"type": "string"}, "score": score},
        "required": ["label", "score"],
    }
    elements = {"type": "array", "items": element}
    return {
        "description": "The labels by score, the best first; a list of such answers for a list of texts",
        "anyOf": [
            pipeline,
            elements,
            {"type": "array", "items": pipeline},
            {"type": "array", "items": elements},
        ],
        "examples": [{"sequence": "The team won.", "labels": ["sports", "economy"], "scores": [0.98, 0.02]}],
    }


@dataclass(frozen=True, slots=True)
class ZeroShotRequest:
    """A checked request."""

    texts: list[str]
    single: bool
    labels: list[str]
    hypotheses: list[str]
    multi_label: bool
    as_list: bool
    cut: bool


class ZeroShotClassification:
    """The task."""

    name = TaskName.ZERO_SHOT_CLASSIFICATION

    def __init__(self, fitter: Fitter, folder: ModelFolder, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        self.tokenizer = fitter.tokenizer
        self._fitter = fitter
        self._entailment = entailment_label(folder)
        # As in transformers: the first label, or the last if the first is entailment.
        self._contradiction = folder.num_labels - 1 if self._entailment == 0 else 0
        self._limits = limits
        self._inputs = inputs(limits)
        self._parameters = parameter_kinds(limits)

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> ZeroShotRequest:
        """See `Task`."""
        values = parse_parameters(parameters, self._parameters)
        texts = self._inputs.parse(inputs, "inputs")
        single = isinstance(texts, str)
        texts = [texts] if single else texts
        labels = labels_of(values["candidate_labels"], self._limits)
        if len(texts) * len(labels) > self._limits.rows:
            raise InvalidInput(
                f"{len(texts)} texts times {len(labels)} labels are over the limit of {self._limits.rows} rows",
                field="inputs" if not single else "parameters.candidate_labels",
                remedy="Split the request",
            )
        cut = values["truncate"]
        return ZeroShotRequest(
            texts=texts,
            single=single,
            labels=labels,
            hypotheses=[fill(values["hypothesis_template"], label) for label in labels],
            multi_label=values["multi_label"] or len(labels) == 1,
            as_list=values["output_format"] == "list",
            cut=self._fitter.rule.cut if cut is None else cut,
        )

    def prepare(self, request: ZeroShotRequest) -> Prepared:
        """See `Task`. Only the text is truncated, never a hypothesis."""
        fitter = self._fitter
        template, rule = fitter.tokenizer.pair, fitter.rule.asked(request.cut, None)
        room = fitter.room(template)
        texts = fitter.split(request.texts, template, rule.side)
        hypotheses = fitter.split(request.hypotheses, template, rule.side)
        for label, hypothesis in zip(request.labels, hypotheses, strict=True):
            if len(hypothesis) >= room:
                raise InvalidInput(
                    f"the hypothesis of the label {label[:50]!r} leaves no room for a text "
                    f"({len(hypothesis)} of {room} tokens)",
                    field="parameters.candidate_labels",
                    remedy="Use shorter labels or a shorter hypothesis_template",
                )
            fitter.tokenizer.require_embedded(
                hypothesis.ids, "parameters.candidate_labels", label=f"the hypothesis of the label {label[:50]!r}"
            )
        rows, cut = [], 0
        for index, text in enumerate(texts):
            where = "inputs" if request.single else f"inputs[{index}]"
            for hypothesis in hypotheses:
                kept = text
                if len(text) + len(hypothesis) > room:
                    fitter.refuse_unless(rule, text, template, where, hypothesis)
                    kept = text.keep(room - len(hypothesis), rule.side)
                    cut += 1
                fitter.tokenizer.require_embedded(kept.ids, where)
                rows.append(fitter.require_tokens(template.row(kept.ids, hypothesis.ids), where))
        return Prepared(rows=rows, memo=request, truncated=cut)

    def reduce(self, row: Row, outputs: Outputs) -> Float:  # noqa: ARG002 - the contract of Task
        """The logits of contradiction and entailment [2]."""
        return finite(outputs["logits"][[self._contradiction, self._entailment]])

    def assemble(self, prepared: Prepared, reduced: Sequence[Float]) -> Any:
        """See `Task`."""
        wanted: ZeroShotRequest = prepared.memo
        logits = np.stack(reduced).reshape(len(wanted.texts), len(wanted.labels), 2)
        scores = softmax(logits)[..., 1] if wanted.multi_label else softmax(logits[..., 1])
        answers = [self._answer(wanted, text, row) for text, row in zip(wanted.texts, scores, strict=True)]
        return answers[0] if wanted.single else answers

    @staticmethod
    def _answer(wanted: ZeroShotRequest, text: str, scores: Float) -> Any:
        # Equal scores in transformers' order: the reverse of an ascending sort.
        order = scores.argsort()[::-1].tolist()
        values = scores[order].tolist()
        labels = [wanted.labels[index] for index in order]
        if wanted.as_list:
            return [{"label": label, "score": score} for label, score in zip(labels, values, strict=True)]
        return {"sequence": text, "labels": labels, "scores": values}


def labels_of(given: str | list[str], limits: RequestLimits) -> list[str]:
    """The labels as a list; InvalidInput if there are none, or too many."""
    if isinstance(given, list):
        return given
    where = "parameters.candidate_labels"
    labels = [label for part in given.split(",") if (label := part.strip())]
    if not labels:
        raise InvalidInput(f"{where} holds no label", field=where, remedy="Send a label, or several with commas")
    return ListOf(Text("a label"), limits.items).parse(labels, where)


def fill(template: str, label: str) -> str:
    """The template, as `HypothesisTemplate` has checked it, with the label instead of each field."""
    return "".join(
        literal if field is None else literal + label for literal, field, _, _ in string.Formatter().parse(template)
    )


def entailment_label(folder: ModelFolder) -> int:
    """The index of the entailment label; UnsupportedModel if no name starts with `entail`.

    From `label2id`, in its order, as in the pipeline of transformers; otherwise from `id2label`.
    """
    table = folder.config.get("label2id")
    # Without id2label transformers creates both, with generic names.
    stated = table if isinstance(table, Mapping) and folder.config.get("id2label") is not None else {}
    for label, index in (*stated.items(), *((label, index) for index, label in enumerate(folder.labels))):
        if label.lower().startswith("entail") and index in range(folder.num_labels) and folder.num_labels > 1:
            return int(index)
    raise UnsupportedModel(
        f"{folder.path} has no entailment label (it has {', '.join(folder.labels[:10])})",
        remedy="Use a model trained on natural language inference whose id2label names `entailment`",
    )
