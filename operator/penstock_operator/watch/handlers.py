"""Kopf's part: it watches ModelEndpoints and hands each event on. The only module that knows Kopf's decorators.

Events only, on purpose. Kopf's state-changing handlers (create, update, resume, delete, timers) would write an
annotation of progress into every object and a finalizer into most: twice the writes, and objects that cannot be deleted
while the operator is down. What Kopf's change detection offers, the reconcile has from comparing what is with what
should be.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from penstock_operator.cluster.api import MODEL_ENDPOINT, Json

SILENCE_SECONDS = 75.0


def registry(
    heard: Callable[[str | None, Json], None], login: Callable[[], Awaitable[kopf.ConnectionInfo]]
) -> kopf.OperatorRegistry:
    """Handlers that call `heard` with the type and the object of each event of a ModelEndpoint."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    async def _login(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    @kopf.on.event(MODEL_ENDPOINT.group, MODEL_ENDPOINT.version, MODEL_ENDPOINT.plural, registry=handlers)
    async def _event(event: Any, **_: Any) -> None:
        heard(event["type"], event["object"])

    return handlers


class _Connection(kopf.ConnectionInfo):
    """Verifies as the client does (`cluster.access`): chain and host, not the form of certificates."""

    def as_ssl_context(self) -> ssl.SSLContext:
        """Kopf's, without what Python 3.13 added."""
        made = super().as_ssl_context()
        made.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return made


async def connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    """The client's way into the cluster, for Kopf. Asked for again when the API server refuses it: tokens expire."""
    authorization = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _, token = (authorization or "").partition(" ")
    return _Connection(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=None if configuration.verify_ssl else True,
        scheme=scheme or None,
        token=token.strip() or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )


def settings(*, api_timeout_seconds: float) -> kopf.OperatorSettings:
    """Kopf as it is to behave here."""
    chosen = kopf.OperatorSettings()
    # Events are posted by us, with stable reasons; Kopf would post its own log.
    chosen.posting.enabled = False
    # No watch of all CRDs and namespaces of the cluster, and no rights for it: ours are there, or we wait for them.
    chosen.scanning.disabled = True
    chosen.peering.standalone = True
    chosen.watching.server_timeout = 600
    chosen.watching.connect_timeout = 5
    chosen.watching.inactivity_timeout = SILENCE_SECONDS
    chosen.watching.chunk_size = 500
    chosen.watching.reconnect_backoff = 0.5
    chosen.networking.request_timeout = api_timeout_seconds
    # An API server that restarts is away for a minute or two; the lease says when it has been too long.
    chosen.networking.error_backoffs = (0.5, 1, 2, 3, 5, 5, 5, 5, 5, 5, 10, 10, 10, 10, 10, 10)
    chosen.networking.enforce_retry_after = True
    chosen.process.ultimate_exiting_timeout = 20
    return chosen
