"""Standard output that says when it cannot take what is printed: a full disk below it, a terminal that is gone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from penstock.errors import HostError

CLOSED = 1
"""Status of a command whose reader has closed the pipe, as click and rich have it."""
FAILING = frozenset({"strict", "surrogateescape"})
"""What Python does by itself where the output's encoding lacks a character, such as one of a path: it raises."""


class Output(io.TextIOWrapper):
    """Raises HostError instead of OSError. A closed pipe stays BrokenPipeError, of which click makes a silent end."""

    failed = False
    """Whether it did either: whoever printed knows."""

    def write(self, text: str, /) -> int:
        """Print; see `io.TextIOBase`."""
        with self._told():
            return super().write(text)

    def flush(self) -> None:
        """Print what was kept back; see `io.IOBase`."""
        with self._told():
            super().flush()

    def give_up(self) -> None:
        """Write to nowhere from here on: what is kept back would fail once more when the interpreter ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.failed = True
            raise
        except OSError as error:
            self.failed = True
            raise HostError(
                f"what is printed cannot be written: {error.strerror}",
                remedy="Print to a terminal, or to a file on a disk with room for it",
            ) from error


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Within, `sys.stdout` is an `Output`; to its end all of it is written. A closed one is left as it is."""
    plain = sys.stdout
    if not isinstance(plain, io.TextIOWrapper):
        yield
        return
    plain.flush()
    output = Output(
        plain.buffer,
        plain.encoding,
        "backslashreplace" if plain.errors in FAILING else plain.errors,
        line_buffering=plain.line_buffering,
        write_through=plain.write_through,
    )
    sys.stdout = output
    try:
        yield
    finally:
        sys.stdout = plain
        try:
            if not output.failed:
                output.flush()
        except BrokenPipeError:
            sys.exit(CLOSED)
        finally:
            if output.failed:
                output.give_up()
            # Or else it would close what is below it.
            output.detach()
