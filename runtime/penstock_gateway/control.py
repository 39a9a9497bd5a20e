"""HAProxy's socket: one command, one answer."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from penstock_gateway.settings import GatewayError

TIMEOUT_SECONDS = 5.0


class Control:
    """The way in."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tell(self, command: str) -> str:
        """What HAProxy says to it, without empty lines. OSError when it is not there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(TIMEOUT_SECONDS)
            link.connect(str(self._path))
            link.sendall(f"{command}\n".encode())
            answer = bytearray()
            while piece := link.recv(65536):
                answer += piece
        return "\n".join(line for line in answer.decode(errors="replace").splitlines() if line.strip())

    def held(self) -> int:
        """How many requests are held just now."""
        return int(self.tell("gateway held"))

    def wait(self, seconds: float) -> None:
        """Until HAProxy answers; GatewayError when it does not."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.tell("show info")
            except OSError as error:
                if time.monotonic() > deadline:
                    raise GatewayError(f"HAProxy does not answer after {seconds:g} s: {error}. See its log.") from error
                time.sleep(0.02)
            else:
                return
