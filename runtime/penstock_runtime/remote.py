"""Access to remote storage: retries of temporary errors, and object stores through fsspec.

Independent of models and artefacts: `models.object_source` and `store.object_store` map its failures to their own
errors. fsspec and the packages of the object stores are optional and imported here only.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from penstock.errors import HostError, MissingPackage, PenstockError, SettingError
from penstock_runtime.host.disk import FULL

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""The fsspec package of each scheme."""
CONNECT_SECONDS = 5
READ_SECONDS = 60
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "retries": {"total_max_attempts": 1},
        }
    },
    "gs": {},
    "az": {"anon": False},
}
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
"""An Azure storage account. adlfs makes a host name of it: with other characters, another server could be named."""
_DENIED = {
    "ClientAuthenticationError", "CredentialRetrievalError", "CredentialUnavailableError", "DefaultCredentialsError",
    "NoAuthTokenError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "RefreshError",
    "TokenRetrievalError", "UnauthorizedSSOTokenError",
}  # fmt: skip
"""Errors of botocore, google-auth and azure-identity for missing or wrong credentials."""
_LIBRARIES = {"aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "s3fs", "adlfs", "urllib3"}
_FORBIDDEN = "Forbidden: "
"""gcsfs raises an OSError that begins like this for status 403, and no error with a status."""
_LOGGERS = ("azure", "gcsfs")
"""Loggers of libraries that log the errors that they raise, too, with tracebacks."""
_ALTERED = {"ChecksumError", "FlexibleChecksumError"}
"""Checksum errors of gcsfs and botocore."""


class FileSystem(Protocol):
    """The methods of an fsspec file system for reading."""

    def ls(self, path: str, detail: bool = True) -> Any:
        """The entries of a folder, as dicts with at least `name` (full path), `type` and `size`."""
        ...

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes from `start` to before `end`."""
        ...

    def invalidate_cache(self, path: str | None = None) -> None:
        """Drop cached listings."""
        ...


class WritableFileSystem(FileSystem, Protocol):
    """The additional methods for publishing and deleting."""

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        """Upload a file, in parts if it is large; an existing object is replaced atomically."""
        ...

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        """Write bytes; mode `create` fails if the object exists."""
        ...

    def rm_file(self, path: str) -> None:
        """Delete one object."""
        ...


class FailureKind(StrEnum):
    """Classes of store errors."""

    NOTHING_THERE = "nothing there"
    DENIED = "denied"
    FULL_DISK = "full disk"
    """The local disk, not the store."""
    REFUSED = "refused"
    """The request is invalid: a retry would be refused again."""
    ALTERED = "altered"
    """The contents do not match the checksum of the store."""
    UNAVAILABLE = "unavailable"


def open_filesystem(scheme: str) -> Any:
    """The file system of a scheme, with the credentials that its library finds (environment, files, workload identity).

    MissingPackage names the package to install; SettingError for a malformed account. Also raises errors of the
    library, some of which look for credentials here (`classify_failure`).
    """
    package = PACKAGES[scheme]
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if scheme == "az" and account and _ACCOUNT.fullmatch(account) is None:
        raise SettingError(
            f"AZURE_STORAGE_ACCOUNT_NAME is {account[:40]!r}, which is not the name of a storage account",
            field="AZURE_STORAGE_ACCOUNT_NAME",
            remedy="Write its 3 to 24 small letters and digits",
        )
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        import fsspec

        filesystem = fsspec.filesystem(scheme, skip_instance_cache=True, **_OPTIONS[scheme])
    except ImportError as error:
        raise MissingPackage(f"{scheme}:// needs the package {package}", remedy=f"Run pip install {package}") from error
    _make_requests_single(scheme, filesystem)
    return filesystem


def _make_requests_single(scheme: str, filesystem: Any) -> None:
    """Turn off the retries of a library that has no option for it, and limit the time to connect.

    Penstock retries, resumes, and reports each failure. The libraries report nothing: gcsfs for half a minute,
    azure-storage-blob for one and a half.
    """
    with suppress(AttributeError):  # another version has other names, and its own retries
        if scheme == "gs":
            from aiohttp import ClientTimeout

            limits = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
            filesystem.requests_timeout = limits
            # The method without its decorator, which retries.
            filesystem._request = type(filesystem)._request.__wrapped__.__get__(filesystem)  # noqa: SLF001
        elif scheme == "az":
            client = filesystem.service_client
            client._config.retry_policy.total_retries = 0  # noqa: SLF001
            client._pipeline._transport.connection_config.timeout = CONNECT_SECONDS  # noqa: SLF001


def classify_failure(error: Exception) -> FailureKind | None:
    """The class of an error of a store's library; None for other errors."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = _status(error)
    if names & _ALTERED:
        return FailureKind.ALTERED
    if isinstance(error, FileNotFoundError) or "ResourceNotFoundError" in names:
        return FailureKind.NOTHING_THERE
    if isinstance(error, OSError) and error.errno is None and str(error).startswith(_FORBIDDEN):
        return FailureKind.DENIED
    if isinstance(error, PermissionError) or names & _DENIED or status in {401, 403}:
        return FailureKind.DENIED
    if isinstance(error, OSError) and error.errno in FULL:
        return FailureKind.FULL_DISK
    if isinstance(error, ValueError) or (status is not None and 400 <= status < 500 and status not in {408, 429}):
        return FailureKind.REFUSED
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if isinstance(error, OSError | TimeoutError) or packages & _LIBRARIES:
        return FailureKind.UNAVAILABLE
    return None


def first_line(error: Exception) -> str:
    """The first line of a library's message, or of its cause's, shortened."""
    words = str(error).strip() or str(error.__cause__ or "").strip()
    text = next(iter(words.splitlines()), "") or type(error).__name__
    return re.sub(r"\s+", " ", text)[:200]


def already_exists(error: Exception) -> bool:
    """True if a write in mode `create` found an existing object."""
    return (
        isinstance(error, FileExistsError)
        or _status(error) in {409, 412}
        or "ResourceExistsError" in {kind.__name__ for kind in type(error).__mro__}
    )


def not_supported(error: Exception) -> bool:
    """True if the store does not support the request (conditional writes, on some S3-compatible stores)."""
    return _status(error) == 501 or (isinstance(error, OSError) and error.errno == errno.ENOSYS)


def relative(path: str, prefix: str) -> str:
    """The path relative to the prefix; empty for the prefix itself, which some stores list as an entry."""
    return path.strip("/").removeprefix(prefix.strip("/")).strip("/")


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error: in s3fs the cause is botocore's error, others have an attribute."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, dict):
        value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        value = getattr(error, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    return value if isinstance(value, int) else None


T = TypeVar("T")


@dataclass(frozen=True)
class Retries:
    """Retries of temporary errors with exponential back-off, a bounded number of times."""

    attempts: int = 4
    """Calls in total, including the first one."""
    first_wait_seconds: float = 1.0
    """Wait before the second call; doubled for each further call. Each wait is shortened at random by up to a half, so
    that pods that started together do not retry together."""
    longest_wait_seconds: float = 30.0
    """Also limits the Retry-After of a source: a start-up that waits longer should fail visibly."""
    sleep: Callable[[float], None] = time.sleep
    on_failure: Callable[[PenstockError, float], None] = lambda _error, _seconds: None
    """Called before each wait with the error and the seconds to wait."""

    def run(self, action: Callable[[], T]) -> T:
        """Call `action` until it succeeds; raises permanent errors, and the error of the last attempt."""
        wait = self.first_wait_seconds
        for _ in range(self.attempts - 1):
            try:
                return action()
            except PenstockError as failure:
                error = failure
                # A full disk is temporary, but does not clear within these waits.
                if not error.temporary or isinstance(error, HostError):
                    raise
                asked = getattr(error, "retry_after_seconds", None)
            shortened = wait * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, not for security
            seconds = min(asked if asked is not None else shortened, self.longest_wait_seconds)
            self.on_failure(error, seconds)
            self.sleep(seconds)
            wait = min(2 * wait, self.longest_wait_seconds)
        return action()


DEFAULT_RETRIES = Retries()
