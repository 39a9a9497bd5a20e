"""The interface of a store backend: a few simple operations that every kind of store can implement correctly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from penstock.artefact_store import Digest, StoreUri

OnFileWritten = Callable[[str], None]
"""Called with the name of each file that has been written."""


@dataclass(frozen=True)
class Stored:
    """An artefact, or a part of one, in the store."""

    digest: Digest
    bytes: int
    modified: datetime
    """Time of its newest file, UTC."""
    complete: bool
    """False: its manifest is missing. It is being published, or its publisher was aborted."""
    name: str
    """The folder in the store: the digest, or a longer name for a draft in a volume."""


class StoreBackend(Protocol):
    """A kind of store. Methods raise StoreError, StoreAccessDenied, StoreUnavailable; names are relative with `/`."""

    @property
    def uri(self) -> StoreUri:
        """The address of the store."""
        ...

    def namespaces(self) -> Sequence[str]:
        """The namespaces that have a store within this one."""
        ...

    def of_namespace(self, namespace: str) -> StoreBackend:
        """The store of a namespace within this one."""
        ...

    def holds(self, digest: Digest, sizes: Mapping[str, int]) -> bool:
        """True if there is a complete copy, as far as known without fetching it; `sizes`: bytes of its files."""
        ...

    def sizes(self, digest: Digest) -> Mapping[str, int]:
        """The files of an artefact and their bytes; empty if there are none."""
        ...

    def read(self, digest: Digest, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end`, or fewer; empty at the end of the file. ArtefactNotFound."""
        ...

    def publish(self, digest: Digest, folder: Path, names: Sequence[str], sent: OnFileWritten) -> None:
        """Write these files of a folder in their order: the manifest is the last one. Called only if the store has no
        complete copy; another process may be publishing the same artefact."""
        ...

    def touch(self, digest: Digest) -> bool:
        """Reset the age of a complete copy, which protects it from deletion by age; False: it is gone."""
        ...

    def entries(self) -> Iterator[Stored]:
        """All artefacts and parts of artefacts."""
        ...

    def delete(self, stored: Stored) -> bool:
        """Delete it, the manifest first, so that no reader takes a part for complete. No error if it is already gone.

        False: it was published again since `stored.modified`, and is kept.
        """
        ...
