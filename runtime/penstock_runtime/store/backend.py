"""What a kind of store has to be able to do: few things, so that each is easily right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from penstock.artefact_store import Digest, StoreUri

Sent = Callable[[str], None]
"""Told the name of each file that has been written."""


@dataclass(frozen=True)
class Stored:
    """Something in the store."""

    digest: Digest
    bytes: int
    modified: datetime
    """Of its newest file, UTC."""
    complete: bool
    """False: its manifest is missing. It is being published, or whoever published it gave up."""
    name: str
    """The folder in the store: the digest, or for a draft in a volume something longer."""


class Place(Protocol):
    """A kind of store. All raise StoreError, StoreAccessDenied, StoreUnavailable; names are relative with `/`."""

    @property
    def uri(self) -> StoreUri:
        """Where it is."""
        ...

    def holds(self, digest: Digest, sizes: Mapping[str, int]) -> bool:
        """True when there is a whole copy, as far as can be told without fetching it; `sizes`: bytes of its files."""
        ...

    def sizes(self, digest: Digest) -> Mapping[str, int]:
        """The files of an artefact and their bytes; empty when there is nothing of it."""
        ...

    def read(self, digest: Digest, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`, or fewer; none at the end of the file. ArtefactNotFound."""
        ...

    def publish(self, digest: Digest, folder: Path, names: Sequence[str], sent: Sent) -> None:
        """Write these files of a folder, the last one (the manifest) after all others. Only called when the store has
        no whole copy; somebody else may be doing the same."""
        ...

    def touch(self, digest: Digest) -> bool:
        """Make a whole copy count as published now, for whoever deletes by age; False: it is gone."""
        ...

    def entries(self) -> Iterator[Stored]:
        """All that looks like an artefact or a part of one."""
        ...

    def delete(self, stored: Stored) -> bool:
        """Delete, the manifest first: nobody finds half of it whole. What is gone already is no error.

        False: it was published again since `stored.modified`, and stays.
        """
        ...
