"""A balancer as kube-proxy: each new connection goes to a random backend, and stays there."""

from __future__ import annotations

import random
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Balancer:
    """A port in front of ports; `backends` may change at any time, and affects new connections only."""

    def __init__(self, backends: list[int]) -> None:
        self.backends = backends
        self.taken: dict[int, int] = {}
        """How many connections each backend was given."""
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listening.getsockname()[1]
        self._random = random.Random(7)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            port = self._random.choice(self.backends)
            self.taken[port] = self.taken.get(port, 0) + 1
            try:
                server = socket.create_connection(("127.0.0.1", port), timeout=60)
            except OSError:
                client.close()
                continue
            thread = threading.Thread(target=self._carry, args=(client, server), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while not self._over.is_set():
                for key, _ in selector.select(0.2):
                    source, sink = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    try:
                        data = source.recv(65536)
                        if not data:
                            return
                        sink.sendall(data)
                    except OSError:
                        return

    def close(self) -> None:
        self._over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(5)


@contextmanager
def balancing(backends: list[int]) -> Iterator[Balancer]:
    """A balancer; its connections are cut at the end."""
    balancer = Balancer(backends)
    try:
        yield balancer
    finally:
        balancer.close()
