"""Which files of Penstock a piece of work executes, compared with the list in docs/explanation/architecture.md."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/architecture.md"
PACKAGES = (
    "penstock", "cli", "operator", "runtime", "optimizer", "gateway", "bench", "simulator", "planner", "bulk", "report",
)  # fmt: skip
"""Source roots at the top level of the repository."""


class Recorder:
    """The Python files of ours in which a function was called while `recording` was set, in all threads that started
    after the recorder was installed. Code that runs at import does not count.

    `files`: paths relative to the repository.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.recording = False
        self._known: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """A profile function, as `sys.setprofile` takes it."""
        del argument
        if event != "call" or not self.recording:
            return
        name = frame.f_code.co_filename
        if name not in self._known:
            self._known[name] = _relative(name)
        found = self._known[name]
        if found is not None and found not in self.files and not _runs_at_import(frame):
            self.files.add(found)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record what runs within."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def lines(self) -> int:
        """How many lines the recorded files have together."""
        return sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in self.files)


@contextmanager
def recorder() -> Iterator[Recorder]:
    """Install a recorder in this thread and in those that start within. It records only in `Recorder.record`."""
    one = Recorder()
    before, before_of_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(one)
    threading.setprofile(one)
    try:
        yield one
    finally:
        threading.setprofile(before_of_threads)
        sys.setprofile(before)


def documented(path: str) -> tuple[set[str], int]:
    """The files that the page lists for a path, relative to the repository, and their greatest allowed number.

    The list follows the line `<!-- path: NAME, at most N, below FOLDER -->`. Each item begins with a file in backticks,
    below that folder, or below one of `PACKAGES` if there is no such file below the folder.
    """
    section = re.search(
        rf"<!-- path: {path}, at most (\d+), below (\S+) -->\n\n((?:\d+\. .+\n(?:   .+\n)*)+)",
        PAGE.read_text(encoding="utf-8"),
    )
    assert section is not None, f"{PAGE.name} has no path {path}"
    names = re.findall(r"^\d+\. `([^`]+)`", section[3], re.MULTILINE)
    assert len(set(names)) == len(names), f"{PAGE.name} lists a file of {path} twice"
    folder = ROOT / section[2]
    files = {str((folder / name if (folder / name).is_file() else ROOT / name).relative_to(ROOT)) for name in names}
    return files, int(section[1])


def compare(path: str, executed: set[str]) -> None:
    """Fail unless the page lists just the executed files of a path, and no more than its limit."""
    listed, limit = documented(path)
    missing, surplus = sorted(executed - listed), sorted(listed - executed)
    assert (missing, surplus) == ([], []), f"executed, but not in the list: {missing}; the reverse: {surplus}"
    assert len(executed) <= limit


def _runs_at_import(frame: FrameType) -> bool:
    """Whether a frame is the body of a module or of a class, or is called by one: also of modules that are imported
    when they are used."""
    caller: FrameType | None = frame
    while caller is not None:
        is_body = not caller.f_code.co_flags & inspect.CO_OPTIMIZED
        if is_body and caller.f_globals.get("__name__") != "__main__" and _relative(caller.f_code.co_filename):
            return True
        caller = caller.f_back
    return False


def _relative(name: str) -> str | None:
    path = Path(name)
    if not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return str(relative) if relative.parts[0] in PACKAGES else None
