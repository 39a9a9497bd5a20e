"""One artefact from a store into a cache on this machine, and nobody ever sees half of it.

<cache>/<digest>/             whole and verified
<cache>/<digest>.partial/     being fetched, or left by a fetch that broke off: the next one goes on from there
<cache>/<digest>.lock         held while fetching: pods that share a cache fetch once
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.artefact_store import Digest
from penstock.errors import ArtefactError, ArtefactNotFound, HostError, OutOfDisk, PenstockError, StoreUnavailable
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock_runtime.host.disk import FULL
from penstock_runtime.models.progress import OnProgress, Progress
from penstock_runtime.store.backend import Place
from penstock_runtime.store.object_storage import alone
from penstock_runtime.store.verify import fault, file_digest

CHUNK_BYTES = 16 * 2**20
"""Read at once: what is lost at most when a connection breaks, and held in memory."""
LARGEST_MANIFEST = 64 * 2**20


@dataclass(frozen=True)
class Fetch:
    """One fetch."""

    place: Place
    digest: Digest
    cache: Path
    report: OnProgress

    @property
    def uri(self) -> str:
        """What is fetched."""
        return self.place.uri.of(self.digest)

    def run(self) -> Path:
        """Fetch, verify, and return the folder; errors as `ArtefactStore.fetch`."""
        folder = self.cache / self.digest.hexadecimal
        with self._cache_errors():
            self.cache.mkdir(parents=True, exist_ok=True)
            with alone(folder.with_suffix(".lock"), waiting=self._wait):
                if folder.is_dir():
                    wrong = fault(folder, self.digest)
                    if not wrong:
                        return folder
                    self._note(f"the copy in the cache is damaged ({wrong}): fetching it again")
                    shutil.rmtree(folder)
                partial = folder.with_suffix(".partial")
                if partial.is_symlink():
                    partial.unlink()
                partial.mkdir(exist_ok=True)
                _remove_strangers(partial)
                self._fill(partial)
                partial.rename(folder)
        return folder

    def _fill(self, partial: Path) -> None:
        sizes = self.place.sizes(self.digest)
        manifest = self._manifest(partial, sizes)
        _remove_strangers(partial, {MANIFEST_NAME, *manifest.files})
        missing = [name for name in manifest.files if name not in sizes]
        if missing:
            raise ArtefactError(
                f"{self.uri} is incomplete: {missing[0]} is missing"
                + (f", and {len(missing) - 1} more" if missing[1:] else ""),
                remedy="Somebody deleted from it: delete the OptimizedModel, so that it is made and published again",
            )
        total, done = sum(sizes[name] for name in manifest.files), 0
        for name, expected in manifest.files.items():
            self._file(partial / name, name, sizes[name], expected, done=done, total=total)
            done += sizes[name]
        self.report(Progress(self.uri, MANIFEST_NAME, done, total))

    def _manifest(self, partial: Path, sizes: Mapping[str, int]) -> Manifest:
        """Read first: it tells what to fetch. Its own digest is what was asked for, so it can be trusted."""
        if MANIFEST_NAME not in sizes:
            what = "has no manifest: it is being published, or was given up" if sizes else "is not in the store"
            raise ArtefactNotFound(
                f"the artefact {self.digest} {what} ({self.place.uri})",
                remedy="Check PENSTOCK_STORE_URI; a deleted artefact is made again when its OptimizedModel is deleted",
            )
        size = sizes[MANIFEST_NAME]
        content = b"" if size > LARGEST_MANIFEST else self.place.read(self.digest, MANIFEST_NAME, 0, max(size, 1))
        found = Digest.of(content)
        if found != self.digest:
            raise ArtefactError(
                f"{self.uri}/{MANIFEST_NAME} is not the one that was published "
                f"(sha256 {found.short}…, expected {self.digest.short}…; {size:,} bytes)",
                remedy="The store is damaged: delete the OptimizedModel, so that it is made and published again",
            )
        (partial / MANIFEST_NAME).write_bytes(content)
        return Manifest.load(partial)

    def _file(self, target: Path, name: str, size: int, expected: str, *, done: int, total: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        while True:
            resumed = self._append(target, name, size, done=done, total=total)
            found = file_digest(target)
            if found == expected:
                return
            target.unlink()
            # What an earlier fetch left may be what is wrong. What was just read whole is not better the next time.
            if not resumed:
                raise ArtefactError(
                    f"{self.uri}/{name} is not the file that was published "
                    f"(sha256 {found[:12]}…, expected {expected[:12]}…; {size:,} bytes)",
                    remedy="The store is damaged: delete the OptimizedModel, so that it is made and published again",
                )

    def _append(self, target: Path, name: str, size: int, *, done: int, total: int) -> bool:
        """Fetch what is missing of a file; True when a part was there already."""
        with target.open("ab") as file:
            position = file.tell()
            if position > size:
                file.truncate(position := 0)
            resumed = position > 0
            while position < size:
                self.report(Progress(self.uri, name, done + position, total))
                chunk = self.place.read(self.digest, name, position, min(position + CHUNK_BYTES, size))
                if not chunk:
                    raise StoreUnavailable(f"{self.uri}/{name} ends before its size", remedy="Try again later")
                file.write(chunk)
                position += len(chunk)
        return resumed

    def _wait(self) -> None:
        self._note("another process is fetching it into the same cache: waiting for it")

    def _note(self, note: str) -> None:
        self.report(Progress(self.uri, "", 0, 0, note))

    @contextmanager
    def _cache_errors(self) -> Iterator[None]:
        """What the store does is told by the place; what is left is the cache's."""
        try:
            yield
        except PenstockError:
            raise
        except OSError as error:
            if error.errno in FULL:
                raise OutOfDisk(
                    f"no space is left in the cache {self.cache} for {self.uri}",
                    remedy="Give the cache's volume more room (an emptyDir's sizeLimit, the node's disk)",
                ) from error
            raise HostError(
                f"the cache {self.cache} cannot be used ({error.strerror or error})",
                remedy="Set PENSTOCK_CACHE to a folder that this user may write",
            ) from error


def _remove_strangers(folder: Path, names: Collection[str] | None = None) -> None:
    """Delete from a folder all but regular files, and with `names` all but these: what is fetched would be written
    through a link to wherever it leads, and what nobody asked for would be read with the rest."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in files):
            known = names is None or path.relative_to(folder).as_posix() in names
            if not known or not stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
        for path in (Path(parent, name) for name in folders):
            if path.is_symlink():
                path.unlink()
            elif not any(path.iterdir()):  # made again where it is needed; a file may have to stand there
                path.rmdir()
