"""Free TCP ports on loopback."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

from testbed.programs import LOOPBACK, Ports

LOWEST, HIGHEST = 20_000, 32_000
"""Below the range that the kernel takes for outgoing connections: those come and go between the look and the use."""

_draw = random.SystemRandom()


def free_ports() -> Ports:
    """Ports that are free now. Another process may take one before it is used, so be ready to try again."""
    etcd, etcd_peer, api, controller_manager, scheduler = some_free_ports(5)
    return Ports(etcd, etcd_peer, api, controller_manager, scheduler)


def some_free_ports(count: int) -> list[int]:
    """`count` different ports."""
    found: list[int] = []
    with ExitStack() as held:  # all are held until all are found: no port twice
        while len(found) < count:
            probe = held.enter_context(socket.socket())
            port = _draw.randrange(LOWEST, HIGHEST)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            found.append(port)
    return found
