"""The tasks of bulk work: which columns they read, what the model computes of a row, and the column that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from penstock.errors import PenstockError
from penstock.tasks import TaskName
from penstock_bulk.arrow import pa
from penstock_bulk.records import Fault
from penstock_bulk.session import OnAnswer, RunningModel
from penstock_runtime.rows import Float

TEXT_COLUMNS = ("text", "content", "document", "chunk", "prompt")
"""Columns that are looked for, in this order."""
MOST_CHARACTERS = 2**21
"""Of a text: the model reads its first few thousand, and more takes time and memory."""


@dataclass(frozen=True)
class BulkTask:
    """One kind of work."""

    model: TaskName
    column: str
    """Name of the result."""
    shard_rows: int
    """Some minutes of work at the usual rates, which is what a kill may cost."""


TASKS = {
    "embed": BulkTask(TaskName.FEATURE_EXTRACTION, "vector", 4096),
    "classify": BulkTask(TaskName.TEXT_CLASSIFICATION, "labels", 4096),
    "rerank": BulkTask(TaskName.TEXT_RANKING, "ranking", 512),
    "generate": BulkTask(TaskName.TEXT_GENERATION, "generated", 128),
}


class Calculation:
    """Results of a task, in batches of rows, by a loaded model."""

    def __init__(
        self, session: RunningModel, task: str, parameters: Mapping[str, Any], *, dtype: str, top: int | None
    ) -> None:
        self._session, self._task, self._parameters, self._top = session, task, dict(parameters), top
        self._dtype = np.dtype(dtype)
        width = 0
        if task == "embed":
            # Also of shards without a vector, and before any work.
            ((first,), errors, _) = self._answers(["a"], lambda _rows, _tokens: None)
            if errors or not isinstance(first, np.ndarray) or first.ndim != 1:
                why = errors[0].message if errors else "it has no dense vectors, one for each text"
                raise PenstockError(f"this model cannot embed a corpus: {why}", remedy="Correct the options")
            width = len(first)
        self.type = {
            "embed": pa.list_(pa.from_numpy_dtype(self._dtype), width),
            "classify": pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())])),
            "rerank": pa.list_(pa.struct([("index", pa.int32()), ("score", pa.float32())])),
            "generate": pa.string(),
        }[task]

    def results(
        self, rows: Sequence[Any], on_answer: OnAnswer = lambda _rows, _tokens: None
    ) -> tuple[list[Any], dict[int, Fault], int]:
        """For each row its result (None: a fault), the faults by row, and the tokens.

        PenstockError if the model fails on every row, which is no fault of the rows.
        """
        faults = {row: fault for row, value in enumerate(rows) if (fault := self._fault(value)) is not None}
        good = [row for row in range(len(rows)) if row not in faults]
        chosen = [rows[row] for row in good]
        answers = self._ranked if self._task == "rerank" else self._answers
        found, wrong, tokens = answers(chosen, on_answer)
        if wrong and len(wrong) == len(good) and all(one.code == "inference" for one in wrong.values()):
            raise PenstockError(
                f"the model fails on all of {len(good)} rows: {wrong[0].message}",
                remedy="Run the same command again: it resumes; if it fails again, try plan fp32",
            )
        results: list[Any] = [None] * len(rows)
        for row, value in zip(good, found, strict=True):
            results[row] = value
        faults |= {good[position]: one for position, one in wrong.items()}
        if self._dtype == np.float16:
            for row in good:
                if row not in faults and not np.isfinite(results[row].astype(np.float16)).all():
                    faults[row] = Fault("float16", "the vector has a value that is too large for float16")
        return results, faults, tokens

    def column(self, results: Sequence[Any]) -> Any:
        """The results of rows without a fault as an Arrow array."""
        if self._task == "embed":
            values = np.asarray(results, dtype=self._dtype).reshape(-1)
            return pa.FixedSizeListArray.from_arrays(pa.array(values), type=self.type)
        if self._task == "generate":
            results = [one[0]["generated_text"] for one in results]
        return pa.array(results, self.type)

    def _fault(self, value: Any) -> Fault | None:
        if self._task != "rerank":
            return _too_long([value])
        query, documents = value
        documents = [documents] if isinstance(documents, str) else documents
        if not isinstance(query, str) or not isinstance(documents, list) or not documents:
            return Fault("validation", "it must have a query and a list of documents")
        return _too_long([query, *documents])

    def _answers(
        self, rows: Sequence[Any], on_answer: OnAnswer, inputs: Callable[[Sequence[Any]], Any] = list
    ) -> tuple[list[Any], dict[int, Fault], int]:
        answers: list[Any] = []
        faults: dict[int, Fault] = {}
        tokens = 0
        for some, errors, counted in self._session.answers(
            rows, self._parameters, inputs, strict=False, on_answer=on_answer
        ):
            answers += some
            faults |= {one.row: Fault(one.code, one.message) for one in errors}
            tokens += counted
        return answers, faults, tokens

    def _ranked(self, rows: Sequence[Any], on_answer: OnAnswer) -> tuple[list[Any], dict[int, Fault], int]:
        """A row has a fault if one of its documents has."""
        documents = [[one[1]] if isinstance(one[1], str) else one[1] for one in rows]
        pairs = [(query, text) for (query, _), texts in zip(rows, documents, strict=True) for text in texts]
        scores, wrong, tokens = self._answers(
            pairs, lambda _pairs, tokens: on_answer(0, tokens), lambda some: [[*pair] for pair in some]
        )
        results: list[Any] = []
        faults: dict[int, Fault] = {}
        start = 0
        for row, texts in enumerate(documents):
            found = scores[start : start + len(texts)]
            of_row = next((wrong[start + at] for at in range(len(texts)) if start + at in wrong), None)
            if of_row is not None:
                faults[row] = of_row
                results.append(None)
            else:
                order = sorted(range(len(found)), key=lambda at: (-found[at], at))[: self._top]
                results.append([{"index": at, "score": float(found[at])} for at in order])
            start += len(texts)
        return results, faults, tokens


def _too_long(texts: Sequence[Any]) -> Fault | None:
    longest = max((len(one) for one in texts if isinstance(one, str)), default=0)
    if longest <= MOST_CHARACTERS:
        return None
    return Fault("too_large", f"the text has {longest:,} characters, and at most {MOST_CHARACTERS:,} are read")


def parameters_of(task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request, as of `POST /predict`, from the options of a command that are set."""
    fixed: dict[str, dict[str, Any]] = {
        "embed": {"pooling": "auto"},
        "classify": {},
        "rerank": {"raw_scores": False},
        "generate": {"do_sample": False, "return_full_text": False},
    }
    return {**fixed[task], **{name: value for name, value in options.items() if value is not None}}


def bytes_of(column: Any) -> bytes:
    """The values of an Arrow array of results, independent of how it was written."""
    if pa.types.is_fixed_size_list(column.type):
        values: Float = column.flatten().to_numpy(zero_copy_only=False)
        return values.tobytes()
    return orjson.dumps(column.to_pylist())
