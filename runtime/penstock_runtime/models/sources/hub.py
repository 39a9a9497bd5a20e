"""`hf://` model sources: downloads through huggingface_hub and its cache.

huggingface_hub downloads, resumes and lays out its cache. This module chooses the files, retries temporary errors, maps
the library's errors to Penstock's, and checks that a cached copy is complete. Works with versions from 0.30 up to 2.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

from penstock.errors import (
    CorruptModel,
    HostError,
    MissingPackage,
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    PenstockError,
)
from penstock.resources.core import ModelSource
from penstock_runtime.host.disk import FULL
from penstock_runtime.models.files import check_code, own_graph, read_object, remote_code_classes
from penstock_runtime.models.sources.transfer import (
    OPTION,
    FetchProgress,
    OnConfig,
    OnProgress,
    check_size,
    choose_files,
    ignore_config,
    max_model_bytes,
    more_than_listed,
    translate_folder_errors,
)
from penstock_runtime.remote import Retries

T = TypeVar("T")

COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT_SECONDS = 15.0
"""Until the first byte of a response. HF_HUB_DOWNLOAD_TIMEOUT limits how long a download may stall (10 s)."""
_LIBRARIES = {"huggingface_hub", "requests", "urllib3", "httpx", "httpcore", "httpx2", "httpcore2"}
"""huggingface_hub, and the HTTP libraries that its versions 0, 1 and 2 use."""
_LOCAL = FULL | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
"""Errors of local folders. Networks cause them too (a packet filter: EPERM), but wrapped in errors of the libraries."""


@dataclass(frozen=True)
class _Listing:
    commit: str
    sizes: Mapping[str, int]
    """Bytes by file name; 0 if the hub does not report the size."""


@dataclass(frozen=True)
class HubFetch:
    """One fetch of one repository."""

    source: ModelSource
    cache: Path
    """Penstock's cache. HF_HUB_CACHE and HF_HOME, if set, choose another folder for the hub's own files."""
    token: str | None
    """None: HF_TOKEN, or the token that `hf auth login` has stored."""
    graph: bool
    retries: Retries
    report: OnProgress
    check: OnConfig = ignore_config

    def run(self) -> Path:
        """Fetch and return the snapshot's folder, or the one file that the source names. Without a connection to the
        hub a complete cached copy is used.

        HostError if a local folder cannot be written: it is not retried.
        """
        with translate_folder_errors(self.cache):
            return self._run() / self.source.file

    def _run(self) -> Path:
        revision = self.source.revision or "main"
        pinned = self._records.whole(revision) if COMMIT.fullmatch(revision) else None
        if pinned is not None:
            return pinned
        self._require_readable_token()
        # With HF_HUB_OFFLINE another attempt changes nothing.
        retries = replace(self.retries, attempts=1) if _hub().constants.HF_HUB_OFFLINE else self.retries
        try:
            listing = retries.run(lambda: self._translate(lambda: self._list(revision)))
        except ModelUnavailable as error:
            cached = self._records.whole(self._records.commit_of(revision))
            if cached is None:
                raise
            note = f"{error.message}: using the cached revision {cached.name[:12]}"
            self.report(FetchProgress(str(self.source), "", 0, 0, note))
            return cached
        folder = self._download(listing)
        self._records.point(revision, listing.commit)
        return folder

    def commit(self) -> str | None:
        """The commit that the source's branch or tag had at the last fetch; the source's own, if it names one."""
        revision = self.source.revision or "main"
        return revision if COMMIT.fullmatch(revision) else self._records.commit_of(revision)

    def _list(self, revision: str) -> _Listing:
        api = _hub().HfApi(endpoint=_endpoint(), token=self.token)
        info = api.model_info(self.source.repository, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return _Listing(commit=info.sha, sizes=sizes)

    def _download(self, listing: _Listing) -> Path:
        names = self._names(listing)
        folder: Path | None = None
        if "config.json" in names:
            # First, because it shows whether the model needs its own code, before gigabytes are downloaded.
            folder = self._file(listing, "config.json").parent
            config = read_object(folder, "config.json")
            check_code(str(self.source), config, has_graph=own_graph(listing.sizes) is not None)
            self.check(config)
            if remote_code_classes(config):
                names = choose_files(str(self.source), listing.sizes, graph=True)
        total, done = sum(listing.sizes[name] for name in names), 0
        check_size(str(self.source), total)
        for name in names:
            self.report(FetchProgress(str(self.source), name, done, total))

            def report_size(size: int, name: str = name, done: int = done) -> None:
                arrived = min(size, listing.sizes[name])
                self.report(FetchProgress(str(self.source), name, done + arrived, total))

            with report_growth(self._blobs, report_size):
                path = self._file(listing, name)
            folder = folder or path.parents[name.count("/")]
            done += path.stat().st_size
            check_size(str(self.source), done)
        if folder is None:
            raise CorruptModel(f"{self.source} has no config.json", remedy="Check the name of the repository")
        self.report(FetchProgress(str(self.source), names[-1], done, total))
        self._records.remember(listing.commit, folder, names)
        return folder

    def _names(self, listing: _Listing) -> list[str]:
        """The files to fetch, settings first. ModelNotFound if the source names another one."""
        file = self.source.file
        if not file:
            return choose_files(str(self.source), listing.sizes, graph=self.graph)
        if file not in listing.sizes:
            others = sorted(name for name in listing.sizes if name.endswith(".gguf"))
            raise ModelNotFound(
                f"{self.source}: the repository has no file {file}",
                remedy=f"It has {', '.join(others[:10])}"
                if others
                else "It has no GGUF file: name the repository alone",
            )
        return [file]

    def _file(self, listing: _Listing, name: str) -> Path:
        size = listing.sizes[name]

        def download(*, force: bool = False) -> Path:
            with _largest_file(str(self.source), name, size):
                found = _hub().hf_hub_download(
                    self.source.repository,
                    name,
                    revision=listing.commit,
                    cache_dir=str(self._hub_place[0]),
                    token=self.token,
                    endpoint=_endpoint(),
                    etag_timeout=TIMEOUT_SECONDS,
                    force_download=force,
                )
            return Path(found)

        path = self.retries.run(lambda: self._translate(download))
        if size in {0, path.stat().st_size}:
            return path
        # The library uses any file of that name in its cache, without checking it.
        note = f"the copy of {name} in {path.parent} is damaged: fetching it again"
        self.report(FetchProgress(str(self.source), "", 0, 0, note))
        path = self.retries.run(lambda: self._translate(lambda: download(force=True)))
        if path.stat().st_size != size:
            raise more_than_listed(str(self.source), name, size)
        return path

    def _require_readable_token(self) -> None:
        """HostError if the library cannot look for a token: otherwise every call would fail with a bare OSError."""
        if self.token is not None:
            return
        try:
            _hub().get_token()
        except OSError as error:
            raise HostError(
                f"{self.source}: {error.filename}, where the hub's tools keep a token, cannot be read "
                f"({error.strerror})",
                remedy="Set HF_HOME to a folder that this process may use, or HF_TOKEN to a token",
            ) from error

    @property
    def _hub_place(self) -> tuple[Path, str]:
        """The folder of the hub's own files, and the setting that chooses it."""
        if "HF_HUB_CACHE" in os.environ:
            return Path(os.environ["HF_HUB_CACHE"]), "HF_HUB_CACHE"
        if "HF_HOME" in os.environ:
            return Path(os.environ["HF_HOME"]) / "hub", "HF_HUB_CACHE or HF_HOME"
        return self.cache / "hub", OPTION

    @property
    def _blobs(self) -> Path:
        """The folder in which the library stores files during the download."""
        return self._hub_place[0] / f"models--{self.source.repository.replace('/', '--')}" / "blobs"

    @property
    def _records(self) -> SnapshotRecords:
        name = self.source.repository.replace("/", "--") + ("--graph" if self.graph else "")
        # A file's records are in a folder below the records of the whole repository.
        return SnapshotRecords(self.cache / "hub-complete" / name / self.source.file.replace("/", "--"))

    def _translate(self, action: Callable[[], T]) -> T:
        """Run an action of the library and map its errors to ours; unknown errors pass unchanged."""
        try:
            with _HiddenProgressBars():
                return action()
        except PenstockError:
            raise
        except Exception as error:  # the library raises requests', httpx's and its own errors
            if is_local(error):
                folder, option = self._hub_place
                with translate_folder_errors(self.cache if option == OPTION else folder, option=option):
                    raise
            has_token = self.token is not None or _hub().get_token() is not None
            known = hub_error(error, self.source, has_token=has_token)
            if known is None:
                raise
            raise known from error


def hub_error(error: Exception, source: ModelSource, *, has_token: bool) -> PenstockError | None:
    """The error of Penstock for an error of huggingface_hub or its HTTP library; None for other errors."""
    if is_local(error):
        return None
    errors = _hub().errors
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return ModelNotFound(f"{source}: {error}", remedy="Write hf://organisation/name@revision")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ModelUnavailable(
            f"{source} is not in the cache, and HF_HUB_OFFLINE is set",
            remedy="Unset it, or fill the cache first",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{source}: the repository has no such revision", remedy="Check the part after the @")
    if isinstance(error, errors.GatedRepoError):
        return ModelAccessDenied(
            f"{source} is gated",
            remedy="Accept its conditions on the model's page, and give a token of that account (HF_TOKEN, or "
            "spec.modelCredentials on a cluster)",
        )
    if status in {401, 403} or isinstance(error, errors.DisabledRepoError):
        return _denied(source, has_token=has_token)
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFound(
            f"{source}: there is no such repository",
            remedy="Check the name; a private one needs a token (HF_TOKEN, or spec.modelCredentials on a cluster)",
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return CorruptModel(f"{source}: a file that the hub listed is not there", remedy="Try again, or pin a commit")
    if isinstance(status, int) and status not in {408, 429} and status < 500:
        return ModelError(f"{source}: the hub answered with HTTP {status}", remedy="Check HF_ENDPOINT and the name")
    package = type(error).__module__.partition(".")[0]
    if isinstance(error, OSError) or package in _LIBRARIES:
        what = f"HTTP {status}" if status is not None else _last_line(error)
        return ModelUnavailable(
            f"{source}: the hub at {_endpoint() or 'huggingface.co'} does not deliver ({what})",
            remedy="Try again later; without a connection set HF_ENDPOINT to a mirror, or use a file:// source",
            retry_after_seconds=_retry_after(response),
        )
    return None


def is_local(error: Exception) -> bool:
    """True for an error of the operating system about a local file or folder, without part of the hub."""
    if not isinstance(error, OSError) or type(error).__module__ != "builtins":
        return False
    return error.filename is not None or error.errno in _LOCAL


@contextmanager
def _largest_file(origin: str, name: str, size: int) -> Iterator[None]:
    """While the block runs, no file of this process grows far beyond `size` bytes; 0: the hub does not report it.

    huggingface_hub writes whatever arrives, and cannot be interrupted by another thread. The kernel's limit can; below
    1 GiB it would apply to logs too.
    """
    allowed = max(size, _LEAST_FILE) if size else max_model_bytes()
    with _FILE_SIZE:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        lower = allowed if soft == resource.RLIM_INFINITY else min(soft, allowed)
        resource.setrlimit(resource.RLIMIT_FSIZE, (lower, hard))
        try:
            yield
        except OSError as error:
            if error.errno == errno.EFBIG and lower == allowed:
                raise more_than_listed(origin, name, allowed) from error
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


_FILE_SIZE = threading.Lock()
"""The limit is of the process."""
_LEAST_FILE = 2**30


def _denied(source: ModelSource, *, has_token: bool) -> ModelAccessDenied:
    if has_token:
        return ModelAccessDenied(
            f"{source}: the hub refuses the token",
            remedy="Give a token that may read this repository (HF_TOKEN, or spec.modelCredentials on a cluster)",
        )
    return ModelAccessDenied(
        f"{source}: the hub wants a token, or there is no such repository",
        remedy="Check the name; for a private or gated one set HF_TOKEN (spec.modelCredentials on a cluster)",
    )


def _retry_after(response: Any) -> float | None:
    value = getattr(response, "headers", {}).get("Retry-After", "")
    return float(value) if re.fullmatch(r"[0-9]{1,6}", value) else None


def _last_line(error: Exception) -> str:
    """The last line of the deepest cause: the library wraps a refused connection in advice about internet access."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]


def _endpoint() -> str | None:
    """The current HF_ENDPOINT; the library itself reads it once on import."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


class _HiddenProgressBars:
    """Disables the library's progress bars in a block: progress is reported here."""

    def __enter__(self) -> None:
        utils = _hub().utils
        self._were_shown = not utils.are_progress_bars_disabled()
        if self._were_shown:
            utils.disable_progress_bars()

    def __exit__(self, *_: object) -> None:
        if self._were_shown:
            _hub().utils.enable_progress_bars()


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingPackage(
            "hf:// sources need the package huggingface-hub",
            remedy="Run pip install huggingface-hub (it is part of penstock[optimizer])",
        ) from error
    return huggingface_hub


POLL_SECONDS = 0.5


@contextmanager
def report_growth(blobs: Path, report: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, call `report` from a thread with the size in bytes of the file being downloaded.

    huggingface_hub 0.x reports progress to a bar on a terminal only, so the folder is polled.
    """
    begun = time.time()
    over = threading.Event()

    def watch() -> None:
        with suppress(BrokenPipeError):  # the receiver is gone: the next report of the caller's thread raises it too
            while not over.wait(POLL_SECONDS):
                if size := _arriving(blobs, begun):
                    report(size)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _arriving(blobs: Path, begun: float) -> int:
    """Bytes of the incomplete file that changed last; 0 if none changed since `begun` (seconds since the epoch).

    Incomplete files of interrupted downloads are in the folder too.
    """
    found = [(0.0, 0)]
    for path in blobs.glob("*.incomplete"):
        with suppress(OSError):  # finished meanwhile
            facts = path.stat()
            found.append((facts.st_mtime, facts.st_size))
    changed, size = max(found)
    # File times come from a coarser clock, which is some milliseconds behind.
    return size if changed > begun - 1 else 0


@dataclass(frozen=True)
class SnapshotRecords:
    """Records which snapshots of a repository were fetched completely, and the last known commit of a branch.

    huggingface_hub keeps no record of the former and would return half a snapshot offline; the latter it writes only
    when it chooses the files itself. One instance for each repository and choice of files.
    """

    folder: Path

    def remember(self, commit: str, snapshot: Path, names: Iterable[str]) -> None:
        """Record that the snapshot has all these files with their present sizes."""
        sizes = {name: (snapshot / name).stat().st_size for name in names}
        self._write(f"{commit}.json", json.dumps({"folder": str(snapshot), "sizes": sizes}))

    def whole(self, commit: str | None) -> Path | None:
        """The folder of a snapshot that was fetched completely and is still complete."""
        try:
            content = json.loads((self.folder / f"{commit}.json").read_text(encoding="utf-8"))
            snapshot = Path(content["folder"])
            whole = all((snapshot / name).stat().st_size == size for name, size in content["sizes"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return snapshot if whole else None

    def point(self, revision: str, commit: str) -> None:
        """Record the current commit of a branch or tag."""
        self._write(f"{quote(revision, safe='')}.commit", commit)

    def commit_of(self, revision: str) -> str | None:
        """The last recorded commit of a branch or tag."""
        try:
            return (self.folder / f"{quote(revision, safe='')}.commit").read_text(encoding="utf-8")
        except OSError:
            return None

    def _write(self, name: str, text: str) -> None:
        with suppress(OSError):
            if (self.folder / name).read_text(encoding="utf-8") == text:
                return  # unchanged: a folder that was filled elsewhere may be mounted read-only
        self.folder.mkdir(parents=True, exist_ok=True)
        # Not the process id: that is 1 in every container that shares the folder.
        unfinished = self.folder / f"{name}.{uuid4().hex}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.folder / name)
