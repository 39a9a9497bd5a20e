"""The artefact store: publish, fetch, list, delete and collect artefacts."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock.artefact_store import ALGORITHM, DIGITS_KEPT, NAMESPACE_PATTERN, Digest, StoreScheme, StoreUri
from penstock.errors import ArtefactError, ArtefactNotFound, SettingError
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock_runtime.models.sources.transfer import FetchProgress, OnProgress, ignore_progress
from penstock_runtime.remote import DEFAULT_RETRIES, Retries
from penstock_runtime.store.base import StoreBackend, Stored
from penstock_runtime.store.fetch import ArtefactFetch, digest_of, fault
from penstock_runtime.store.object_store import ObjectStore
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
    """True: it was in the store before."""


@dataclass(frozen=True)
class ArtefactStore:
    """Artefacts by digest. All methods raise StoreError (address, settings), StoreAccessDenied and, after the retries,
    StoreUnavailable."""

    backend: StoreBackend

    @property
    def uri(self) -> StoreUri:
        """The address of the store."""
        return self.backend.uri

    def publish(self, folder: Path, on_progress: OnProgress = ignore_progress) -> Published:
        """Publish an artefact folder, unless the store has it.

        Atomic for readers, and safe if several processes publish the same artefact. An incomplete copy in the store is
        repaired.
        ArtefactError: the folder is not a complete artefact. OutOfDisk: the store is a volume, and full.
        """
        digest = digest_of(folder)
        wrong = fault(folder, digest)
        if wrong:
            raise ArtefactError(f"{folder} cannot be published: {wrong}", remedy="Make the artefact again")
        report = [REPORT_NAME] if (folder / REPORT_NAME).is_file() else []
        names = [*Manifest.load(folder).files, *report, MANIFEST_NAME]
        sizes = {name: (folder / name).stat().st_size for name in names}
        published = Published(digest, self.uri.of(digest), sum(sizes.values()))
        # Reset its age, so that a concurrent `collect` keeps it until it is referenced.
        if self.backend.holds(digest, sizes) and self.backend.touch(digest):
            return Published(published.digest, published.uri, published.bytes, found=True)
        done = 0

        def sent(name: str) -> None:
            nonlocal done
            done += sizes[name]
            on_progress(FetchProgress(published.uri, name, done, published.bytes))

        self.backend.publish(digest, folder, names, sent)
        return published

    def fetch(self, digest: Digest, cache: Path, on_progress: OnProgress = ignore_progress) -> Path:
        """The folder of an artefact below `cache`, verified: the manifest by the digest, each file by the manifest.

        Fetches only what the cache lacks; several processes may share a cache. The report is not fetched.
        ArtefactNotFound, ArtefactError (incomplete or altered in the store), OutOfDisk, HostError (the cache).
        """
        return ArtefactFetch(self.backend, digest, cache, on_progress).run()

    def stores(self) -> Iterator[tuple[str, ArtefactStore]]:
        """This store under an empty name, and the store of each namespace within it."""
        yield "", self
        for namespace in self.backend.namespaces():
            yield namespace, self.of_namespace(namespace)

    def entries(self) -> tuple[Stored, ...]:
        """All artefacts and parts of artefacts in the store, by digest, without those in stores of namespaces."""
        return tuple(sorted(self.backend.entries(), key=lambda stored: (stored.digest, stored.name)))

    def copy(self, digest: Digest, target: ArtefactStore) -> Published:
        """Copy an artefact with its report into another store, verified on the way; errors as `fetch` and `publish`.

        It is on this machine's disk meanwhile (TMPDIR).
        """
        with tempfile.TemporaryDirectory(prefix="penstock-copy-") as work:
            folder = self.fetch(digest, Path(work))
            with suppress(ArtefactNotFound):
                (folder / REPORT_NAME).write_bytes(self.report(digest))
            return target.publish(folder)

    def report(self, digest: Digest) -> bytes:
        """The report of an artefact, HTML; ArtefactNotFound if the store has none."""
        size = self.backend.sizes(digest).get(REPORT_NAME)
        if size is None:
            raise ArtefactNotFound(
                f"the store {self.uri} has no report of {digest}", remedy="Check the digest and PENSTOCK_STORE_URI"
            )
        return self.backend.read(digest, REPORT_NAME, 0, max(size, 1))

    def of_namespace(self, namespace: str) -> ArtefactStore:
        """The store of a namespace within this one; this one for an empty name."""
        return ArtefactStore(self.backend.of_namespace(namespace)) if namespace else self

    def delete(self, digest: Digest) -> bool:
        """Delete an artefact; False if there was none."""
        found = [stored for stored in self.backend.entries() if stored.name == digest.hexadecimal]
        for stored in found:
            self.backend.delete(stored)
        return bool(found)

    def collect(
        self, keep: Container[Digest], *, older_than_seconds: float, now: datetime | None = None
    ) -> tuple[Stored, ...]:
        """Delete artefacts that are not in `keep` and are older than this, also abandoned drafts; returns them.

        The age protects artefacts that were just published and are not referenced yet. An artefact that is published
        again during the call is kept.
        """
        limit = (now or datetime.now(UTC)) - timedelta(seconds=older_than_seconds)
        old = [
            stored
            for stored in self.entries()
            if stored.modified < limit and not (stored.complete and stored.digest in keep)
        ]
        return tuple(stored for stored in old if self.backend.delete(stored))


def open_store(uri: StoreUri, *, retries: Retries = DEFAULT_RETRIES) -> ArtefactStore:
    """The store of a URI. MissingPackage if the package of its scheme is not installed; errors as `ArtefactStore`."""
    backend: StoreBackend = Volume(uri) if uri.scheme is StoreScheme.FILE else ObjectStore.open(uri, retries)
    return ArtefactStore(backend)


_FORM = re.compile(
    rf"(?:({NAMESPACE_PATTERN})/)?(?:{ALGORITHM}:)?([0-9a-f]{{{DIGITS_KEPT}}})[0-9a-f]{{0,{64 - DIGITS_KEPT}}}"
)


@dataclass(frozen=True)
class KeptDigests:
    """Digests that must not be deleted from a store, by their first digits."""

    beginnings: frozenset[str] = frozenset()

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, Digest) and digest.hexadecimal[:DIGITS_KEPT] in self.beginnings


@dataclass(frozen=True)
class KeepList:
    """Digests that must not be deleted, with the namespaces that refer to them."""

    beginnings: frozenset[tuple[str, str]] = frozenset()
    """Namespace and first digits. Without a namespace the digest is kept in all stores; with one, in the store of that
    namespace and in the whole store, which has artefacts of all namespaces."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> KeepList:
        """From complete or shortened digests, or `NAMESPACE/DIGEST`. ValueError if one is invalid or too short."""
        found = {text: _FORM.fullmatch(text) for text in texts}
        wrong = next((text for text, match in found.items() if match is None), None)
        if wrong is not None:
            raise ValueError(f"{wrong[:100]!r} is no digest with {DIGITS_KEPT} digits or more")
        return cls(frozenset((match[1] or "", match[2]) for match in found.values() if match is not None))

    @classmethod
    def parse(cls, arguments: Iterable[str]) -> KeepList:
        """From the values of `--keep`, which are `DIGEST,DIGEST...` or `NAMESPACE/DIGEST,DIGEST...`.

        SettingError if one is invalid; then nothing may be deleted.
        """
        try:
            return cls.of(
                f"{namespace}{slash}{digest}"
                for text in arguments
                for namespace, slash, digests in [text.rpartition("/")]
                for digest in digests.split(",")
            )
        except ValueError as error:
            raise SettingError(
                f"--keep: {error}", field="--keep", remedy="Write sha256:..., or at least the first 16 digits"
            ) from error

    @classmethod
    def read(cls, path: Path | None) -> KeepList:
        """From a file with `{"keep": [...]}`; None: nothing is kept.

        SettingError if it cannot be read; then nothing may be deleted.
        """
        if path is None:
            return cls()
        try:
            return cls.of(map(str, json.loads(path.read_text(encoding="utf-8"))["keep"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SettingError(
                f"--keep-file {path} does not say what to keep ({type(error).__name__}: {error})",
                field="--keep-file",
                remedy='Write {"keep": ["sha256:..."]}',
            ) from error

    def __or__(self, other: KeepList) -> KeepList:
        return KeepList(self.beginnings | other.beginnings)

    def in_store(self, namespace: str) -> KeptDigests:
        """The artefacts to keep in the store of a namespace; empty: in the whole store, outside namespaces."""
        return KeptDigests(
            frozenset(digits for of, digits in self.beginnings if of in {"", namespace} or not namespace)
        )
