"""Clients that send requests continuously, and record every failure."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self

import httpx


class Clients(ABC):
    """Several clients that ask during the `with` block."""

    def __init__(self, url: str, count: int) -> None:
        self.answered = 0
        self.failures: list[str] = []
        """Those that a user would notice."""
        self._url = url
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]

    @abstractmethod
    def _ask(self) -> None:
        """One client: ask until `_over` is set, and note each answer."""

    def _note(self, failure: str) -> None:
        """Count an answer; empty: it was the right one."""
        with self._changed:
            if failure:
                self.failures.append(failure)
            else:
                self.answered += 1
            self._changed.notify_all()

    def more(self, count: int, *, seconds: float = 120) -> None:
        """Wait for this number of further right answers."""
        with self._changed:
            wanted = self.answered + count
            assert self._changed.wait_for(lambda: self.answered >= wanted, seconds), self.failures

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ask no more, and wait for the answers that are under way."""
        self._over.set()
        for thread in self._threads:
            thread.join(130)


class Load(Clients):
    """Requests with one body, on persistent connections."""

    def __init__(self, url: str, *, clients: int, pause_seconds: float, body: bytes) -> None:
        super().__init__(url, clients)
        self._pause, self._body = pause_seconds, body

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


def load(url: str, *, clients: int = 4, pause_seconds: float = 0.01, body: bytes = b'{"inputs": "i like you"}') -> Load:
    """Runs during the `with` block."""
    return Load(url, clients=clients, pause_seconds=pause_seconds, body=body)
