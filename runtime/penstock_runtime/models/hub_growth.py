"""How far a download of huggingface_hub has got: the library itself tells nobody but a bar on a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_SECONDS = 0.5


@contextmanager
def growth_told(blobs: Path, tell: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, `tell` the size in bytes of what arrives in the folder, from a thread of its own."""
    begun = time.time()
    over = threading.Event()

    def watch() -> None:
        with suppress(BrokenPipeError):  # nobody listens any more: what is told next, by the caller's thread, says so
            while not over.wait(LOOK_SECONDS):
                if size := _arriving(blobs, begun):
                    tell(size)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _arriving(blobs: Path, begun: float) -> int:
    """Bytes of the unfinished file that was written to last; 0 when none was since `begun` (seconds since the epoch):
    those of broken downloads lie there as well."""
    found = [(0.0, 0)]
    for path in blobs.glob("*.incomplete"):
        with suppress(OSError):  # finished meanwhile
            facts = path.stat()
            found.append((facts.st_mtime, facts.st_size))
    changed, size = max(found)
    # A file's time comes from a coarser clock, which is some milliseconds behind.
    return size if changed > begun - 1 else 0
