"""Reads a sample of an index from a file, and the vectors of its texts from a server.

A sample is rows of a text and its stored vector: JSON lines, or Parquet with the extra `index`. At most MOST_ROWS are
kept, evenly from the whole file, and no row, file or answer has more than its limit.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import IndexSampleUnusable, MissingPackage, PenstockError
from penstock.resources.endpoint_parts.vector_space import IndexCriteria
from penstock_optimizer.guard.certificate import LEAST_DOCUMENTS, IndexVectors
from penstock_runtime.rows import Float

PARQUET = ".parquet"
TEXT_NAMES = ("text", "content", "document", "chunk")
VECTOR_NAMES = ("vector", "embedding", "embeddings")
"""Columns that are looked for, in this order."""
MOST_ROWS = 50_000
MOST_FILE_BYTES = 4 * 2**30
MOST_LINE_BYTES = 2**20
MOST_WIDTH = 16_384
MOST_CHARACTERS = 32_768
MOST_BYTES = 2**29
"""Of the texts and vectors that are kept."""
ROWS_AT_ONCE = 1024
"""Of a Parquet file: its rows are decoded in pieces."""
TEXTS_AT_ONCE = 16
"""In a request."""
ANSWER_BYTES = 64 * 2**20
SECONDS = 300.0
"""Of one request."""
QUERIES = 2_000
"""Of a certificate of which the documents of the sample are the queries."""
TIMED = 64
"""Texts that are embedded first where time is short, to see how many there is time for."""
AGAIN = 2_000
"""Documents that the new model embeds, for the index that both have written."""

OnProgress = Callable[[int, int], None]
"""Called with the number of texts that have vectors, and of all."""


@dataclass(frozen=True)
class IndexSample:
    """Texts and their stored vectors."""

    texts: tuple[str, ...]
    vectors: Float
    """[texts, width]."""
    rows: int
    """Of the whole file."""
    digest: str
    """sha256, hexadecimal, of texts and vectors."""


def read_sample(path: Path, *, text: str = "", vector: str = "", most: int = MOST_ROWS) -> IndexSample:
    """Read a sample. `text`, `vector`: names of the columns; empty: the first of TEXT_NAMES and VECTOR_NAMES.

    IndexSampleUnusable names the column and the row, counted from 1.
    """
    try:
        size = path.stat().st_size
        if size > MOST_FILE_BYTES:
            raise IndexSampleUnusable(
                f"{path} has {size / 2**30:.1f} GiB, and at most {MOST_FILE_BYTES / 2**30:.0f} are read",
                remedy=f"Export a random sample: at most {MOST_ROWS:,} rows are used",
            )
        rows, found = _parquet(path, text, vector, most) if path.suffix == PARQUET else _lines(path, text, vector, most)
        texts, vectors = _checked(path, found)
    except OSError as error:
        raise IndexSampleUnusable(
            f"the sample {path} cannot be read ({error.strerror or error})", remedy="Check path and access"
        ) from error
    digest = hashlib.sha256(json.dumps(texts).encode())
    digest.update(vectors.tobytes())
    return IndexSample(texts, vectors, rows, digest.hexdigest())


Rows = Iterator[tuple[int, Any, Any, str, str]]
"""Number of the row, text, vector, and the names of their columns."""


def _checked(path: Path, rows: Rows) -> tuple[tuple[str, ...], Float]:
    texts: list[str] = []
    vectors: list[Float] = []
    held = 0
    for number, text, vector, text_name, vector_name in rows:

        def wrong(column: str, what: str, row: int = number) -> IndexSampleUnusable:
            return IndexSampleUnusable(
                f"{path}, column {column}, row {row}: {what}", remedy="Leave this row out of the export, or correct it"
            )

        if not isinstance(text, str) or not text.strip():
            raise wrong(text_name, "there is no text")
        if len(text) > MOST_CHARACTERS:
            raise wrong(text_name, f"the text has {len(text):,} characters, and at most {MOST_CHARACTERS:,} are read")
        try:
            values = np.asarray(vector, dtype=np.float32)
        except (TypeError, ValueError):
            raise wrong(vector_name, "this is not a list of numbers") from None
        if values.ndim != 1 or not 1 <= values.size <= MOST_WIDTH:
            raise wrong(vector_name, f"this is not a list of 1 to {MOST_WIDTH:,} numbers")
        if vectors and values.size != vectors[0].size:
            raise wrong(vector_name, f"the vector has {values.size} values, and the first one {vectors[0].size}")
        if not np.isfinite(values).all() or not values.any():
            raise wrong(vector_name, "the vector has a value that is not finite, or only zeros")
        texts.append(text)
        vectors.append(values)
        held += len(text) + values.nbytes
        if held > MOST_BYTES:
            raise IndexSampleUnusable(
                f"{path}: up to row {number}, texts and vectors have over {MOST_BYTES // 2**20} MiB",
                remedy=f"Export fewer rows: {len(texts) // 2:,} of this size fit, and 10,000 are enough",
            )
    if not texts:
        raise IndexSampleUnusable(f"{path} has no rows", remedy="Export texts with their vectors")
    return tuple(texts), np.stack(vectors)


def _column(path: Path, names: Sequence[str], asked: str, known: Sequence[str]) -> str:
    """The name of a column."""
    found = next((name for name in ((asked,) if asked else known) if name in names), None)
    if found is None:
        raise IndexSampleUnusable(
            f"{path} has no column {asked or ' or '.join(known)}: it has {', '.join(list(names)[:20]) or 'none'}",
            remedy="Name the columns of texts and vectors: --text-column, --vector-column",
        )
    return found


def _lines(path: Path, text: str, vector: str, most: int) -> tuple[int, Rows]:
    def lines() -> Iterator[bytes]:
        with path.open("rb") as file:
            while line := file.readline(MOST_LINE_BYTES + 1):
                yield line

    count = sum(1 for _ in lines())
    step = max(1, -(-count // most))

    def rows() -> Rows:
        for number, line in enumerate(lines(), 1):
            if (number - 1) % step:
                continue
            try:
                value = json.loads(line) if len(line) <= MOST_LINE_BYTES else None
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise IndexSampleUnusable(
                    f"{path}, row {number}: this is not a JSON object in one line of up to {MOST_LINE_BYTES:,} bytes",
                    remedy='Write {"text": "...", "vector": [...]} for each row, or give a .parquet file',
                )
            names = tuple(value)
            of_text, of_vector = _column(path, names, text, TEXT_NAMES), _column(path, names, vector, VECTOR_NAMES)
            yield number, value[of_text], value[of_vector], of_text, of_vector

    return count, rows()


def _parquet(path: Path, text: str, vector: str, most: int) -> tuple[int, Rows]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingPackage(
            "Parquet cannot be read here: pyarrow is not installed",
            remedy="Run pip install 'penstock[index]', or export JSON lines",
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except ArrowException as error:
        raise IndexSampleUnusable(f"{path} is no Parquet file ({error})", remedy="Export it again") from error
    names = file.schema_arrow.names
    of_text, of_vector = _column(path, names, text, TEXT_NAMES), _column(path, names, vector, VECTOR_NAMES)
    count = file.metadata.num_rows
    step = max(1, -(-count // most))

    def rows() -> Rows:
        number = 0
        try:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[of_text, of_vector]):
                for index in range(-number % step, batch.num_rows, step):
                    vector_at = batch.column(of_vector)[index]
                    value = (
                        vector_at.values.to_numpy(zero_copy_only=False)
                        if vector_at.is_valid and hasattr(vector_at, "values")
                        else None
                    )
                    yield number + index + 1, batch.column(of_text)[index].as_py(), value, of_text, of_vector
                number += batch.num_rows
        except ArrowException as error:
            raise IndexSampleUnusable(f"{path}, after row {number}: {error}", remedy="Export it again") from error

    return count, rows()


@dataclass(frozen=True)
class Embedder:
    """A server that gives the vectors of texts by `POST /embed`."""

    url: str
    """Without a path."""
    token: str = ""

    def vectors(
        self, texts: Sequence[str], *, prompt: str = "", on_progress: OnProgress = lambda _done, _of: None
    ) -> Float:
        """float32 [texts, width], of length 1. PenstockError if the server does not answer with them."""
        found: list[Float] = []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            part = list(texts[start : start + TEXTS_AT_ONCE])
            body: dict[str, Any] = {"inputs": part, "truncate": True, "normalize": True}
            made = np.asarray(self._post({**body, "prompt_name": prompt} if prompt else body), dtype=np.float32)
            if made.ndim != 2 or len(made) != len(part) or not np.isfinite(made).all():
                raise PenstockError(
                    f"{self.url}/embed does not give one vector for each text",
                    remedy="Give an endpoint of the task feature-extraction with dense vectors",
                )
            found.append(made)
            on_progress(start + len(part), len(texts))
        return np.concatenate(found)

    def _post(self, body: Mapping[str, Any]) -> Any:
        headers = {"content-type": "application/json"}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        wanted = urllib.request.Request(f"{self.url}/embed", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(wanted, timeout=SECONDS) as answer:
                return json.loads(answer.read(ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                answer_text = error.read(300).decode(errors="replace")
            raise PenstockError(
                f"{self.url}/embed is answered with status {error.code}: {answer_text}",
                remedy="Check the address, the token (PENSTOCK_AUTH_TOKEN), and that the task is feature-extraction",
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise PenstockError(
                f"{self.url}/embed is not answered: {reason}", remedy="Check host and port, and that it runs"
            ) from error


def index_vectors(
    sample: IndexSample,
    criteria: IndexCriteria,
    new: Embedder,
    old: Embedder | None = None,
    *,
    queries: Sequence[str] = (),
    prompts: tuple[str, str] = ("", ""),
    pairs: int = AGAIN,
    seconds: float | None = None,
    on_progress: OnProgress = lambda _done, _of: None,
) -> IndexVectors:
    """The vectors of a certificate. `queries`: texts that `old`, the writer of the index, and `new` embed. Empty:
    documents of the sample are the queries, with their stored vectors. `prompts`: names, of queries and of documents.
    `pairs`: documents that `new` embeds, too. `seconds`: with less time than all need, queries and documents are fewer.
    IndexSampleUnusable if there are too few documents."""
    rows, count = np.random.default_rng(0).permutation(len(sample.texts)), 0
    most = len(rows)
    if seconds is not None:
        begun = time.monotonic()
        new.vectors([sample.texts[row] for row in rows[:TIMED]], prompt=prompts[1])
        most = int(TIMED * seconds / max(time.monotonic() - begun, 1e-6))
    pairs = min(pairs, most // 2)
    if not queries:
        count = min(QUERIES, len(rows) // 3, most // 2)
        # Queries of the same text as a stored document would find it, whatever the model is.
        asked = {sample.texts[row] for row in rows[:count]}
        rows = np.concatenate(
            [rows[:count], [row for row in rows[count:] if sample.texts[row] not in asked]], dtype=int, casting="unsafe"
        )
    documents = rows[count:]
    if len(documents) < LEAST_DOCUMENTS * criteria.k:
        raise IndexSampleUnusable(
            f"the sample has {len(documents)} documents to search, and {criteria.k} results need "
            f"{LEAST_DOCUMENTS * criteria.k}",
            remedy="Export more rows: 3,000 can prove a recall of 0.99, and more are better",
        )
    again = [sample.texts[row] for row in documents[:pairs]]
    texts = queries or [sample.texts[row] for row in rows[:count]]
    total = len(texts) * (2 if queries else 1) + len(again)
    # Documents as queries have the prompt of documents, as their stored vectors have.
    made = new.vectors(
        texts, prompt=prompts[0] if queries else prompts[1], on_progress=lambda done, _: on_progress(done, total)
    )
    more = new.vectors(again, prompt=prompts[1], on_progress=lambda done, _: on_progress(len(texts) + done, total))
    stored = sample.vectors[rows[:count]]
    if queries:
        if old is None:
            raise ValueError("queries need the writer of the index")
        known = len(texts) + len(again)
        stored = old.vectors(texts, prompt=prompts[0], on_progress=lambda done, _: on_progress(known + done, total))
    return IndexVectors(stored, made, sample.vectors[documents], more, sample.digest, of_documents=not queries)
