"""A client of container registries (the distribution API of OCI): reads and writes manifests and blobs.

Independent of models and artefacts: `models.sources.oci_source` and `store.push` choose what to read and write, and map
a RegistryError to an error of a model and of a store. The standard library is enough: the API is seven requests, and a
library would add dependencies (requests, jsonschema) for what remains to be checked here (digests, sizes, redirects).

Credentials are sent to the registry, and to the token server that it names; never over plain HTTP to an HTTPS registry,
and never to the server of a redirect.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from penstock.errors import SettingError
from penstock_runtime.remote import CA_VARIABLES, READ_SECONDS, FailureKind

AUTH_VARIABLE = "PENSTOCK_REGISTRY_AUTH"
"""Credentials as JSON of a docker config.json: the value of an image pull secret. It counts before the file."""
HTTP_VARIABLE = "PENSTOCK_REGISTRY_HTTP"
"""Registries that are reached over plain HTTP, `host:port` separated by commas; those on loopback always are."""
INDEXES = frozenset(
    {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
)
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MANIFESTS = frozenset({OCI_MANIFEST, "application/vnd.docker.distribution.manifest.v2+json"})
MOST_MANIFEST_BYTES = 4 * 2**20
"""The least that registries must accept by the specification, and what most accept."""
CHUNK_BYTES = 2**20
_MOST_ANSWER_BYTES = 2**20
"""Of tokens and errors."""
_DOCKER = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}
"""Docker Hub's names, and the server of its API."""
_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+)(:[0-9]+)?")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class RegistryError(Exception):
    """A request that failed."""

    def __init__(self, kind: FailureKind, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True)
class RegistryManifest:
    """A manifest, or an index of manifests."""

    digest: str
    """`sha256:...` of its bytes."""
    media_type: str
    content: Mapping[str, Any]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to another http or https address, from https to https only."""

    def redirect_request(self, req: Any, fp: Any, *answer: Any) -> Any:
        """See `urllib.request`."""
        code, _, headers, address = answer
        if not address.startswith("https://") and not (address.startswith("http://") and req.type == "http"):
            raise urllib.error.HTTPError(req.full_url, code, "a redirect to an unsafe address", headers, fp)
        return super().redirect_request(req, fp, *answer)


@dataclass
class Registry:
    """One repository of a registry. Methods raise RegistryError; none retries a failed request."""

    registry: str
    """Host, and port if it has one."""
    repository: str
    basic: tuple[str, str] | None = None
    """User and password."""
    plain: bool = False
    """Plain HTTP."""
    _authorization: str = field(default="", repr=False)

    @classmethod
    def of(cls, location: str) -> Registry:
        """The repository of a location `registry/repository`, with the credentials and settings of the environment.
        SettingError for credentials that cannot be read."""
        registry, _, repository = location.partition("/")
        if registry in _DOCKER and "/" not in repository:
            repository = f"library/{repository}"
        plain = {one.strip() for one in os.environ.get(HTTP_VARIABLE, "").split(",")}
        is_plain = registry in plain or _LOOPBACK.fullmatch(registry) is not None
        return cls(registry, repository, _credentials(registry, repository), is_plain)

    def manifest(self, reference: str) -> RegistryManifest:
        """The manifest or index of a tag or digest."""
        accept = ", ".join(sorted(INDEXES | MANIFESTS))
        with self._send("GET", f"manifests/{reference}", headers={"Accept": accept}) as answer:
            content = _read(answer, MOST_MANIFEST_BYTES + 1)
            media_type = answer.headers.get_content_type()
        if len(content) > MOST_MANIFEST_BYTES:
            raise RegistryError(FailureKind.REFUSED, f"its manifest has over {MOST_MANIFEST_BYTES // 2**20} MiB")
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if reference.startswith("sha256:") and reference != digest:
            raise RegistryError(FailureKind.REFUSED, "the manifest that it sends has another digest")
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise RegistryError(FailureKind.REFUSED, "its manifest is not a JSON object")
        return RegistryManifest(digest, str(value.get("mediaType") or media_type), value)

    def blob(self, digest: str, start: int) -> Generator[tuple[int, bytes]]:
        """The bytes of a blob from `start` on, in chunks with their positions. The first position is 0 if the registry
        cannot send a part. Not verified."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._send("GET", f"blobs/{digest}", headers=headers) as answer:
            position = start if answer.status == http.client.PARTIAL_CONTENT else 0
            while chunk := _read(answer, CHUNK_BYTES):
                yield position, chunk
                position += len(chunk)

    def holds(self, digest: str) -> bool:
        """Whether the repository has a blob."""
        try:
            self._send("HEAD", f"blobs/{digest}").close()
        except RegistryError as error:
            if error.kind is FailureKind.NO_OBJECT:
                return False
            raise
        return True

    def upload(self, digest: str, size: int, file: IO[bytes] | bytes) -> None:
        """Write a blob of this digest."""
        with self._send("POST", "blobs/uploads/", headers={"Content-Length": "0"}) as answer:
            address = urllib.parse.urljoin(answer.url, answer.headers.get("Location", ""))
        address += f"{'&' if '?' in address else '?'}digest={urllib.parse.quote(digest)}"
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        self._send("PUT", address, headers=headers, data=file).close()

    def put_manifest(self, reference: str, content: bytes) -> str:
        """Write a manifest under a tag; returns its digest."""
        self._send("PUT", f"manifests/{reference}", headers={"Content-Type": OCI_MANIFEST}, data=content).close()
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    @cached_property
    def _base(self) -> str:
        host = _DOCKER.get(self.registry, self.registry)
        return f"{'http' if self.plain else 'https'}://{host}/v2/{self.repository}/"

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        bundle = next((path for key in CA_VARIABLES if (path := os.environ.get(key))), None)
        secure = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=bundle))
        return urllib.request.build_opener(secure, _Redirects)

    def _send(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, data: Any = None, again: bool = True
    ) -> Any:
        """The open answer of a request. `again`: a refused one is sent once more, with the authorization that the
        registry asks for."""
        url = urllib.parse.urljoin(self._base, path)
        own = urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(self._base)[:2]
        request = urllib.request.Request(url, data, dict(headers or {}), method=method)
        if own and self._authorization:
            # Not sent to the address of a redirect, which is another server.
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            return self._opener.open(request, timeout=READ_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                failure = _failure(error)
                if error.code != http.client.UNAUTHORIZED or not own:
                    raise failure from error
                challenge = error.headers.get("WWW-Authenticate", "")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _unavailable(error) from error
        authorization = self._authorize(challenge) if again and isinstance(data, bytes | None) else ""
        if not authorization:
            raise failure
        self._authorization = authorization
        return self._send(method, path, headers=headers, data=data, again=False)

    def _authorize(self, challenge: str) -> str:
        """The header for a challenge; empty if there is none."""
        kind, _, rest = challenge.partition(" ")
        user = base64.b64encode(":".join(self.basic).encode()).decode() if self.basic is not None else ""
        if kind.lower() == "basic":
            return f"Basic {user}" if user else ""
        asked = dict(_CHALLENGE.findall(rest))
        realm = asked.pop("realm", "")
        if kind.lower() != "bearer" or not realm.startswith(("https://", "http://") if self.plain else "https://"):
            return ""
        query = urllib.parse.urlencode({key: asked[key] for key in ("service", "scope") if key in asked})
        request = urllib.request.Request(f"{realm}{'&' if '?' in realm else '?'}{query}")
        if user:
            request.add_unredirected_header("Authorization", f"Basic {user}")
        try:
            with self._opener.open(request, timeout=READ_SECONDS) as answer:
                found = json.loads(_read(answer, _MOST_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise _failure(error) from error
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise _unavailable(error) from error
        token = (found.get("token") or found.get("access_token")) if isinstance(found, dict) else None
        return f"Bearer {token}" if isinstance(token, str) and re.fullmatch(r"[\x21-\x7e]+", token) else ""


def _read(answer: Any, most: int) -> bytes:
    try:
        return bytes(answer.read(most))
    except (OSError, http.client.HTTPException) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> RegistryError:
    reason = getattr(error, "reason", None) or error
    return RegistryError(FailureKind.UNAVAILABLE, str(reason)[:200] or type(error).__name__)


def _failure(error: urllib.error.HTTPError) -> RegistryError:
    """The error for an answer with a failure: its status, and the message of the registry."""
    status = error.code
    try:
        stated = json.loads(error.read(_MOST_ANSWER_BYTES))["errors"][0]
        message = f": {stated.get('message') or stated.get('code')}"[:200]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        message = f" {error.reason}"[:200]
    if status in {http.client.UNAUTHORIZED, http.client.FORBIDDEN}:
        kind = FailureKind.DENIED
    elif status == http.client.NOT_FOUND:
        kind = FailureKind.NO_OBJECT
    elif status < 500 and status not in {408, 429}:
        kind = FailureKind.REFUSED
    else:
        kind = FailureKind.UNAVAILABLE
    wait = error.headers.get("Retry-After") or ""
    return RegistryError(kind, f"HTTP {status}{message}", float(wait) if re.fullmatch(r"[0-9]{1,6}", wait) else None)


def _credentials(registry: str, repository: str) -> tuple[str, str] | None:
    """User and password for a repository, from the longest fitting entry of a docker config.json."""
    text, where = os.environ.get(AUTH_VARIABLE, ""), AUTH_VARIABLE
    if not text:
        folder = os.environ.get("DOCKER_CONFIG") or Path(os.environ.get("HOME") or "/", ".docker")
        file = Path(folder, "config.json")
        try:
            text, where = file.read_text(encoding="utf-8"), str(file)
        except (OSError, UnicodeDecodeError):
            return None
    try:
        entries = json.loads(text).get("auths") or {}
        places = {re.sub(r"^https?://|(/v[12])?/*$", "", key): value for key, value in entries.items()}
        names = (f"{registry}/{repository}".split("/"), ["index.docker.io"] if registry in _DOCKER else [])
        fitting = ["/".join(name[:count]) for name in names for count in range(len(name), 0, -1)]
        found = next((places[name] for name in fitting if name in places), None)
        if not found:
            return None
        if "auth" in found:
            user, _, password = base64.b64decode(found["auth"], validate=True).decode().partition(":")
        else:
            user, password = found.get("username", ""), found.get("password", "")
    except (ValueError, AttributeError, TypeError, RecursionError, binascii.Error) as error:
        raise SettingError(
            f"{where} is not a docker config.json with credentials",
            field=AUTH_VARIABLE,
            remedy="Give the value .dockerconfigjson of an image pull secret, or run docker login again",
        ) from error
    return (str(user), str(password)) if user else None
