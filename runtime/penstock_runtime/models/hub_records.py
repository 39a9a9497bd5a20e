"""Which snapshots of the hub were fetched whole, and what a branch meant last.

huggingface_hub keeps no record of the former and would hand out half a snapshot offline; the latter it only writes
when it picks the files itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4


@dataclass(frozen=True)
class Records:
    """The records of one repository (and one choice of files)."""

    folder: Path

    def remember(self, commit: str, snapshot: Path, names: Iterable[str]) -> None:
        """Note that the snapshot has these files, whole."""
        sizes = {name: (snapshot / name).stat().st_size for name in names}
        self._write(f"{commit}.json", json.dumps({"folder": str(snapshot), "sizes": sizes}))

    def whole(self, commit: str | None) -> Path | None:
        """The folder of a snapshot that was fetched whole and still is."""
        try:
            content = json.loads((self.folder / f"{commit}.json").read_text(encoding="utf-8"))
            snapshot = Path(content["folder"])
            whole = all((snapshot / name).stat().st_size == size for name, size in content["sizes"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return snapshot if whole else None

    def point(self, revision: str, commit: str) -> None:
        """Note which commit a branch or tag means now."""
        self._write(f"{quote(revision, safe='')}.commit", commit)

    def commit_of(self, revision: str) -> str | None:
        """The commit that the branch or tag meant last; the commit itself for one."""
        try:
            return (self.folder / f"{quote(revision, safe='')}.commit").read_text(encoding="utf-8")
        except OSError:
            return None

    def _write(self, name: str, text: str) -> None:
        with suppress(OSError):
            if (self.folder / name).read_text(encoding="utf-8") == text:
                return  # nothing new: a folder that was filled elsewhere may be mounted read-only
        self.folder.mkdir(parents=True, exist_ok=True)
        # Not by the process's id: in containers that share the folder that is 1 everywhere.
        unfinished = self.folder / f"{name}.{uuid4().hex}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.folder / name)
