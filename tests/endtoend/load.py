"""Clients that send requests continuously, each on a persistent connection, and record every outcome."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

PAUSE_SECONDS = 0.01
"""Pause between an answer and the next request: it keeps the server busy and leaves CPU time for the optimisation."""


@dataclass(frozen=True)
class Exchange:
    """A request and its outcome."""

    text: str
    sent: float
    answered: float
    status: int
    """0: no answer."""
    answer: Any


class Load:
    """Runs until left, or until the server no longer listens."""

    def __init__(self, port: int, texts: Sequence[str], clients: int = 4) -> None:
        self._port = port
        self._texts = tuple(texts)
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self.exchanges: list[Exchange] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.join()

    def join(self, seconds: float = 60.0) -> None:
        """Wait until every client has ended by itself: the server no longer listens."""
        for thread in self._threads:
            thread.join(seconds)
            assert not thread.is_alive(), "a client hangs"

    def wait_for_more(self, count: int, seconds: float = 60.0) -> None:
        """Wait until this number of further requests was answered."""
        with self._changed:
            goal = len(self.exchanges) + count
            assert self._changed.wait_for(lambda: len(self.exchanges) >= goal, seconds), "the answers stopped"

    def _run(self, number: int) -> None:
        connection: http.client.HTTPConnection | None = None
        turn = number
        while not self._stop.wait(PAUSE_SECONDS):
            if connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
                try:
                    connection.connect()
                except OSError:
                    return  # no server listens, so no request was accepted
            text = self._texts[turn % len(self._texts)]
            turn += 7  # another order for each client
            exchange, keeps = self._ask(connection, text)
            with self._changed:
                self.exchanges.append(exchange)
                self._changed.notify_all()
            if not keeps:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    @staticmethod
    def _ask(connection: http.client.HTTPConnection, text: str) -> tuple[Exchange, bool]:
        sent = time.monotonic()
        try:
            body = json.dumps({"inputs": text})
            connection.request("POST", "/predict", body, {"content-type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            return Exchange(text, sent, time.monotonic(), 0, repr(error)), False
        return Exchange(text, sent, time.monotonic(), response.status, answer), not response.will_close
