"""Set-up of the command's process: standard output that reports write errors, and large memory pages for weights.

Large pages: one pass over the weights of a model touches thousands of small pages (4 KiB), and a short run then waits
for address translation, twice over in a virtual machine. MiniLM in int8 takes 6 to 10 % longer at 8 tokens
(docs/decisions/huge-pages.md). The C library asks the kernel for large pages (2 MiB) only when an environment variable
is set before the process starts, so the process replaces itself once.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.errors import HostError

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CLOSED = 1
"""Exit status of a command after the reader closed the pipe; click and rich use the same."""
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as shells use it."""
RAISING_HANDLERS = frozenset({"strict", "surrogateescape"})
"""Error handlers that raise when the output's encoding lacks a character, such as one of a path. Python's defaults."""


def environment_with_huge_pages(environment: Mapping[str, str], policy: str) -> dict[str, str] | None:
    """The environment to restart with; None when a restart would change nothing.

    `policy` is the kernel's, such as `always [madvise] never`. No restart where the kernel gives large pages anyway,
    where it gives none, or where the tunable is already set, to any value.
    """
    tunables = environment.get(VARIABLE, "")
    if "[madvise]" not in policy or TUNABLE in tunables:
        return None
    return {**environment, VARIABLE: ":".join(filter(None, (tunables, f"{TUNABLE}=1")))}


def restart_with_huge_pages() -> None:
    """Replace this process by the same command with large pages, where that helps; otherwise return."""
    try:
        environment = environment_with_huge_pages(os.environ, POLICY.read_text(encoding="ascii"))
    except OSError:
        return  # a kernel without large pages, or another system than Linux
    if environment is not None:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, environment)  # noqa: S606 - the same command


class CheckedStdout(io.TextIOWrapper):
    """Standard output that raises HostError instead of OSError, such as on a full disk.

    A closed pipe remains BrokenPipeError, for which click exits silently.
    """

    failed = False
    """True after either error, so that the exit code can be set."""

    def write(self, text: str, /) -> int:
        """Print; see `io.TextIOBase`."""
        with self._write_errors():
            return super().write(text)

    def flush(self) -> None:
        """Write the buffered text; see `io.IOBase`."""
        with self._write_errors():
            super().flush()

    def discard(self) -> None:
        """Redirect to /dev/null: the buffered text would fail again when the interpreter exits."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
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
def checked_stdout() -> Iterator[None]:
    """Make `sys.stdout` a CheckedStdout inside the block, and flush it at the end. A closed one is left as it is."""
    plain = sys.stdout
    if not isinstance(plain, io.TextIOWrapper):
        yield
        return
    plain.flush()
    output = CheckedStdout(
        plain.buffer,
        plain.encoding,
        "backslashreplace" if plain.errors in RAISING_HANDLERS else plain.errors,
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
                output.discard()
            # Otherwise closing this wrapper would close the file descriptor.
            output.detach()
