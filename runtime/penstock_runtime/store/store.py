"""The store as the optimiser and the runtime see it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock.artefact_store import Digest, StoreScheme, StoreUri
from penstock.errors import ArtefactError
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock_runtime.models.progress import OnProgress, Progress, ignore
from penstock_runtime.store.backend import Place, Stored
from penstock_runtime.store.fetch import Fetch
from penstock_runtime.store.objects import Objects
from penstock_runtime.store.retries import DEFAULT_RETRIES, Retries
from penstock_runtime.store.verify import digest_of, fault
from penstock_runtime.store.volume import Volume

REPORT_NAME = "report.html"


@dataclass(frozen=True)
class Published:
    """An artefact in the store."""

    digest: Digest
    uri: str
    bytes: int
    """Of all its files."""
    found: bool = False
    """True: it was there already."""


@dataclass(frozen=True)
class ArtefactStore:
    """Artefacts by digest. Every method raises StoreError (address, settings), StoreAccessDenied and, after the
    retries, StoreUnavailable."""

    place: Place

    @property
    def uri(self) -> StoreUri:
        """Where it is."""
        return self.place.uri

    def publish(self, folder: Path, on_progress: OnProgress = ignore) -> Published:
        """Put an artefact folder into the store, or find that it is there.

        Whoever looks finds all of it or nothing, and several may publish the same at once. A copy in the store that
        lacks a file or has one of another size is mended.
        ArtefactError: the folder is not a whole artefact. OutOfDisk: the store is a volume, and full.
        """
        digest = digest_of(folder)
        wrong = fault(folder, digest)
        if wrong:
            raise ArtefactError(f"{folder} cannot be published: {wrong}", remedy="Make the artefact again")
        report = [REPORT_NAME] if (folder / REPORT_NAME).is_file() else []
        names = [*Manifest.load(folder).files, *report, MANIFEST_NAME]
        sizes = {name: (folder / name).stat().st_size for name in names}
        published = Published(digest, self.uri.of(digest), sum(sizes.values()))
        # Touched, so that a collector, who may be at work just now, leaves it to whoever is about to refer to it.
        if self.place.holds(digest, sizes) and self.place.touch(digest):
            return Published(published.digest, published.uri, published.bytes, found=True)
        done = 0

        def sent(name: str) -> None:
            nonlocal done
            done += sizes[name]
            on_progress(Progress(published.uri, name, done, published.bytes))

        self.place.publish(digest, folder, names, sent)
        return published

    def fetch(self, digest: Digest, cache: Path, on_progress: OnProgress = ignore) -> Path:
        """The folder of an artefact below `cache`, verified: the manifest by the digest, each file by the manifest.

        Fetches what the cache lacks; several processes may share one. The report is for people and stays behind.
        ArtefactNotFound, ArtefactError (incomplete or altered in the store), OutOfDisk, HostError (the cache).
        """
        return Fetch(self.place, digest, cache, on_progress).run()

    def entries(self) -> tuple[Stored, ...]:
        """All that is in the store, by digest."""
        return tuple(sorted(self.place.entries(), key=lambda stored: (stored.digest, stored.name)))

    def delete(self, digest: Digest) -> bool:
        """Delete an artefact; False when there was none."""
        found = [stored for stored in self.place.entries() if stored.name == digest.hexadecimal]
        for stored in found:
            self.place.delete(stored)
        return bool(found)

    def collect(
        self, keep: Container[Digest], *, older_than_seconds: float, now: datetime | None = None
    ) -> tuple[Stored, ...]:
        """Delete what is not in `keep` and older than this, drafts of publishers that gave up included; what it was.

        The age protects what has just been published and is not in anybody's list yet. What is published again while
        this runs stays.
        """
        limit = (now or datetime.now(UTC)) - timedelta(seconds=older_than_seconds)
        old = [
            stored
            for stored in self.entries()
            if stored.modified < limit and not (stored.complete and stored.digest in keep)
        ]
        return tuple(stored for stored in old if self.place.delete(stored))


def open_store(uri: StoreUri, *, retries: Retries = DEFAULT_RETRIES) -> ArtefactStore:
    """The store of a URI. MissingPackage: its scheme needs one that is not installed; StoreError as `ArtefactStore`."""
    place: Place = Volume(uri) if uri.scheme is StoreScheme.FILE else Objects.open(uri, retries)
    return ArtefactStore(place)
