"""What a task is. Knows tokenizer and shapes of answers; knows nothing of engines, queues or HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.tasks import TaskName
from penstock_runtime.rows import Outputs, Row

PLAIN_TOKEN_BYTES = 48
"""Memory of a token in a row: an integer and its places in two lists. Less where rows share integers."""
SPAN_TOKEN_BYTES = 208
"""The same with its `Pieces`: a tuple of two offsets, the number of a word, and their places in three more lists."""
ROW_BYTES = 128
"""Memory of a row beside its tokens: the object, its lists, what `memo` has for each."""


@dataclass(slots=True)
class Prepared:
    """A request after tokenising: its rows, and whatever the task wants to remember until `assemble`."""

    rows: Sequence[Row]
    memo: Any
    """The task's own: parsed inputs, parameters, offsets."""
    truncated: int = 0
    """How many rows were cut to the model's maximum."""
    token_bytes: int = PLAIN_TOKEN_BYTES
    """Memory of each of its tokens."""
    answer_bytes: int = 0
    """Of its answer as JSON, as far as the request tells; 0 where that is quickly put together, however large."""

    @property
    def rows_bytes(self) -> int:
        """Memory of its rows, by how many tokens they have: nothing is looked at. The request's texts are not in it."""
        return self.tokens * self.token_bytes + len(self.rows) * ROW_BYTES

    @property
    def tokens(self) -> int:
        """Tokens that will be computed, special ones included."""
        return sum([row.length for row in self.rows])


class Task(Protocol):
    """One task of one model. All methods are pure functions of their arguments and thread-safe."""

    @property
    def name(self) -> TaskName:
        """Which task."""
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
        """Boil one row's outputs down to what `assemble` needs (pooling, softmax). Runs in the event loop: be quick.

        `row` is the very object that `prepare` made: tasks keep in it what they need here. What comes back shares no
        memory with `outputs`, which may be views of a whole batch.
        """
        ...

    def assemble(self, prepared: Prepared, reduced: Sequence[Any]) -> Any:
        """The answer in the HF shape: dicts, lists, strings, floats and float32 arrays (orjson writes those). Runs in
        another thread where the rows are many or `answer_bytes` large."""
        ...
