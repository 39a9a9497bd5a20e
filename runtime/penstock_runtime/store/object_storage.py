"""Object stores through fsspec: opening one, and what the errors of its library mean.

Knows neither models nor artefacts: `models.objects` and `store.objects` say in their own words what went wrong. fsspec
and the stores' packages are optional and imported here only.
"""

from __future__ import annotations

import errno
import fcntl
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import MissingPackage
from penstock_runtime.host.disk import FULL

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""The package that speaks a scheme."""
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # Retries are ours (they resume); botocore's own would multiply them.
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}},
    "gs": {},
    "az": {"anon": False},
}
_DENIED = {
    "ClientAuthenticationError", "CredentialRetrievalError", "CredentialUnavailableError", "DefaultCredentialsError",
    "NoAuthTokenError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "RefreshError",
    "TokenRetrievalError", "UnauthorizedSSOTokenError",
}  # fmt: skip
"""Errors of botocore, google-auth and azure-identity that mean missing or wrong credentials."""
_LIBRARIES = {"aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs", "adlfs", "urllib3"}
_ALTERED = {"ChecksumError", "FlexibleChecksumError"}
"""Errors of gcsfs and botocore."""


class FileSystem(Protocol):
    """The part of an fsspec file system that reading needs."""

    def ls(self, path: str, detail: bool = True) -> Any:
        """The entries of a folder, as dicts with at least `name` (in full), `type` and `size`."""
        ...

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes from `start` up to `end`."""
        ...

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget listings."""
        ...


class WritableFileSystem(FileSystem, Protocol):
    """The part that publishing and deleting need on top."""

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        """Upload a file, in parts where it is large; what was there is replaced as a whole."""
        ...

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        """Write bytes; `create` fails when there is something already."""
        ...

    def rm_file(self, path: str) -> None:
        """Delete one object."""
        ...


class Trouble(StrEnum):
    """What an error of a store comes down to."""

    NOTHING_THERE = "nothing there"
    DENIED = "denied"
    FULL_DISK = "full disk"
    """Ours, not the store's."""
    REFUSED = "refused"
    """The request itself is wrong: the same one would be refused again."""
    ALTERED = "altered"
    """The store itself keeps a checksum of the object, and what came does not fit it."""
    UNAVAILABLE = "unavailable"


def open_filesystem(scheme: str) -> Any:
    """The store of a scheme, with the credentials that its own library finds (environment, files, workload identity).

    MissingPackage says what to install; else what the library raises (`trouble` tells what it means): some look for
    credentials already here.
    """
    package = PACKAGES[scheme]
    try:
        import fsspec

        return fsspec.filesystem(scheme, skip_instance_cache=True, **_OPTIONS[scheme])
    except ImportError as error:
        raise MissingPackage(f"{scheme}:// needs the package {package}", remedy=f"Run pip install {package}") from error


def trouble(error: Exception) -> Trouble | None:
    """What an error of a store's library means; None for one that is not theirs."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = _status(error)
    if names & _ALTERED:
        return Trouble.ALTERED
    if isinstance(error, FileNotFoundError) or "ResourceNotFoundError" in names:
        return Trouble.NOTHING_THERE
    if isinstance(error, PermissionError) or names & _DENIED or status in {401, 403}:
        return Trouble.DENIED
    if isinstance(error, OSError) and error.errno in FULL:
        return Trouble.FULL_DISK
    if isinstance(error, ValueError) or (status is not None and 400 <= status < 500 and status not in {408, 429}):
        return Trouble.REFUSED
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if isinstance(error, OSError | TimeoutError) or packages & _LIBRARIES:
        return Trouble.UNAVAILABLE
    return None


def first_line(error: Exception) -> str:
    """What a library said, in one short line."""
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return re.sub(r"\s+", " ", text)[:200]


def already_there(error: Exception) -> bool:
    """True when a write in mode `create` found something."""
    return (
        isinstance(error, FileExistsError)
        or _status(error) in {409, 412}
        or "ResourceExistsError" in {kind.__name__ for kind in type(error).__mro__}
    )


def not_supported(error: Exception) -> bool:
    """True when the store does not know what was asked (conditional writes, on some that speak S3)."""
    return _status(error) == 501 or (isinstance(error, OSError) and error.errno == errno.ENOSYS)


def relative(path: str, prefix: str) -> str:
    """A name below the prefix; empty for the prefix itself, which some stores list as a folder's own entry."""
    return path.strip("/").removeprefix(prefix.strip("/")).strip("/")


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error: s3fs keeps botocore's error as the cause, others have an attribute."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, dict):
        value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        value = getattr(error, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    return value if isinstance(value, int) else None


@contextmanager
def alone(path: Path, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file: one fetch at a time on this machine; the kernel lets go when a process dies. `waiting` is
    called once when somebody else holds it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
