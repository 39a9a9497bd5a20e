"""A loaded model in this process: an event loop in a thread, with the stages of the server behind its HTTP routes.

Work of any size is split into requests: sorted by length, so that batches have little padding, and a few at a time, so
that one is tokenised while another one runs. A request that is refused is halved until the row at fault is alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PenstockError
from penstock.manifest import Manifest
from penstock.resources.endpoint_parts.serving import Serving
from penstock.tasks import TaskName
from penstock_runtime.errors import RequestError
from penstock_runtime.host import read_host
from penstock_runtime.serving.generation_model import GenerationModel, load_generation_artefact
from penstock_runtime.serving.generator import Generator
from penstock_runtime.serving.loaded_model import LoadedModel, Which, load_artefact
from penstock_runtime.serving.predictor import Predictor, characters
from penstock_runtime.settings import GenerationSettings, QueueSettings
from penstock_runtime.tasks.base import RequestLimits

T = TypeVar("T")
OnAnswer = Callable[[int, int], None]
"""Called with the rows and tokens of each request that is answered."""

WINDOW_ROWS = 8192
WINDOW_CHARACTERS = 8 * 2**20
"""Rows that are sorted by length together, which bounds the memory of their tokens."""
REQUEST_ROWS = 128
REQUEST_CHARACTERS = 256 * 2**10
"""Of one request; a single row may be longer."""
REQUESTS_AT_ONCE = 4
_UNBOUNDED = 2**40
QUEUE = QueueSettings(max_queue_rows=_UNBOUNDED, max_queue_tokens=_UNBOUNDED, deadline_seconds=float(_UNBOUNDED))
"""There are no other clients: a call takes as long as it takes."""
LIMITS = RequestLimits(items=_UNBOUNDED, rows=_UNBOUNDED, answer_bytes=_UNBOUNDED)


@dataclass(frozen=True)
class RowError:
    """A row without an answer."""

    row: int
    """Its position in the call, from 0."""
    code: str
    """The error type of the HTTP API, such as `validation`."""
    message: str


class RowsRefused(PenstockError):
    """Rows of a call have no answer, and the call did not ask for a report of them."""


class RunningModel:
    """One model, loaded. To be closed; from any thread."""

    def __init__(self, artefact: Path, which: Which, threads: int | None, serving: Serving) -> None:
        self.task = Manifest.load(artefact).task
        self.model: LoadedModel | GenerationModel = _open(artefact, which, threads, serving)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock", daemon=True)
        self._thread.start()
        try:
            self._predictor: Predictor | Generator = self._wait(self._start())
        except BaseException:
            self._stop()
            raise

    def answers(
        self,
        rows: Iterable[T],
        parameters: Mapping[str, Any],
        inputs: Callable[[Sequence[T]], Any],
        *,
        strict: bool,
        on_answer: OnAnswer = lambda _rows, _tokens: None,
    ) -> Iterator[tuple[list[Any], list[RowError], int]]:
        """For each window of rows their answers in order (None: refused), the errors, and the number of tokens.

        `inputs`: makes the inputs of a request from some of the rows. `strict`: the first refused row raises
        RowsRefused. `on_answer`: called in another thread, one call at a time.
        """
        first, rest = 0, iter(rows)
        for window in _windows(rest):
            answers, errors, tokens = self._wait(self._window(window, parameters, inputs, on_answer))
            found = [
                RowError(first + row, error.error_type, error.message.replace("inputs[0]", "it"))
                for row, error in sorted(errors.items())
            ]
            if found and strict:
                raise RowsRefused(
                    f"row {found[0].row} of this call is refused: {found[0].message}"
                    + (f" (and {len(found) - 1} more of these {len(window)})" if len(found) > 1 else ""),
                    remedy='Correct the row, or pass on_error="null" for answers without it and a list of the errors',
                )
            yield answers, found, tokens
            first += len(window)

    def close(self) -> None:
        """Finish what runs, and free the model."""
        if self._loop.is_running():
            self._wait(self._predictor.drain())
            self._stop()

    async def _start(self) -> Predictor | Generator:
        if isinstance(self.model, GenerationModel):
            return Generator(self.model, queue=QUEUE, settings=GenerationSettings(), limits=LIMITS)
        predictor = Predictor(self.model, queue=QUEUE)
        await predictor.warm_up()
        return predictor

    async def _window(
        self,
        rows: Sequence[T],
        parameters: Mapping[str, Any],
        inputs: Callable[[Sequence[T]], Any],
        on_answer: OnAnswer,
    ) -> tuple[list[Any], dict[int, RequestError], int]:
        """Of one window: answers, errors by row, tokens."""
        answers: list[Any] = [None] * len(rows)
        errors: dict[int, RequestError] = {}
        tokens = 0
        room = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def run(chosen: Sequence[int]) -> None:
            nonlocal tokens
            try:
                async with room:
                    answer = await self._predictor.predict(inputs([rows[one] for one in chosen]), parameters)
            except RequestError as error:
                if len(chosen) == 1:
                    errors[chosen[0]] = error
                    return
                middle = len(chosen) // 2
                await run(chosen[:middle])
                await run(chosen[middle:])
                return
            tokens += answer.tokens
            on_answer(len(chosen), answer.tokens)
            for one, value in zip(chosen, answer.value, strict=True):
                answers[one] = value

        await asyncio.gather(*(run(chosen) for chosen in _requests([characters(row) for row in rows])))
        return answers, errors, tokens

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _windows(rows: Iterator[T]) -> Iterator[list[T]]:
    """Consecutive rows, within WINDOW_ROWS and WINDOW_CHARACTERS. Pure."""
    window: list[T] = []
    size = 0
    for row in rows:
        window.append(row)
        size += characters(row)
        if len(window) == WINDOW_ROWS or size >= WINDOW_CHARACTERS:
            yield window
            window, size = [], 0
    if window:
        yield window


def _requests(sizes: Sequence[int]) -> Iterator[list[int]]:
    """The rows of each request, longest first: a short request at the end keeps all cores busy until then. Pure."""
    order = iter(sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)))
    for first in order:
        most = max(1, min(REQUEST_ROWS, REQUEST_CHARACTERS // max(1, sizes[first])))
        yield [first, *islice(order, most - 1)]


def _open(artefact: Path, which: Which, threads: int | None, serving: Serving) -> LoadedModel | GenerationModel:
    host = read_host()
    cores = host.usable_cores(threads).cores
    if Manifest.load(artefact).task is TaskName.TEXT_GENERATION:
        return load_generation_artefact(artefact, which, host, cores=cores)
    return load_artefact(
        artefact,
        which,
        host,
        cores=cores,
        max_tokens=serving.max_input_tokens,
        truncate=serving.truncate,
        prompts=serving.prompts,
        limits=LIMITS,
    )
