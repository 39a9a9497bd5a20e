"""fill-mask: the most likely tokens for the mask tokens of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Outputs, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, Prepared, RequestLimits
from penstock_runtime.tasks.fields import (
    Boolean,
    Either,
    FieldKind,
    Integer,
    JsonSchema,
    ListOf,
    Object,
    Text,
    body_schema,
    parse_parameters,
)
from penstock_runtime.tasks.scores import finite, highest, softmax
from penstock_runtime.tasks.texts import Fitter, Truncation

CHOICE_BYTES = 80
"""JSON bytes of one token in the answer, without its sequence."""
TOKEN_BYTES = 6
"""Bytes of a token in a text: English has 4 to 5, other languages more."""

EXAMPLES = (
    {"inputs": "Paris is the [MASK] of France.", "parameters": {"top_k": 3}},
    {"inputs": ["The goal of life is [MASK].", "A [MASK] day."], "parameters": {"targets": ["love", "rainy"]}},
)


def parameter_kinds(limits: RequestLimits) -> Object:
    """The parameters."""
    return Object(
        required={},
        optional={
            "top_k": (Integer(1, 10_000), 5),
            "targets": (Either((Text(), ListOf(Text(), limits.items))), None),
            "truncate": (Boolean(), None),
        },
        notes={
            "top_k": "How many tokens for each mask.",
            "targets": "Only these tokens; one that the vocabulary lacks is replaced by its first part (the last "
            "where the tokenizer's truncation_side is left).",
            "truncate": "Cut a text that is too long; false refuses it. Default: the endpoint's setting.",
        },
    )


def inputs(limits: RequestLimits) -> FieldKind:
    """A text or a list of texts."""
    return Either((Text(), ListOf(Text(), limits.items)))


def request_schema(limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """The request body. Refused beyond it: texts without the model's mask token, targets without any token, too long
    without truncate, masks times top_k that make a very large answer."""
    return body_schema(
        inputs(limits), parameter_kinds(limits), examples=EXAMPLES, about="The most likely tokens in place of a mask"
    )


def response_schema() -> JsonSchema:
    """The answer: tokens for the mask; a list for each of several masks; a list of either for a list of texts."""
    element = {
        "type": "object",
        "properties": {
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "token": {"type": "integer"},
            "token_str": {"type": "string"},
            "sequence": {"type": "string"},
        },
        "required": ["score", "token", "token_str", "sequence"],
    }
    one = {"type": "array", "items": element}
    several = {"type": "array", "items": one}
    return {
        "description": "Tokens for the mask, the best first; with several masks a list for each; "
        "a list of such answers for a list of texts",
        "anyOf": [one, several, {"type": "array", "items": several}],
        "examples": [
            [{"score": 0.9970, "token": 3007, "token_str": "capital", "sequence": "paris is the capital of france."}]
        ],
    }


@dataclass(frozen=True, slots=True)
class FillMaskRequest:
    """A checked request."""

    texts: list[str]
    single: bool
    top_k: int
    targets: list[str] | None
    rule: Truncation


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MaskRow(Row):
    """A row with mask tokens."""

    masks: tuple[int, ...]
    """Positions of the masks, ascending."""
    top_k: int
    targets: tuple[int, ...] | None
    """The only allowed tokens; None: all."""


Choices = list[tuple[list[int], list[float]]]
"""For each mask of a row its best tokens and their scores."""


class FillMask:
    """The task. Supports both forms of graph: logits of the masks only, or of all tokens."""

    name = TaskName.FILL_MASK

    def __init__(self, fitter: Fitter, folder: ModelFolder, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        if fitter.tokenizer.mask_id is None:
            raise UnsupportedModel(
                f"{folder.tokenizer} has no mask token", remedy="State it as mask_token in tokenizer_config.json"
            )
        self.tokenizer = fitter.tokenizer
        self._fitter = fitter
        self._limits = limits
        self._inputs = inputs(limits)
        self._parameters = parameter_kinds(limits)

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> FillMaskRequest:
        """See `Task`."""
        values = parse_parameters(parameters, self._parameters)
        texts = self._inputs.parse(inputs, "inputs")
        targets = values["targets"]
        return FillMaskRequest(
            texts=[texts] if isinstance(texts, str) else texts,
            single=isinstance(texts, str),
            top_k=values["top_k"],
            targets=[targets] if isinstance(targets, str) else targets,
            rule=self._fitter.rule.asked(values["truncate"], None),
        )

    def prepare(self, request: FillMaskRequest) -> Prepared:
        """See `Task`."""
        where = ["inputs"] if request.single else [f"inputs[{index}]" for index in range(len(request.texts))]
        plain, cut = self._fitter.singles(request.texts, where, request.rule)
        targets = None if request.targets is None else self._targets(request.targets)
        rows: list[Row] = []
        size_bytes = 0
        for row, text, field in zip(plain, request.texts, where, strict=True):
            masks = tuple(index for index, number in enumerate(row.ids) if number == self._fitter.tokenizer.mask_id)
            if not masks:
                raise self._no_mask(text, field)
            rows.append(MaskRow(row.ids, row.type_ids, masks=masks, top_k=request.top_k, targets=targets))
            most = self._fitter.tokenizer.vocabulary_size if targets is None else len(targets)
            # Each choice comes with the whole text.
            size_bytes += len(masks) * min(request.top_k, most) * (CHOICE_BYTES + TOKEN_BYTES * row.length)
        self._limits.check_answer(
            size_bytes, "parameters.top_k", "Ask for fewer tokens for each mask, or send fewer masks"
        )
        return Prepared(rows=rows, memo=request, truncated=cut, answer_bytes=size_bytes)

    def reduce(self, row: Row, outputs: Outputs) -> Choices:
        """The best tokens of each mask."""
        if not isinstance(row, MaskRow):
            raise TypeError("fill-mask needs the rows that its prepare made")
        logits = outputs["logits"]
        # One line for each token: a graph that computes all of them (or a text of masks only).
        scores = softmax(logits[list(row.masks)] if logits.shape[0] == row.length else logits)
        if row.targets is not None:
            scores = scores[:, row.targets]
        choices = []
        for mask in finite(scores):
            order = highest(mask, row.top_k)
            tokens = order if row.targets is None else [row.targets[index] for index in order]
            choices.append((tokens, mask[order].tolist()))
        return choices

    def assemble(self, prepared: Prepared, reduced: Sequence[Choices]) -> Any:
        """See `Task`."""
        wanted: FillMaskRequest = prepared.memo
        answers: list[Any] = []
        for row, choices in zip(prepared.rows, reduced, strict=True):
            assert isinstance(row, MaskRow)  # noqa: S101 - prepare made it
            masks = [
                self._texts(row, position, tokens, scores)
                for position, (tokens, scores) in zip(row.masks, choices, strict=True)
            ]
            answers.append(masks[0] if len(masks) == 1 else masks)
        return answers[0] if wanted.single else answers

    def _texts(self, row: MaskRow, position: int, tokens: list[int], scores: list[float]) -> list[dict[str, Any]]:
        """The mask's part of the answer."""
        tokenizer = self._fitter.tokenizer
        before, after = (
            [number for number in part if number != tokenizer.pad_id]
            for part in (row.ids[:position], row.ids[position + 1 :])
        )
        sequences = tokenizer.decode(
            [[*before, token, *after] if token != tokenizer.pad_id else before + after for token in tokens],
            # With several masks the other masks stay visible.
            skip_special=len(row.masks) == 1,
        )
        names = tokenizer.decode([[token] for token in tokens])
        return [
            {"score": score, "token": token, "token_str": name, "sequence": sequence}
            for score, token, name, sequence in zip(scores, tokens, names, sequences, strict=True)
        ]

    def _targets(self, targets: list[str]) -> tuple[int, ...]:
        """Token ids of the targets, without duplicates."""
        tokenizer = self._fitter.tokenizer
        found: list[int] = []
        for index, target in enumerate(targets):
            number = tokenizer.id_of(target)
            number = tokenizer.one_of(target, tokenizer.side) if number is None else number
            if number is None or number == tokenizer.vocabulary_size:  # the latter: it cannot be split into tokens
                raise InvalidInput(
                    f"parameters.targets[{index}] has no token in this model's vocabulary",
                    field=f"parameters.targets[{index}]",
                    remedy="Leave it out",
                )
            if number >= tokenizer.embedded_size:
                raise InvalidInput(
                    f"parameters.targets[{index}] means {tokenizer.token(number)!r}, which is token {number} of "
                    f"the tokenizer; the model knows 0 to {tokenizer.embedded_size - 1}",
                    field=f"parameters.targets[{index}]",
                    remedy="Leave it out, or serve the model with a table that has it (resize_token_embeddings)",
                )
            found.append(number)
        return tuple(dict.fromkeys(found))

    def _no_mask(self, text: str, field: str) -> InvalidInput:
        mask = self._fitter.tokenizer.mask_token or ""
        if mask in text:
            return InvalidInput(
                f"{field}: the mask {mask} is beyond the {self._fitter.max_tokens} tokens that this model takes",
                field=field,
                remedy="Move it nearer to the beginning, or send a shorter text",
            )
        return InvalidInput(
            f"{field} has no mask {mask}", field=field, remedy=f"Put {mask} where the model is to fill in"
        )
