"""question-answering: the part of a text that answers a question.

A long context is processed in overlapping windows; answers are character ranges of the context as it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Outputs, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, SPAN_TOKEN_BYTES, Prepared, RequestLimits
from penstock_runtime.tasks.extraction.spans import AnswerSpan, best_spans, merge
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
from penstock_runtime.tasks.scores import finite
from penstock_runtime.tasks.texts import Fitter
from penstock_runtime.tokens import Pieces, Side, windows
from penstock_runtime.tokens.pieces import count_windows

MAX_SEQUENCE = 384
"""Tokens of a window, if the model takes them: the usual training length of such models."""
MAX_OVERLAP = 128
MAX_QUESTION = 64

ANSWER_BYTES = 60
"""JSON bytes of an answer, without its text."""

PARAMETERS = Object(
    required={},
    optional={
        "top_k": (Integer(1, 1000), 1),
        "doc_stride": (Integer(0, 1_000_000), None),
        "max_answer_len": (Integer(1, 10_000), 15),
        "max_seq_len": (Integer(8, 1_000_000), None),
        "max_question_len": (Integer(1, 1_000_000), None),
        "handle_impossible_answer": (Boolean(), False),
        "align_to_words": (Boolean(), True),
    },
    notes={
        "top_k": "How many answers, at most; more than one gives a list.",
        "doc_stride": f"Tokens that neighbouring windows share. Default: half of max_seq_len, at most {MAX_OVERLAP}, "
        "and at most half of a window's context.",
        "max_answer_len": "The longest answer in tokens.",
        "max_seq_len": f"Tokens of a window, question included. Default: {MAX_SEQUENCE}, or the model's limit.",
        "max_question_len": "Tokens of the question, the rest is cut. Default: all, unless no room for context were "
        f"left, then {MAX_QUESTION}, and at most half of max_seq_len.",
        "handle_impossible_answer": "Allow the empty answer.",
        "align_to_words": "Widen answers to whole words.",
    },
)
EXAMPLES = (
    {"inputs": {"question": "What is my name?", "context": "My name is Clara and I live in Berkeley."}},
    {
        "inputs": [{"question": "Who?", "context": "Ada wrote it."}, {"question": "Where?", "context": "In London."}],
        "parameters": {"top_k": 2, "handle_impossible_answer": True},
    },
)


def inputs(limits: RequestLimits) -> FieldKind:
    """A question with its context, or a list of these."""
    one = Object(required={"question": Text(), "context": Text()}, words="an object with question and context")
    return Either((one, ListOf(one, limits.items, words="a list of these")))


def request_schema(limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """The request body. Refused beyond it: a question or a stride that leaves no room for
    context, too many windows, a max_seq_len over the model's limit, too many answers."""
    return body_schema(
        inputs(limits), PARAMETERS, examples=EXAMPLES, about="The part of a context that answers a question"
    )


def response_schema() -> JsonSchema:
    """The answer; a list of answers when there are several; a list of either for a list of questions."""
    answer = {
        "type": "object",
        "properties": {
            "score": {"type": "number", "minimum": 0},
            "start": {"type": "integer", "minimum": 0},
            "end": {"type": "integer", "minimum": 0},
            "answer": {"type": "string"},
        },
        "required": ["score", "start", "end", "answer"],
    }
    answers = {"type": "array", "items": answer}
    return {
        "description": "The answer, start and end in characters of the context; a list when there are several",
        "anyOf": [answer, answers, {"type": "array", "items": {"anyOf": [answer, answers]}}],
        "examples": [{"score": 0.9327, "start": 11, "end": 16, "answer": "Clara"}],
    }


@dataclass(frozen=True, slots=True)
class QuestionRequest:
    """A checked request."""

    questions: list[tuple[str, str]]
    """Question and context."""
    single: bool
    top_k: int
    doc_stride: int | None
    max_answer_len: int
    max_seq_len: int
    max_question_len: int | None
    impossible: bool
    align: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WindowRow(Row):
    """A question with a part of its context."""

    question: int
    """Index of the question in the request."""
    context: Pieces
    start: int
    """Position in the row of the context's first token."""
    cls_id: int | None
    candidates: int
    """Number of answers to find."""
    longest: int
    """The longest answer in tokens."""
    align: bool


@dataclass(frozen=True, slots=True)
class WindowAnswers:
    """The result of `reduce` for a window."""

    answers: list[AnswerSpan]
    null_score: float


class QuestionAnswering:
    """The task."""

    name = TaskName.QUESTION_ANSWERING

    def __init__(self, fitter: Fitter, folder: ModelFolder, limits: RequestLimits = DEFAULT_LIMITS) -> None:
        if fitter.tokenizer.pads_left:
            raise UnsupportedModel(
                f"{folder.path} reads the context before the question (padding_side is left)",
                remedy="Use a model of the BERT or RoBERTa kind for question-answering",
            )
        self.tokenizer = fitter.tokenizer
        self._fitter = fitter
        self._limits = limits
        self._inputs = inputs(limits)

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> QuestionRequest:
        """See `Task`."""
        values = parse_parameters(parameters, PARAMETERS)
        given = self._inputs.parse(inputs, "inputs")
        single = isinstance(given, dict)
        length = values["max_seq_len"]
        if length is not None and length > self._fitter.max_tokens:
            raise InvalidInput(
                f"parameters.max_seq_len is {length}; this model takes {self._fitter.max_tokens} tokens",
                field="parameters.max_seq_len",
                remedy=f"Ask for {self._fitter.max_tokens} or fewer",
            )
        return QuestionRequest(
            questions=[(one["question"], one["context"]) for one in ([given] if single else given)],
            single=single,
            top_k=values["top_k"],
            doc_stride=values["doc_stride"],
            max_answer_len=values["max_answer_len"],
            max_seq_len=min(self._fitter.max_tokens, MAX_SEQUENCE) if length is None else length,
            max_question_len=values["max_question_len"],
            impossible=values["handle_impossible_answer"],
            align=values["align_to_words"],
        )

    def prepare(self, request: QuestionRequest) -> Prepared:
        """See `Task`."""
        tokenizer = self._fitter.tokenizer
        questions = tokenizer.split([question for question, _ in request.questions], limit=request.max_seq_len)
        # Only as much of the context as the limits of windows and of their tokens allow.
        most = min(self._limits.rows * request.max_seq_len, self._limits.tokens)
        contexts = tokenizer.split(
            [context for _, context in request.questions],
            limit=most,
            side=tokenizer.side,
            offsets=True,
        )
        rows: list[WindowRow] = []
        cut = 0
        for index, (question, context) in enumerate(zip(questions, contexts, strict=True)):
            prefix = "inputs" if request.single else f"inputs[{index}]"
            if not context.complete:
                raise InvalidInput(
                    f"{prefix}.context has more than {most} tokens",
                    field=f"{prefix}.context",
                    remedy="Send a shorter context, or its parts in several requests",
                )
            asked = self._question(question, request)
            tokenizer.require_embedded(asked.ids, f"{prefix}.question")
            cut += len(asked) < len(question)
            ranges = self._windows(len(asked), len(context), request, prefix, taken=len(rows))
            template = tokenizer.pair
            for start, stop in ranges:
                part = context.part(start, stop)
                tokenizer.require_embedded(part.ids, f"{prefix}.context")
                row = self._fitter.require_tokens(template.row(asked.ids, part.ids), f"{prefix}.context")
                rows.append(
                    WindowRow(
                        row.ids,
                        row.type_ids,
                        question=index,
                        context=part,
                        start=template.second_start(len(asked)),
                        cls_id=tokenizer.cls_id,
                        # Some candidates become equal when they are widened to words.
                        candidates=request.top_k * 2 + 10 if request.align else request.top_k,
                        longest=request.max_answer_len,
                        align=request.align,
                    )
                )
        size = self._answer_bytes(request, rows)
        self._limits.check_answer(size, "parameters.top_k", "Ask for fewer answers, or send fewer questions at a time")
        return Prepared(rows=rows, memo=request, truncated=cut, token_bytes=SPAN_TOKEN_BYTES, answer_bytes=size)

    def _answer_bytes(self, request: QuestionRequest, rows: Sequence[WindowRow]) -> int:
        """Assumes answers as long as a window: two words may have any amount of white space between them."""
        longest = [0] * len(request.questions)
        for row in rows:
            longest[row.question] = max(longest[row.question], _length(row.context))
        return sum(request.top_k * (ANSWER_BYTES + characters) for characters in longest)

    def reduce(self, row: Row, outputs: Outputs) -> WindowAnswers:
        """The window's best answers in characters."""
        if not isinstance(row, WindowRow):
            raise TypeError("question-answering needs the rows that its prepare made")
        start, end = finite(outputs["start_logits"]), finite(outputs["end_logits"])
        context = slice(row.start, row.start + len(row.context))
        # The first token means no answer; as in transformers, every token of that id takes part in the scores.
        others = None if row.cls_id is None else np.asarray(row.ids) == row.cls_id
        found = best_spans(start, end, context, others, count=row.candidates, longest=row.longest)
        answers = [AnswerSpan(score, *_characters(row, first, last)) for score, first, last in found.spans]
        if not row.context.ids:
            # A context of white space only: the empty answer with score 0.
            answers = [AnswerSpan(0.0, 0, 0)]
        return WindowAnswers(answers, found.null_score)

    def assemble(self, prepared: Prepared, reduced: Sequence[WindowAnswers]) -> Any:
        """See `Task`."""
        wanted: QuestionRequest = prepared.memo
        by_question: list[list[WindowAnswers]] = [[] for _ in wanted.questions]
        for row, window in zip(prepared.rows, reduced, strict=True):
            assert isinstance(row, WindowRow)  # noqa: S101 - prepare made it
            by_question[row.question].append(window)
        answers = []
        for (_, context), found in zip(wanted.questions, by_question, strict=True):
            null_score = min(window.null_score for window in found) if wanted.impossible else None
            best = merge([window.answers for window in found], context, null_score=null_score, count=wanted.top_k)
            answers.append(best[0] if len(best) == 1 else best)
        return answers[0] if wanted.single else answers

    def _question(self, question: Pieces, request: QuestionRequest) -> Pieces:
        """The question, truncated if requested, or if it would leave no room for the context."""
        limit, room = request.max_question_len, request.max_seq_len - self._fitter.tokenizer.pair.specials
        if limit is None and len(question) >= room and self._fitter.rule.cut:
            limit = min(MAX_QUESTION, room // 2)
        return question if limit is None else question.keep(limit, Side.RIGHT)

    def _windows(
        self, question: int, context: int, request: QuestionRequest, prefix: str, *, taken: int
    ) -> list[tuple[int, int]]:
        """Token ranges of the context; InvalidInput if there is no room, or there are too many windows."""
        room = request.max_seq_len - self._fitter.tokenizer.pair.specials - question
        if room < 1:
            raise InvalidInput(
                f"{prefix}.question has {question} tokens, which leaves no room for context in {request.max_seq_len}",
                field=f"{prefix}.question",
                remedy="Send a shorter question, a smaller max_question_len, or a larger max_seq_len",
            )
        if context <= room:
            return [(0, context)]
        overlap = request.doc_stride
        if overlap is None:
            overlap = min(request.max_seq_len // 2, MAX_OVERLAP)
            # A long question leaves little room: smaller overlaps rather than hundreds of windows.
            overlap = overlap if overlap < room else room // 2
        if overlap >= room:
            raise InvalidInput(
                f"parameters.doc_stride is {overlap}; besides the question a window has {room} tokens of context",
                field="parameters.doc_stride",
                remedy=f"Send less than {room}, or a larger max_seq_len",
            )
        if taken + count_windows(context, room, overlap) > self._limits.rows:
            raise InvalidInput(
                f"{prefix}.context goes over the limit of {self._limits.rows} windows in one request",
                field=f"{prefix}.context",
                remedy="Send less text, or a smaller doc_stride",
            )
        return windows(context, room, overlap, self._fitter.tokenizer.side)


def _length(context: Pieces) -> int:
    """Characters from its first token to the end of its last."""
    offsets = context.offsets or [(0, 0)]
    return offsets[-1][1] - offsets[0][0]


def _characters(row: WindowRow, first: int, last: int) -> tuple[int, int]:
    """Characters of a span of the window's context; widened to whole words, as far as the window has them."""
    offsets, words = row.context.offsets or [], row.context.words or []
    if row.align and words[first] is not None and words[last] is not None:
        while first > 0 and words[first - 1] == words[first]:
            first -= 1
        while last + 1 < len(words) and words[last + 1] == words[last]:
            last += 1
    return offsets[first][0], offsets[last][1]
