"""A constant load on a Service, which records every failure."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TEXT = "I like you. I love you."
HEADERS = {"content-type": "application/json"}
PATIENCE_SECONDS = 120
"""For an answer: longer than a gateway holds a request on a machine that starts pods slowly."""


@dataclass(frozen=True)
class Answer:
    """What one request was answered. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: str

    @property
    def vector(self) -> list[float]:
        """The embedding."""
        found: Any = json.loads(self.body)
        return list(found[0] if isinstance(found[0], list) else found)


def predict(address: str, text: str = TEXT, *, timeout_seconds: float = 30) -> Answer:
    """One request on a connection of its own. OSError or HTTPException when it fails."""
    connection = http.client.HTTPConnection(address, 80, timeout=timeout_seconds)
    try:
        return _send(connection, text)
    finally:
        connection.close()


def until_answered(address: str, *, seconds: float) -> Answer:
    """Ask until there is an answer of the model. TimeoutError with what happened last."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            answer = predict(address, timeout_seconds=5)
        except (OSError, http.client.HTTPException) as error:
            last = error
        else:
            if answer.status == 200:
                return answer
            last = answer
        time.sleep(0.05)
    raise TimeoutError(f"{address} did not answer within {seconds:g} s; last: {last}")


def _send(connection: http.client.HTTPConnection, text: str) -> Answer:
    connection.request("POST", "/predict", json.dumps({"inputs": text}), HEADERS)
    response = connection.getresponse()
    return Answer(
        response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()
    )


@dataclass
class Load:
    """Continuous requests. `failures` are those that a user would notice."""

    address: str
    per_second: float
    text: str | Callable[[], str] = TEXT
    """Or what gives the text of the next request."""
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def more(self, count: int, *, seconds: float = 300) -> None:
        """Wait until this number of further requests is answered."""
        with self._changed:
            goal = self.answered + count
            assert self._changed.wait_for(lambda: self.answered >= goal, seconds), f"no answers; {self.failures}"

    @property
    def _next(self) -> str:
        return self.text if isinstance(self.text, str) else self.text()

    def on_new_connections(self) -> None:
        """Each request on a connection of its own: each may meet another pod."""
        while not self._over.wait(1 / self.per_second):
            try:
                self._count(predict(self.address, self._next, timeout_seconds=PATIENCE_SECONDS))
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"new connection: {error!r}")

    def on_kept_connections(self) -> None:
        """One connection for as long as the server keeps it, as most clients have it."""
        connection: http.client.HTTPConnection | None = None
        while not self._over.wait(1 / self.per_second):
            if connection is None:
                connection = http.client.HTTPConnection(self.address, 80, timeout=PATIENCE_SECONDS)
            try:
                answer = _send(connection, self._next)
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"kept connection: {error!r}")
                connection.close()
                connection = None
                continue
            self._count(answer)
            if answer.headers.get("connection", "").lower() == "close":
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _count(self, answer: Answer) -> None:
        if answer.status == 200:
            with self._changed:
                self.answered += 1
                self._changed.notify_all()
        else:
            self.failures.append(f"{answer.status}: {answer.body[:200]}")

    def end(self) -> None:
        """Send no more requests."""
        self._over.set()


@contextmanager
def constant_load(address: str, *, per_second: float = 10, text: str | Callable[[], str] = TEXT) -> Iterator[Load]:
    """Requests at that rate, half of them on new connections, while the block runs."""
    load = Load(address, per_second / 2, text)
    threads = [threading.Thread(target=work) for work in (load.on_new_connections, load.on_kept_connections)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.end()
        for thread in threads:
            thread.join()
