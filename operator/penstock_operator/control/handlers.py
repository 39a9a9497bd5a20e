"""Sets up Kopf, which watches ModelEndpoints, OptimizedModels and HardwareClasses: its handlers, access and settings.

Only login, start-up and event handlers are used. Kopf's change handlers (create, update, resume, delete) and timers
would write a progress annotation into every object and a finalizer into most. docs/decisions/kopf.md has the reasons
for each feature of Kopf that is used or not.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from penstock_operator.cluster.errors import ClusterError, NotLeading
from penstock_operator.cluster.store import Store, event_handler

SILENCE_SECONDS = 75.0
START_RETRY_SECONDS = 5.0


def registry(
    stores: tuple[Store[Any], ...],
    *,
    start: Callable[[], Awaitable[None]],
    relisted: Callable[[], None],
    login: Callable[[], Awaitable[kopf.ConnectionInfo]],
) -> kopf.OperatorRegistry:
    """Handlers that keep the stores up to date.

    `start` is called before the watches begin, and again until it succeeds. `relisted` is called when Kopf lists a kind
    again after a gap in its watch: it does not report the objects that were deleted in the gap.
    """
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    async def _login(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    @kopf.on.startup(registry=handlers, errors=kopf.ErrorsMode.PERMANENT)
    async def _start(**_: Any) -> None:
        try:
            await start()
        except NotLeading as error:
            raise kopf.PermanentError(str(error)) from error
        except ClusterError as error:
            raise kopf.TemporaryError(str(error), delay=START_RETRY_SECONDS) from error

    for store in stores:
        kind = store.kind
        on_event = kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=handlers)
        on_event(event_handler(store, relisted))
    return handlers


class _Connection(kopf.ConnectionInfo):
    """Verifies certificates as the client does (`cluster.kubernetes`): chain and host, not RFC 5280's extensions."""

    def as_ssl_context(self) -> ssl.SSLContext:
        """Kopf's context without the strict flag that Python 3.13 added."""
        made = super().as_ssl_context()
        made.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return made


async def connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    """The client's access to the cluster, for Kopf. Kopf requests it again when the API server rejects it: tokens
    expire."""
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
    """Kopf's settings."""
    chosen = kopf.OperatorSettings()
    # The operator posts Events itself, with stable reasons; Kopf would post its log.
    chosen.posting.enabled = False
    # No watch of all CRDs and namespaces of the cluster, which would need more rights: the CRDs exist at start-up.
    chosen.scanning.disabled = True
    chosen.peering.standalone = True
    chosen.watching.server_timeout = 600
    chosen.watching.connect_timeout = 5
    chosen.watching.inactivity_timeout = SILENCE_SECONDS
    chosen.watching.chunk_size = 500
    chosen.watching.reconnect_backoff = 0.5
    chosen.networking.request_timeout = api_timeout_seconds
    # A restarting API server is away for a minute or two; the lease limits how long the operator waits for it.
    chosen.networking.error_backoffs = (0.5, 1, 2, 3, 5, 5, 5, 5, 5, 5, 10, 10, 10, 10, 10, 10)
    chosen.networking.enforce_retry_after = True
    chosen.process.ultimate_exiting_timeout = 20
    return chosen
