"""Lists and watches the EndpointSlices of one Service. Keeps the last slices while the API server does not answer."""

from __future__ import annotations

import http.client
import json
import logging
import random
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_gateway.log_events import log_event
from penstock_gateway.settings import GatewayError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SERVICE_LABEL = "kubernetes.io/service-name"
WATCH_SECONDS = 60
"""The API server ends a watch after this time; then the next one starts."""
READ_TIMEOUT_SECONDS = 70.0
"""Longer than a watch lasts: a connection without data for this long is dead."""
LIST_SECONDS = 10.0
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 5.0
GONE = 410

Json = dict[str, Any]
logger = logging.getLogger("penstock.gateway")


@dataclass(frozen=True)
class ApiServerAccess:
    """URL and credentials of the API server."""

    url: str
    token: Path | None = None
    """Read for every request: Kubernetes renews it."""
    authority: Path | None = None
    """File of its certificate authority."""

    @classmethod
    def in_pod(cls, environment: Mapping[str, str], account: Path = ACCOUNT) -> ApiServerAccess:
        """ApiServerAccess with the pod's service account."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise GatewayError("KUBERNETES_SERVICE_HOST is not set: the gateway runs in a pod of a cluster.")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", account / "token", account / "ca.crt")


class WatchExpired(Exception):
    """The resource version of the watch is too old: list again."""


class Follower:
    """Calls `listener` with all slices by name, at the start and after each change."""

    def __init__(
        self, access: ApiServerAccess, *, namespace: str, service: str, listener: Callable[[Mapping[str, Json]], None]
    ) -> None:
        self._access = access
        query = {"labelSelector": f"{SERVICE_LABEL}={service}"}
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._query = query
        self._object = f"{namespace}/{service}"
        self._listener = listener
        self._slices: dict[str, Json] = {}

    def run(self, ended: threading.Event) -> None:
        """Run until `ended` is set."""
        pause = MIN_RETRY_SECONDS
        while not ended.is_set():
            try:
                version = self._list()
                pause = MIN_RETRY_SECONDS
                while not ended.is_set():
                    version = self._watch(version, ended)
            except WatchExpired:
                continue
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                logger.warning(
                    "listing the replicas failed: %s; trying again",
                    error,
                    extra=log_event("ReplicaListFailed", object=self._object, reason=error),
                )
                ended.wait(pause * random.uniform(0.8, 1.2))  # noqa: S311 - spreads retries
                pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _list(self) -> str:
        connection = self._connect(LIST_SECONDS)
        try:
            value = json.load(self._get(connection, self._query))
        finally:
            connection.close()
        self._slices = {piece["metadata"]["name"]: piece for piece in value["items"]}
        self._listener(self._slices)
        return str(value["metadata"]["resourceVersion"])

    def _watch(self, version: str, ended: threading.Event) -> str:
        """Watch from a resource version; returns the last version."""
        query = {
            **self._query,
            "watch": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
            "allowWatchBookmarks": "true",
        }
        connection = self._connect(READ_TIMEOUT_SECONDS)
        try:
            for line in _lines(self._get(connection, query)):
                if ended.is_set():
                    break
                version = self._apply(json.loads(line)) or version
        finally:
            connection.close()
        return version

    def _apply(self, event: Json) -> str:
        kind, value = event["type"], event["object"]
        if kind == "ERROR":
            if value.get("code") == GONE:
                raise WatchExpired
            raise ValueError(f"the watch ended: {value.get('message')}")
        metadata = value["metadata"]
        if kind != "BOOKMARK":
            if kind == "DELETED":
                self._slices.pop(metadata["name"], None)
            else:
                self._slices[metadata["name"]] = value
            self._listener(self._slices)
        return str(metadata["resourceVersion"])

    def _connect(self, timeout_seconds: float) -> http.client.HTTPConnection:
        url = urllib.parse.urlsplit(self._access.url)
        host = url.hostname or ""
        if url.scheme == "http":
            return http.client.HTTPConnection(host, url.port, timeout=timeout_seconds)
        # Read each time: certificate authorities change.
        trust = ssl.create_default_context(cafile=None if self._access.authority is None else self._access.authority)
        return http.client.HTTPSConnection(host, url.port, timeout=timeout_seconds, context=trust)

    def _get(self, connection: http.client.HTTPConnection, query: Mapping[str, str]) -> http.client.HTTPResponse:
        headers = {"accept": "application/json", "user-agent": "penstock-gateway"}
        if self._access.token is not None:
            headers["authorization"] = f"Bearer {self._access.token.read_text().strip()}"
        connection.request("GET", f"{self._path}?{urllib.parse.urlencode(query)}", headers=headers)
        response = connection.getresponse()
        if response.status == GONE:
            raise WatchExpired
        if response.status != 200:
            body = response.read(500).decode(errors="replace")
            raise ValueError(f"it answered {response.status}: {body}")
        return response


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while line := response.readline():
        if line.strip():
            yield line
