"""Clients that send requests continuously on persistent connections, and record every failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


class Load:
    """`failures` are those that a user would notice. `answered` counts by the replica's own header or body."""

    def __init__(self, url: str, *, clients: int, pause_seconds: float, body: bytes) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._url, self._pause, self._body = url, pause_seconds, body
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        headers = {"content-type": "application/json"}
        with httpx.Client(trust_env=False, verify=False, timeout=120) as client:
            while not self._over.wait(self._pause):
                try:
                    answer = client.post(f"{self._url}/predict", content=self._body, headers=headers)
                except httpx.HTTPError as error:
                    self._note(repr(error))
                    continue
                self._note("" if answer.status_code == 200 else f"{answer.status_code}: {answer.text[:300]}")

    def _note(self, failure: str) -> None:
        with self._changed:
            if failure:
                self.failures.append(failure)
            else:
                self.answered += 1
            self._changed.notify_all()

    def more(self, count: int, *, seconds: float = 120) -> None:
        """Wait for this number of further answers."""
        with self._changed:
            wanted = self.answered + count
            assert self._changed.wait_for(lambda: self.answered >= wanted, seconds), self.failures

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(40)


@contextmanager
def load(
    url: str, *, clients: int = 4, pause_seconds: float = 0.01, body: bytes = b'{"inputs": "i like you"}'
) -> Iterator[Load]:
    """Runs during the `with` block."""
    running = Load(url, clients=clients, pause_seconds=pause_seconds, body=body)
    try:
        yield running
    finally:
        running.end()
