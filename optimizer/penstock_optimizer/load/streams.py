"""Sends requests for streamed text over HTTP from a separate process, and times their tokens.

`run_streams` starts `python -m penstock_optimizer.load.streams`: a StreamSpec as JSON on its standard input, a
StreamResult as JSON on its standard output. Each client sends its next request when its answer is complete. The route
is `/v1/completions`; the last event of an answer has the number of its tokens.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping

from pydantic import Field

from penstock.manifest import Frozen
from penstock_optimizer.load.client import LoadClient, RequestSource, is_good
from penstock_optimizer.load.generator import on_uvloop, quantile, run_in_process

END_OF_EVENT = b"\n\n"
FIELD = b"data: "
DONE = b"[DONE]"


class StreamSpec(RequestSource):
    """One measurement. The recorded time begins when each client has had its first answer."""

    clients: int = Field(ge=1)
    answers: int = Field(ge=1)
    """The recorded time ends with this number of answers, within the next two limits."""
    least_seconds: float = Field(gt=0)
    most_seconds: float = Field(gt=0)
    start_seconds: float = Field(gt=0)
    """Limit for the first answers."""
    cpus: tuple[int, ...] = ()
    """Logical CPUs of the load process; empty: not pinned."""


class StreamResult(Frozen):
    """The measurements of the recorded time; without answers, if not each client has had its first one in time."""

    seconds: float
    answers: int = 0
    tokens: int = 0
    """Of all answers together, also of those that were not complete."""
    first_token_p95_milliseconds: float | None = None
    """From sending a request to its first event; None: there was none."""
    next_token_p95_milliseconds: float | None = None
    """Between two events of an answer. Mostly an event has one token: the server holds back half characters."""
    failed: int = 0
    """Requests without a whole answer, from the start on."""
    first_failure: str = ""


def run_streams(spec: StreamSpec) -> StreamResult:
    """Run one measurement in a separate process, and wait for it; LoadFailed with the end of its log when it fails."""
    seconds = spec.start_seconds + spec.most_seconds
    return StreamResult.model_validate_json(run_in_process("penstock_optimizer.load.streams", spec, seconds))


class StreamRun:
    """One run of one spec."""

    def __init__(self, spec: StreamSpec) -> None:
        self._spec = spec
        self._client = LoadClient(spec, self._settled, on_piece=self._piece, max_connections=spec.clients)
        self._open: dict[int, tuple[bytes, float, int]] = {}
        """By request: the beginning of an incomplete event, the time of the last event, and the number of events."""
        self._starting = set(range(spec.clients))
        """The first requests, until they are answered."""
        self._changed = asyncio.Event()
        self._over = False
        self._failed = 0
        self._reset()

    def _reset(self) -> None:
        self._begin = time.perf_counter()
        self._first: list[float] = []
        self._next: list[float] = []
        self._tokens = self._answers = 0

    async def run(self) -> StreamResult:
        """Send requests until the recorded time ends."""
        spec = self._spec
        await self._client.start(spec.clients)
        for _ in range(spec.clients):
            self._client.launch(time.perf_counter())
        await self._until(lambda: not self._starting, spec.start_seconds)
        if not self._starting:
            self._reset()
            await self._until(lambda: self._answers >= spec.answers, spec.most_seconds)
            await self._until(lambda: False, spec.least_seconds - (time.perf_counter() - self._begin))
        self._over = True
        result = self._result() if not self._starting else StreamResult(seconds=0.0, failed=self._failed)
        await self._client.close()
        return result.model_copy(update={"first_failure": self._client.first_failure})

    async def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        end = time.perf_counter() + seconds
        while not self._failed and not holds() and (left := end - time.perf_counter()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return

    def _piece(self, request: int, piece: bytes) -> None:
        """Bytes of a good answer."""
        now = time.perf_counter()
        rest, last, count = self._open.get(request, (b"", self._client.sent[request], 0))
        *events, rest = (rest + piece).split(END_OF_EVENT)
        for event in events:
            data = event.removeprefix(FIELD)
            if data == DONE:
                continue
            value = json.loads(data)
            choices, usage = value.get("choices"), value.get("usage")
            if usage is not None:
                # Tokens that shared an event, or have no text.
                self._tokens += max(usage["completion_tokens"] - count, 0)
            if not choices:
                continue
            if last == self._client.sent[request]:
                self._first.append(now - last)
            elif choices[0]["text"]:
                self._next.append(now - last)
            if choices[0]["text"]:
                count += 1
                self._tokens += 1
            last = now
        self._open[request] = rest, last, count

    def _settled(self, request: int, status: int, _at: float, _numbers: Mapping[str, float]) -> None:
        self._open.pop(request, None)
        if self._over:
            return
        if is_good(status):
            self._answers += 1
            self._starting.discard(request)
            self._client.launch(time.perf_counter())
        else:
            self._failed += 1
        self._changed.set()

    def _result(self) -> StreamResult:
        return StreamResult(
            seconds=time.perf_counter() - self._begin,
            answers=self._answers,
            tokens=self._tokens,
            first_token_p95_milliseconds=1e3 * quantile(sorted(self._first), 0.95) if self._first else None,
            next_token_p95_milliseconds=1e3 * quantile(sorted(self._next), 0.95) if self._next else None,
            failed=self._failed,
        )


async def _run(spec: StreamSpec) -> StreamResult:
    return await StreamRun(spec).run()


def main() -> None:
    """Read the spec, run it, write the result."""
    spec = StreamSpec.model_validate_json(sys.stdin.buffer.read())
    gc.disable()
    sys.stdout.write(on_uvloop(_run(spec), spec.cpus).model_dump_json())


if __name__ == "__main__":
    main()
