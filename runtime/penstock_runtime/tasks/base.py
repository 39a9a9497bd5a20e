"""The interface of tasks, and the limits of one request. Independent of engines, queues and HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.rows import Outputs, Row
from penstock_runtime.tokens import Tokenizer

PLAIN_TOKEN_BYTES = 48
"""Memory of a token in a row: an integer and its entries in two lists. Less where rows share integers."""
SPAN_TOKEN_BYTES = 208
"""The same with its `Pieces`: a tuple of two offsets, the number of a word, and their entries in three more lists."""
ROW_BYTES = 128
"""Memory of a row besides its tokens: the object, its lists, its part of `memo`."""
_UNITS = ((1e6, "MB"), (1e3, "kB"))
NUMBER_BYTES = 12
"""Length of a float32 in JSON, including the comma: 9 to 13."""


@dataclass(frozen=True)
class RequestLimits:
    """Counts and sizes that no request may exceed."""

    items: int = 1024
    """Entries of any list in a request: texts, pairs, labels, targets. Clients send a page of documents at a time."""

    rows: int = 1024
    """Token sequences that one request may become: windows of long texts, labels times texts."""

    tokens: int = 131_072
    """Tokens of all these sequences: what a full queue may hold."""

    answer_bytes: int = 67_108_864
    """Size of the answer as JSON, as far as it follows from the request: a short one may lead to gigabytes."""

    def check_answer(self, size_bytes: int, field: str, remedy: str) -> None:
        """InvalidInput about `field` if an answer of about `size_bytes` exceeds the limit."""
        if size_bytes > self.answer_bytes:
            raise InvalidInput(
                f"{field} asks for an answer of some {_size(size_bytes)}; the limit is {_size(self.answer_bytes)}",
                field=field,
                remedy=remedy,
            )


def _size(count: int) -> str:
    """A readable size, in the unit that leaves at least two digits."""
    return next((f"{count / unit:,.0f} {name}" for unit, name in _UNITS if count >= 10 * unit), f"{count} bytes")


DEFAULT_LIMITS = RequestLimits()


@dataclass(slots=True)
class Prepared:
    """A tokenised request: its rows, and values that `assemble` needs again."""

    rows: Sequence[Row]
    memo: Any
    """Private to the task: parsed inputs, parameters, offsets."""
    truncated: int = 0
    """How many rows were cut to the model's maximum."""
    token_bytes: int = PLAIN_TOKEN_BYTES
    """Memory of each of its tokens."""
    answer_bytes: int = 0
    """Size of the answer as JSON, as far as known; 0 if it is assembled quickly whatever its size."""
    vectors: bytes = b""
    """Of vectors: what the request chose of them, as in the header x-vector-space: `d=384; n=1; p=query`."""
    cut_at: Sequence[int | None] = ()
    """For each text how many of its first characters are in its rows, where not all are; empty: not known."""

    @property
    def rows_bytes(self) -> int:
        """Memory of the rows, estimated from the number of tokens; without the request's texts."""
        return self.tokens * self.token_bytes + len(self.rows) * ROW_BYTES

    @property
    def tokens(self) -> int:
        """Tokens of all rows, special tokens included."""
        return sum([row.length for row in self.rows])


class Task(Protocol):
    """One task of one model. All methods are pure functions of their arguments and thread-safe."""

    @property
    def name(self) -> TaskName:
        """The task's name."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> Any:
        """Check `inputs` and `parameters` of the HF shape and return the parsed request (opaque to the caller).

        InvalidInput names the field and the remedy: unknown parameters, wrong types, empty input, lone surrogates,
        NaN, too many items. Cheap: no tokenising.
        """
        ...

    def prepare(self, request: Any) -> Prepared:
        """Tokenise: one row or many (a batch; N labels of a zero-shot; windows of a long context)."""
        ...

    def reduce(self, row: Row, outputs: Outputs) -> Any:
        """Reduce one row's outputs to what `assemble` needs (pooling, softmax). Runs in the event loop: must be fast.

        `row` is the object that `prepare` made: tasks keep values in it that they need here. The result shares no
        memory with `outputs`, which may be views of a batch.
        """
        ...

    def assemble(self, prepared: Prepared, reduced: Sequence[Any]) -> Any:
        """The answer in the HF shape: dicts, lists, strings, floats and float32 arrays (orjson writes those). Runs in
        another thread if there are many rows or `answer_bytes` is large."""
        ...


@runtime_checkable
class Judged(Protocol):
    """A task with answers that the accuracy guard compares as arrays that `reduce` does not give."""

    def judged(self, row: Row, reduced: Any) -> tuple[Any, ...]:
        """The arrays of a row."""
        ...


@runtime_checkable
class HeadInAssemble(Protocol):
    """A task with an `assemble` that computes a part of the model, so that its time counts as inference."""

    @property
    def head_in_assemble(self) -> bool:
        """True."""
        ...


@runtime_checkable
class JudgedWith(Protocol):
    """A task that the accuracy guard judges with further parameters."""

    @property
    def judging_parameters(self) -> Mapping[str, Any]:
        """Parameters that make all outputs part of the answer."""
        ...
