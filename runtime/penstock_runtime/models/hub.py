"""`hf://` sources, through huggingface_hub and its cache.

The library downloads, resumes and lays out its cache; what to fetch, when to try again, what an answer means and
whether a cached copy is whole is decided here. Works with versions from 0.30 up to 2.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
from penstock.resources.source import ModelSource
from penstock_runtime.host.disk import FULL
from penstock_runtime.models import safety
from penstock_runtime.models.hub_growth import growth_told
from penstock_runtime.models.hub_records import Records
from penstock_runtime.models.json_files import read_object
from penstock_runtime.models.models_folder import OPTION, models_folder_said
from penstock_runtime.models.progress import OnProgress, Progress
from penstock_runtime.models.selection import GRAPHS, choose_files
from penstock_runtime.store.retries import Retries

T = TypeVar("T")

COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT_SECONDS = 15.0
"""For an answer to begin. HF_HUB_DOWNLOAD_TIMEOUT sets how long a download may stall (10 s)."""
_LIBRARIES = {"huggingface_hub", "requests", "urllib3", "httpx", "httpcore", "httpx2", "httpcore2"}
"""The hub's library and the HTTP libraries that its versions 0, 1 and 2 stand on."""
_LOCAL = FULL | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
"""What folders answer. Networks do too (a filter: EPERM), but their libraries put that into errors of their own."""


@dataclass(frozen=True)
class _Listing:
    commit: str
    sizes: Mapping[str, int]
    """Bytes by file name; 0 where the hub does not say."""


@dataclass(frozen=True)
class HubFetch:
    """One fetch of one repository."""

    source: ModelSource
    cache: Path
    """Penstock's cache. HF_HUB_CACHE and HF_HOME, where set, say where the hub's own files go."""
    token: str | None
    """None: HF_TOKEN, or what `hf auth login` has stored."""
    graph: bool
    retries: Retries
    report: OnProgress

    def run(self) -> Path:
        """Fetch and return the snapshot's folder; a whole cached copy is used when the hub cannot be reached.

        HostError when a folder here cannot be written: no retry would change that.
        """
        with models_folder_said(self.cache):
            return self._run()

    def _run(self) -> Path:
        revision = self.source.revision or "main"
        pinned = self._records.whole(revision) if COMMIT.fullmatch(revision) else None
        if pinned is not None:
            return pinned
        self._require_readable_token()
        try:
            listing = self.retries.run(lambda: self._translated(lambda: self._list(revision)))
        except ModelUnavailable as error:
            cached = self._records.whole(self._records.commit_of(revision))
            if cached is None:
                raise
            note = f"{error.message}: using the cached revision {cached.name[:12]}"
            self.report(Progress(str(self.source), "", 0, 0, note))
            return cached
        folder = self._download(listing)
        self._records.point(revision, listing.commit)
        return folder

    def _list(self, revision: str) -> _Listing:
        api = _hub().HfApi(endpoint=_endpoint(), token=self.token)
        info = api.model_info(self.source.location, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return _Listing(commit=info.sha, sizes=sizes)

    def _download(self, listing: _Listing) -> Path:
        names = choose_files(str(self.source), listing.sizes, graph=self.graph)
        folder: Path | None = None
        if "config.json" in names:
            # First: whether the model wants its own code is known from it, before gigabytes are on the way.
            folder = self._file(listing, "config.json").parent
            config = read_object(folder, "config.json")
            safety.check_code(str(self.source), config, has_graph=any(name in listing.sizes for name in GRAPHS))
            if safety.remote_code(config):
                names = choose_files(str(self.source), listing.sizes, graph=True)
        total, done = sum(listing.sizes[name] for name in names), 0
        for name in names:
            self.report(Progress(str(self.source), name, done, total))

            def tell(size: int, name: str = name, done: int = done) -> None:
                arrived = min(size, listing.sizes[name])
                self.report(Progress(str(self.source), name, done + arrived, total))

            with growth_told(self._blobs, tell):
                path = self._file(listing, name)
            folder = folder or path.parents[name.count("/")]
            done += listing.sizes[name]
        if folder is None:
            raise CorruptModel(f"{self.source} has no config.json", remedy="Check the name of the repository")
        self.report(Progress(str(self.source), names[-1], done, total))
        self._records.remember(listing.commit, folder, names)
        return folder

    def _file(self, listing: _Listing, name: str) -> Path:
        def download(*, force: bool = False) -> Path:
            return Path(
                _hub().hf_hub_download(
                    self.source.location,
                    name,
                    revision=listing.commit,
                    cache_dir=str(self._hub_place[0]),
                    token=self.token,
                    endpoint=_endpoint(),
                    etag_timeout=TIMEOUT_SECONDS,
                    force_download=force,
                )
            )

        path = self.retries.run(lambda: self._translated(download))
        if listing.sizes[name] in {0, path.stat().st_size}:
            return path
        # The library takes whatever lies in its cache under that name for the file.
        note = f"the copy of {name} in {path.parent} is damaged: fetching it again"
        self.report(Progress(str(self.source), "", 0, 0, note))
        return self.retries.run(lambda: self._translated(lambda: download(force=True)))

    def _require_readable_token(self) -> None:
        """HostError where the library could not even look for a token: it would say so at every call, in no words."""
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
        """Where the hub's own files go, and what gives another place."""
        if "HF_HUB_CACHE" in os.environ:
            return Path(os.environ["HF_HUB_CACHE"]), "HF_HUB_CACHE"
        if "HF_HOME" in os.environ:
            return Path(os.environ["HF_HOME"]) / "hub", "HF_HUB_CACHE or HF_HOME"
        return self.cache / "hub", OPTION

    @property
    def _blobs(self) -> Path:
        """Where the library puts files while they arrive."""
        return self._hub_place[0] / f"models--{self.source.location.replace('/', '--')}" / "blobs"

    @property
    def _records(self) -> Records:
        name = self.source.location.replace("/", "--") + ("--graph" if self.graph else "")
        return Records(self.cache / "hub-complete" / name)

    def _translated(self, action: Callable[[], T]) -> T:
        """Run an action of the library with its errors told as ours; a defect passes through as it is."""
        try:
            with _quiet():
                return action()
        except PenstockError:
            raise
        except Exception as error:  # the library raises requests', httpx's and its own errors
            if is_local(error):
                folder, option = self._hub_place
                with models_folder_said(self.cache if option == OPTION else folder, option=option):
                    raise
            has_token = self.token is not None or _hub().get_token() is not None
            known = hub_error(error, self.source, has_token=has_token)
            if known is None:
                raise
            raise known from error


def hub_error(error: Exception, source: ModelSource, *, has_token: bool) -> PenstockError | None:
    """What an error of huggingface_hub, or of the HTTP library below it, means; None for one that is not theirs."""
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
            retry_after_seconds=0,  # waiting changes nothing
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{source}: the repository has no such revision", remedy="Check what stands behind the @")
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
    """True for what the operating system says about a file or folder here: the hub has no part in it."""
    if not isinstance(error, OSError) or type(error).__module__ != "builtins":
        return False
    return error.filename is not None or error.errno in _LOCAL


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
    """The deepest cause says most: the library wraps a refused connection in advice about internet access."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]


def _endpoint() -> str | None:
    """HF_ENDPOINT as it is now; the library reads it once on import."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


class _quiet:  # noqa: N801 - used as a statement
    """No progress bars of the library's own: progress is reported here."""

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
