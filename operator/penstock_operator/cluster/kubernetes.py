"""The client of a real API server, over `kubernetes.aio`.

Objects are JSON: the client's model classes would cost memory and do not have Penstock's kinds. Temporary failures
(429, 5xx, broken connections) are retried with back-off and Retry-After; every call has a time-out; every write first
checks that this process leads. docs/decisions/kubernetes-client.md explains what of the client is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from penstock.errors import SettingError
from penstock_operator.cluster.api import KINDS, Json, ListPage, ResourceKind, WatchEvent
from penstock_operator.cluster.errors import (
    Backoff,
    ClusterError,
    Conflict,
    NotFound,
    NotLeading,
    Refused,
    Unavailable,
    from_status,
)
from penstock_operator.facts.names import FIELD_MANAGER
from penstock_operator.metrics import API_REQUESTS, API_RETRIES, API_SECONDS

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


async def load_configuration(kubeconfig: str = "") -> Configuration:
    """The client's configuration: from the given file, else the pod's service account, else `$KUBECONFIG`.

    SettingError when there is none or it cannot be read.
    """
    configuration = Configuration()
    try:
        if not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists():
            config.load_incluster_config(client_configuration=configuration)
        else:
            path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
            await config.load_kube_config(path, client_configuration=configuration)
    except (config.ConfigException, OSError, ValueError) as error:
        raise SettingError(
            f"no way into a cluster: {error}",
            field="KUBECONFIG",
            remedy="Run in a pod with a service account, or set KUBECONFIG to the file of a cluster",
        ) from error
    # KubernetesPort retries by itself: the client's retries would hide 429s and multiply the attempts.
    configuration.retries = None
    configuration.connection_pool_maxsize = 64
    # Python 3.13 refuses certificates without RFC 5280's key identifiers, which some clusters have.
    configuration.disable_strict_ssl_verification = True
    return configuration


PAGE_SIZE = 500
SILENCE_SECONDS = 75.0
"""API servers send a bookmark about every minute: a watch without data for longer is dead."""
STREAM_SECONDS = 600
"""The server ends a watch after this time, so that streams spread over API servers again after a restart of one."""
RETRIES = Backoff(first_seconds=0.25, limit_seconds=8.0, attempts=5)
METADATA_ONLY = {"LIST": "PartialObjectMetadataList", "WATCH": "PartialObjectMetadata"}
"""Form of the answer for kinds of which the metadata is enough, by verb."""
NO_RETRIES = Backoff(first_seconds=0.25, limit_seconds=0.25, attempts=1)
logger = logging.getLogger(__name__)


class KubernetesPort:
    """A `ClusterPort`. An async context manager."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        timeout_seconds: float = 15.0,
        retries: Backoff = RETRIES,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._client = ApiClient(configuration)
        self._client.user_agent = "penstock-operator"
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=5.0)
        self._retries = retries
        self._may_write = may_write

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Json | None:
        """One object; None when it does not exist."""
        try:
            return await self._json("GET", kind, kind.path(namespace, name), f"get {kind} {_where(namespace, name)}")
        except NotFound:
            return None

    async def pages(self, kind: ResourceKind, namespace: str = "", *, labels: str = "") -> AsyncIterator[ListPage]:
        """All objects, 500 at a time."""
        query: dict[str, str] = {"limit": str(PAGE_SIZE)}
        if labels:
            query["labelSelector"] = labels
        while True:
            answer = await self._json("GET", kind, kind.path(namespace), f"list {kind}", query=query, verb="LIST")
            metadata = answer.get("metadata") or {}
            yield ListPage(tuple(answer.get("items") or ()), str(metadata.get("resourceVersion") or ""))
            if not metadata.get("continue"):
                return
            query["continue"] = str(metadata["continue"])

    async def watch(
        self, kind: ResourceKind, namespace: str = "", *, labels: str = "", resource_version: str
    ) -> AsyncIterator[WatchEvent]:
        """Events since then; ends when the server ends the stream or it falls silent."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(STREAM_SECONDS),
        }
        if labels:
            query["labelSelector"] = labels
        what = f"watch {kind}"
        limits = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENCE_SECONDS)
        # No retries here: the informer decides whether to continue or to list again.
        response = await self._send("GET", kind, kind.path(namespace), what, query=query, limits=limits, verb="WATCH")
        try:
            async for line in response.content:
                event = json.loads(line)
                value = event.get("object") or {}
                if event.get("type") == "ERROR":
                    raise from_status(int(value.get("code") or 500), json.dumps(value).encode(), what=what)
                yield WatchEvent(event["type"], value)
        except TimeoutError:
            logger.debug("%s fell silent for %g s", what, SILENCE_SECONDS)
        except (aiohttp.ClientError, ValueError) as error:
            # ValueError: a truncated line from a server that went away.
            raise Unavailable(f"{what}: {error or type(error).__name__}") from error
        finally:
            # Abort: a graceful TLS shutdown of an unused stream may take longer than this process lives.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            response.close()

    async def apply(self, value: Json, *, subresource: str = "") -> Json:
        """Server-side apply with force: the operator owns the fields that it sets."""
        kind = KINDS[value["kind"]]
        name, namespace = value["metadata"]["name"], value["metadata"].get("namespace", "")
        return await self._json(
            "PATCH",
            kind,
            kind.path(namespace, name, subresource),
            f"apply {kind}{'/' if subresource else ''}{subresource} {_where(namespace, name)}",
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            body=value,
            content_type="application/apply-patch+yaml",
            verb="APPLY",
            subresource=subresource,
        )

    async def create(self, value: Json) -> Json:
        """Create an object; Conflict when one of that name exists."""
        kind = KINDS[value["kind"]]
        name, namespace = value["metadata"]["name"], value["metadata"].get("namespace", "")
        query = {"fieldManager": FIELD_MANAGER}
        what = f"create {kind} {_where(namespace, name)}"
        return await self._json("POST", kind, kind.path(namespace), what, query=query, body=value)

    async def replace(self, value: Json) -> Json:
        """Replace the object if it has the given resourceVersion."""
        kind = KINDS[value["kind"]]
        name, namespace = value["metadata"]["name"], value["metadata"].get("namespace", "")
        query = {"fieldManager": FIELD_MANAGER}
        what = f"replace {kind} {_where(namespace, name)}"
        return await self._json("PUT", kind, kind.path(namespace, name), what, query=query, body=value)

    async def remove_owners(self, kind: ResourceKind, value: Json, entries: Sequence[int]) -> Json:
        """Remove managedFields entries if the object has the given resourceVersion."""
        metadata = value["metadata"]
        name, namespace, version = metadata["name"], metadata.get("namespace", ""), metadata["resourceVersion"]
        patch: list[Json] = [{"op": "test", "path": "/metadata/resourceVersion", "value": version}]
        # From the end: a removal shifts the later indexes.
        patch += [{"op": "remove", "path": f"/metadata/managedFields/{place}"} for place in sorted(entries)[::-1]]
        what = f"remove owners of fields of {kind} {_where(namespace, name)}"
        try:
            return await self._json(
                "PATCH",
                kind,
                kind.path(namespace, name),
                what,
                query={"fieldManager": FIELD_MANAGER},
                body=patch,
                content_type="application/json-patch+json",
            )
        except Refused as error:
            # The API server reports a failed test as 422.
            raise Conflict(str(error), status=error.status) from error

    async def scale(self, kind: ResourceKind, name: str, namespace: str, replicas: int, *, uid: str) -> Json:
        """Set `spec.replicas` of an object and nothing else. An apply would remove all other fields."""
        return await self._json(
            "PATCH",
            kind,
            kind.path(namespace, name),
            f"scale {kind} {_where(namespace, name)}",
            query={"fieldManager": FIELD_MANAGER},
            body={"metadata": {"uid": uid}, "spec": {"replicas": replicas}},
            content_type="application/merge-patch+json",
        )

    async def delete(self, kind: ResourceKind, name: str, namespace: str = "", *, uid: str = "") -> bool:
        """Delete in the background: the API server's garbage collector deletes the objects that it owns."""
        body: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._json(
                "DELETE", kind, kind.path(namespace, name), f"delete {kind} {_where(namespace, name)}", body=body
            )
        except NotFound:
            return False
        except ClusterError as error:
            # 409: another object of that name exists now, which must not be deleted.
            if error.status == 409 and uid:
                return False
            raise
        return True

    async def _json(self, method: str, kind: ResourceKind, path: str, what: str, **more: Any) -> Json:
        answer: Json = json.loads(await self._bytes(method, kind, path, what, **more))
        return answer

    async def _bytes(self, method: str, kind: ResourceKind, path: str, what: str, **more: Any) -> bytes:
        """The body of the answer."""
        failures = 0
        while True:
            try:
                response = await self._send(method, kind, path, what, **more)
                try:
                    return await response.read()
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise Unavailable(f"{what}: {error or type(error).__name__}") from error
                finally:
                    response.release()
            except Unavailable as error:
                # Every call is safe to repeat: reads, applies and deletes are idempotent, names are deterministic.
                failures += 1
                if not self._retries.allows(failures):
                    raise
                API_RETRIES.labels(kind.name, str(error.status)).inc()
                await asyncio.sleep(self._retries.seconds(failures, at_least=error.retry_after_seconds))

    async def _send(
        self,
        method: str,
        kind: ResourceKind,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | list[Json] | None = None,
        content_type: str = "application/json",
        limits: aiohttp.ClientTimeout | None = None,
        verb: str = "",
        subresource: str = "",
    ) -> aiohttp.ClientResponse:
        """One request; the response when it is a success, to be read or closed."""
        if method != "GET" and not self._may_write():
            raise NotLeading(f"{what}: this process does not hold the lease", remedy="The leader will do it")
        verb, label = verb or method, f"{kind}{'/' if subresource else ''}{subresource}"
        accepted = "application/json"
        if kind.metadata_only and verb in METADATA_ONLY:
            accepted = f"application/json;as={METADATA_ONLY[verb]};g=meta.k8s.io;v=v1"
        headers = {"Accept": accepted, "Content-Type": content_type, **self._client.default_headers}
        # Reads the pod's token again once a minute: projected tokens expire.
        token = await self._client.configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = token
        url = f"{self._client.configuration.host}{path}{'?' if query else ''}{urlencode(query or {})}"
        begin = time.monotonic()
        try:
            answer = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=limits or self._timeout
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            API_REQUESTS.labels(verb, label, "none").inc()
            raise Unavailable(
                f"{what}: {error or type(error).__name__}", remedy="Is the API server up, and reachable from here?"
            ) from error
        response: aiohttp.ClientResponse = answer.response
        API_REQUESTS.labels(verb, label, str(response.status)).inc()
        API_SECONDS.labels(verb).observe(time.monotonic() - begin)
        if response.status < 300:
            return response
        try:
            text = await response.read()
        except (aiohttp.ClientError, TimeoutError):
            text = b""
        finally:
            response.release()
        raise from_status(response.status, text, what=what, retry_after=response.headers.get("Retry-After", ""))


def _where(namespace: str, name: str) -> str:
    return f"{namespace}/{name}" if namespace else name
