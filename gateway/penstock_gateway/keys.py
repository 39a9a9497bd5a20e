"""The keys that requests need, from a mounted Secret: HAProxy gets their hashes, again when they change."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from penstock_gateway.log_events import log_event

LONGEST_FILE = 65_536
"""Bytes of a file that are read, as by the runtime."""
MOST_KEYS = 20_000
"""Further ones are not accepted: a Secret of 1 MiB has room for this number of keys of 50 characters."""
PER_COMMAND = 400
"""HAProxy reads a command into one buffer (`config.BUFFER_BYTES`), of which a hash takes 65 bytes."""

logger = logging.getLogger("penstock.gateway")


def read_hashes(folder: Path) -> tuple[str, ...]:
    """SHA-256 hashes of all keys of the folder: each file has one, or several, one a line. OSError."""
    # The kubelet replaces all files at once, by pointing the link `..data` to another folder.
    data = folder / "..data"
    present = data.resolve() if data.is_symlink() else folder
    found: list[str] = []
    for path in sorted(present.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        with path.open("rb") as opened:
            lines = opened.read(LONGEST_FILE).splitlines()
        found += (hashlib.sha256(line.strip()).hexdigest() for line in lines if line.strip())
    return tuple(found[:MOST_KEYS])


def commands(hashes: tuple[str, ...]) -> list[str]:
    """The commands that make HAProxy accept just these keys, from the last one on."""
    parts = [hashes[at : at + PER_COMMAND] for at in range(0, len(hashes), PER_COMMAND)] or [()]
    names = ["first", *["more"] * (len(parts) - 1)]
    sent = [f"gateway keys {name} {','.join(part) or 'none'}" for name, part in zip(names, parts, strict=True)]
    return [*sent, "gateway keys last none"]


class KeySync:
    """Keeps HAProxy's hashes equal to the folder's."""

    def __init__(self, folder: Path, send: Callable[[str], str]) -> None:
        self._folder = folder
        self._send = send
        self._sent: tuple[str, ...] | None = None

    def update(self) -> None:
        """Send the hashes if they have changed. OSError if HAProxy does not answer; what cannot be read stays as it
        was."""
        try:
            hashes = read_hashes(self._folder)
        except OSError as error:
            if self._sent is not None:
                logger.debug("the keys cannot be read: %s", error)
                return
            hashes = ()
        if hashes == self._sent:
            return
        for command in commands(hashes):
            self._send(command)
        self._sent = hashes
        logger.info("%d keys are accepted", len(hashes), extra=log_event("KeysChanged"))
