"""Access to remote storage: retries of temporary errors, and buckets of object stores through obstore.

Independent of models and artefacts: `models.sources.object_source` and `store.object_store` map its failures to errors
of a model and of a store. obstore is optional and imported here only.
"""

from __future__ import annotations

import configparser
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from penstock.errors import HostError, MissingPackage, PenstockError, SettingError

CONNECT_SECONDS = 5
READ_SECONDS = 60
REQUEST_SECONDS = 600
"""Limits of one request: to connect, between two reads, and for the whole."""
PART_BYTES = 16 * 2**20
PARTS_AT_ONCE = 4
"""Of an upload: both together bound its memory."""
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
"""An Azure storage account. A host name is made of it: with other characters, another server could be named."""
_STATUS = re.compile(r"status code: (\d{3})([^:\n]*)")
_MESSAGE = re.compile(r"<Message>([^<\n]+)|message: \"([^\"]+)\"|error: \"([^\"]+)\"")
"""In errors of obstore: the message of a server's XML, of the operating system, of a name resolution."""
_MISSING_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound")
_METADATA = re.compile(r"//(169\.254\.|\[fd00:ec2|metadata\.google)")
"""Addresses of the services that give a machine or pod its credentials. They are the last source of credentials."""
_CREDENTIALS = re.compile(r"credential|service account|token request|Invalid Access Key", re.IGNORECASE)
CA_VARIABLES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


class FailureKind(StrEnum):
    """Classes of store errors."""

    NO_OBJECT = "no object"
    NO_BUCKET = "no bucket"
    DENIED = "denied"
    REFUSED = "refused"
    """The request is invalid: a retry would be refused again."""
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True)
class StoredObject:
    """One object of a listing."""

    name: str
    """Relative to the listed folder."""
    size: int
    modified: datetime
    version: str
    """Its entity tag."""


@dataclass(frozen=True)
class Bucket:
    """A folder of a bucket or container. Names are relative to it, with `/`. Methods raise the errors of obstore, which
    `classify_failure` knows, and FileNotFoundError for an object that does not exist. Each call makes one request, but
    for listings and large uploads."""

    store: Any
    """A store of obstore."""
    folder: str = ""
    """Without a slash at either end; empty: the whole bucket."""

    def below(self, folder: str) -> Bucket:
        """A folder of this one."""
        return replace(self, folder=self._path(folder))

    def objects(self) -> list[StoredObject]:
        """All objects below the folder; an empty list if it does not exist."""
        return self._listed(self.store.list(self.folder or None).collect())

    def level(self) -> tuple[list[str], list[StoredObject]]:
        """The names of the folders in the folder, and the objects directly in it."""
        found = self.store.list_with_delimiter(self.folder or None)
        folders = [path.removeprefix(self.folder).strip("/") for path in found["common_prefixes"]]
        return folders, self._listed(found["objects"])

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes from `start` to before `end` (None: the end of the object), or fewer at its end."""
        if end is None:
            return bytes(self.store.get(self._path(name)).bytes())
        if end <= start:
            return b""
        try:
            return bytes(self.store.get_range(self._path(name), start=start, end=end))
        except Exception as error:
            if _status(error) == 416:  # it is shorter than `start`
                return b""
            raise

    def write(self, name: str, content: bytes | Path, *, create: bool = False) -> None:
        """Write bytes or upload a file, in parts if it is large. An existing object is replaced atomically; with
        `create` it is an error for which `already_exists` is True."""
        mode = "create" if create else "overwrite"
        self.store.put(self._path(name), content, mode=mode, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def delete(self, name: str) -> None:
        """Delete an object. Some stores raise FileNotFoundError if there is none."""
        self.store.delete(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def _listed(self, objects: Iterable[Mapping[str, Any]]) -> list[StoredObject]:
        found = (
            StoredObject(
                one["path"].removeprefix(self.folder).strip("/"),
                one["size"],
                one["last_modified"],
                one["e_tag"] or str(one["last_modified"]),
            )
            for one in objects
        )
        return [one for one in found if one.name]  # some stores list a folder as an object


def open_bucket(scheme: str, location: str) -> Bucket:
    """The bucket (and folder) of an address `scheme://location`, with the credentials of the environment: variables,
    files, and the identity of the pod or machine.

    MissingPackage names the package to install; SettingError for malformed settings. Also raises errors of the library
    for credentials that cannot be read.
    """
    name, _, folder = location.partition("/")
    settings = {"s3": _s3_settings, "gs": _gcs_settings, "az": _azure_settings}[scheme](name)
    for address in (settings.get("endpoint"), settings.get("base_url")):
        parts = urlsplit(address or "http://unset")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise SettingError(
                f"{address!r} is not the address of an object store",
                field="AWS_ENDPOINT_URL" if scheme == "s3" else scheme,
                remedy="Write http:// or https:// and a host name",
            )
    options: dict[str, Any] = {
        "allow_http": True,  # if the address has http
        "connect_timeout": f"{CONNECT_SECONDS}s",
        "read_timeout": f"{READ_SECONDS}s",
        "timeout": f"{REQUEST_SECONDS}s",
    }
    if bundle := next((path for key in CA_VARIABLES if (path := os.environ.get(key))), None):
        options["root_certificate"] = Path(bundle).read_bytes()
    try:
        from obstore import store
    except ImportError as error:
        raise MissingPackage(
            f"{scheme}:// needs the package obstore", remedy="Run pip install 'penstock[stores]'"
        ) from error
    kind = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[scheme]
    try:
        # Penstock retries, resumes, and reports each failure.
        return Bucket(kind(name, client_options=options, retry_config={"max_retries": 0}, **settings), folder)
    except Exception as error:
        if classify_failure(error) is FailureKind.DENIED:
            raise
        raise SettingError(
            f"{scheme}://{location}: {describe(error)}",
            field=scheme,
            remedy="Correct the variables of its object store",
        ) from error


def _s3_settings(bucket: str) -> dict[str, Any]:
    """What obstore does not read itself: a profile's keys, and the region of a bucket."""
    has = os.environ.get
    # Not every compatible store has bulk deletion, and its errors have no status.
    settings: dict[str, Any] = {"disable_bulk_delete": True}
    if endpoint := has("AWS_ENDPOINT_URL_S3") or has("AWS_ENDPOINT_URL"):
        settings["endpoint"] = endpoint
    if not has("AWS_ACCESS_KEY_ID") and not has("AWS_WEB_IDENTITY_TOKEN_FILE"):
        settings |= _profile(has("AWS_PROFILE"))
        if "access_key_id" not in settings:
            _require_one("AWS_EC2_METADATA_DISABLED", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
                         "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")  # fmt: skip
    if not (endpoint or has("AWS_REGION") or has("AWS_DEFAULT_REGION") or "region" in settings):
        settings["region"] = _region(bucket)
    return settings


def _require_one(without_metadata: str, *names: str) -> None:
    """Raise PermissionError if none of the variables is set and the metadata service may not be used: asking it would
    last until a time-out, as the network policy of a pod without an identity forbids it."""
    if os.environ.get(without_metadata) and not any(os.environ.get(name) for name in names):
        raise PermissionError(f"there are no credentials, and {without_metadata} is set")


def _profile(name: str | None) -> dict[str, str]:
    """Keys and region of a profile in AWS's two files; empty if no profile is named and the default has no keys."""
    files = configparser.ConfigParser(interpolation=None)
    for key, usual in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
        try:
            files.read(os.environ.get(key) or Path(os.environ.get("HOME", "/"), ".aws", usual), encoding="utf-8")
        except (OSError, ValueError, configparser.Error) as error:
            raise SettingError(
                f"{key}: not a file of AWS profiles ({error})", field=key, remedy="Correct it"
            ) from error
    sections = [one for one in (f"profile {name}", name or "default") if files.has_section(one)]
    found = {key: value for one in sections for key, value in files.items(one)}
    names = {
        "aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token", "region": "region",
    }  # fmt: skip
    if name and "aws_access_key_id" not in found:
        raise SettingError(
            f"the AWS profile {name} has no keys: Penstock reads no roles and no single sign-on from profiles",
            field="AWS_PROFILE",
            remedy='Run eval "$(aws configure export-credentials --format env)", which sets its keys',
        )
    return {names[key]: value for key, value in found.items() if key in names}


def _region(bucket: str) -> str:
    """The region of a bucket of AWS, which its server tells anyone; us-east-1 if it does not answer."""
    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:  # without a signature it is refused or redirected
        with error:
            headers = error.headers
    except OSError:
        return "us-east-1"
    return headers.get("x-amz-bucket-region") or "us-east-1"


def _gcs_settings(_: str) -> dict[str, Any]:
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        return {"base_url": emulator, "bearer_token": "none"}
    _require_one(
        "NO_GCE_CHECK", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"
    )
    return {}


def _azure_settings(_: str) -> dict[str, Any]:
    """The settings of AZURE_STORAGE_CONNECTION_STRING, which obstore does not read."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    facts = {key.strip().lower(): value for key, _, value in (part.partition("=") for part in text.split(";"))}
    account = facts.get("accountname") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if account and _ACCOUNT.fullmatch(account) is None:
        raise SettingError(
            f"AZURE_STORAGE_ACCOUNT_NAME is {account[:40]!r}, which is not the name of a storage account",
            field="AZURE_STORAGE_ACCOUNT_NAME",
            remedy="Write its 3 to 24 small letters and digits",
        )
    suffix, protocol = facts.get("endpointsuffix"), facts.get("defaultendpointsprotocol", "https")
    address = facts.get("blobendpoint") or (f"{protocol}://{account}.blob.{suffix}" if suffix else None)
    settings = {
        "account_name": account, "account_key": facts.get("accountkey"), "sas_key": facts.get("sharedaccesssignature"),
        "endpoint": address,
    }  # fmt: skip
    if not settings["account_key"] and not settings["sas_key"]:
        names = ("STORAGE_ACCOUNT_KEY", "STORAGE_SAS_TOKEN", "STORAGE_CLIENT_SECRET", "CLIENT_SECRET")
        _require_one("AZURE_TOKEN_CREDENTIALS", *(f"AZURE_{name}" for name in names))
    return {key: value for key, value in settings.items() if value}


def classify_failure(error: Exception) -> FailureKind | None:
    """The class of an error of obstore or of a connection; None for other errors."""
    names, text, status = {kind.__name__ for kind in type(error).__mro__}, str(error), _status(error)
    if status == 404 and _MISSING_BUCKET.search(text):
        return FailureKind.NO_BUCKET
    if isinstance(error, FileNotFoundError):
        return FailureKind.NO_OBJECT
    if names & {"PermissionDeniedError", "UnauthenticatedError", "PermissionError"} or _METADATA.search(text):
        return FailureKind.DENIED
    ours = isinstance(error, OSError | ValueError) or "BaseError" in names
    if not ours:
        return None
    refused = status is not None and status < 500 and status not in {408, 429}
    if status in {401, 403} or (_CREDENTIALS.search(text) and (refused or "HTTP error" not in text)):
        return FailureKind.DENIED
    if refused or isinstance(error, ValueError) or names & {"InvalidPathError", "UnknownConfigurationKeyError"}:
        return FailureKind.REFUSED
    return FailureKind.UNAVAILABLE


def describe(error: Exception) -> str:
    """The reason of an error of obstore in at most 200 characters: the status and the server's message, or the cause of
    a connection that failed; without addresses, which may have signatures."""
    text = str(error)
    parts = [f"HTTP {one[1]}{one[2]}".strip()] if (one := _STATUS.search(text)) else []
    if message := _MESSAGE.search(text):
        parts.append(next(filter(None, message.groups())))
    elif not parts:
        first = next(iter(text.strip().splitlines()), "") or type(error).__name__
        parts.append(first.rpartition(" - ")[2])
    return re.sub(r"\s+", " ", ": ".join(parts))[:200]


def already_exists(error: Exception) -> bool:
    """True if a write with `create` found an existing object."""
    return type(error).__name__ in {"AlreadyExistsError", "PreconditionError"} or _status(error) in {409, 412}


def not_supported(error: Exception) -> bool:
    """True if the store does not support the request (conditional writes, on some S3-compatible stores)."""
    return type(error).__name__ == "NotSupportedError" or _status(error) == 501


def _status(error: BaseException) -> int | None:
    """The HTTP status in the text of an error of obstore, which has it nowhere else."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


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
