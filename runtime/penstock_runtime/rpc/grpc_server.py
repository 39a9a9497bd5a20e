"""The gRPC server: a port for the Open Inference Protocol, in the event loop of the HTTP server.

Calls are answered by the HTTP application (`translation`), which checks tokens, counts and logs.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from penstock.errors import HostError, SettingError
from penstock_runtime.errors import MalformedBody, Overloaded, RequestError
from penstock_runtime.http.application import Application
from penstock_runtime.http.transport.message import Response
from penstock_runtime.http.transport.pool import client_key
from penstock_runtime.rpc.messages import CALLS, SERVICE, message
from penstock_runtime.rpc.translation import TRAILERS, failure, headers_of, http_request, rpc_response
from penstock_runtime.settings import Settings

AGE_GRACE_SECONDS = 60.0
"""Time that a connection has for its calls after it has reached its age."""


class RpcServer:
    """The port of gRPC. It has the limits of the HTTP port: message size, memory, connection age, queue."""

    def __init__(self, application: Application, settings: Settings) -> None:
        self._application = application
        self._settings = settings
        self._server: Any = None
        self._held_bytes = 0
        self._calls = 0
        self.port = 0
        """0 before `start`."""

    async def start(self) -> None:
        """Listen. SettingError without grpcio, HostError if the address is not available."""
        try:
            import grpc
        except ImportError as error:
            raise SettingError(
                "--grpc-port needs the package grpcio, which is not installed",
                field="--grpc-port",
                remedy="Install it (pip install 'penstock[grpc]'), or leave --grpc-port out",
            ) from error
        http, limits = self._settings.http, self._settings.limits
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", limits.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_connection_idle_ms", int(http.idle_timeout_seconds * 1000)),
            ("grpc.max_connection_age_grace_ms", int(AGE_GRACE_SECONDS * 1000)),
            ("grpc.so_reuseport", 0),
        ]
        if http.connection_age_seconds:
            options.append(("grpc.max_connection_age_ms", int(http.connection_age_seconds * 1000)))
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=http.max_connections)
        methods = {
            call: grpc.unary_unary_rpc_method_handler(
                self._handler(grpc, call), response_serializer=lambda made: made.SerializeToString()
            )
            for call in CALLS
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        address = f"{f'[{http.host}]' if ':' in http.host else http.host}:{http.grpc_port}"
        try:
            _check_address(http.host, http.grpc_port or 0)
            if http.tls_certificate is not None and http.tls_key is not None:
                self.port = self._server.add_secure_port(
                    address, _credentials(grpc, http.tls_certificate, http.tls_key)
                )
            else:
                self.port = self._server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:
            raise HostError(
                f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}",
                remedy="Choose another --grpc-port or --host (PENSTOCK_GRPC_PORT, PENSTOCK_HOST)",
            ) from error
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Accept no more calls; returns when those in progress are answered, or cancelled after `seconds`."""
        if self._server is not None:
            await self._server.stop(seconds)

    def _handler(self, grpc: Any, call: str) -> Callable[[bytes, Any], Awaitable[Any]]:
        async def handle(data: bytes, context: Any) -> Any:
            self._held_bytes += len(data)
            try:
                response, identifier = await self._answer(call, data, context)
            finally:
                self._held_bytes -= len(data)
            found = headers_of(response)
            trailers = tuple((name, found[name]) for name in found if name in TRAILERS)
            context.set_trailing_metadata((*trailers, ("x-request-id", identifier)))
            failed = failure(call, response)
            if failed is not None:
                code, words = failed
                await context.abort(getattr(grpc.StatusCode, code), words)
            return rpc_response(call, response)

        return handle

    async def _answer(self, call: str, data: bytes, context: Any) -> tuple[Response, str]:
        """The response of the HTTP application, and the x-request-id."""
        received = time.perf_counter()
        request = None
        identifier = uuid.uuid4().hex
        try:
            body = _parsed(call, data)
            request = http_request(call, body, context.invocation_metadata() or (), context.time_remaining())
            identifier = request.identifier.decode("ascii") or identifier
            request.identifier = identifier.encode()
            request.received = received
            request.address = address_of(context.peer())
            request.client = client_key(request.address)
            # Calls of one connection run at the same time, so that each counts as another caller.
            self._calls += 1
            request.caller = -self._calls
            if self._held_bytes > self._settings.http.max_held_bytes:
                raise Overloaded("calls of other clients fill the memory for messages", retry_after_seconds=1)
            self._application.admit(request, len(request.body))
        except RequestError as error:
            return self._application.refuse(request, error), identifier
        answered = self._application.answer(request)
        return answered if isinstance(answered, Response) else await answered, identifier


def _parsed(call: str, data: bytes) -> Any:
    """The message of a call; MalformedBody if it is none."""
    from google.protobuf.message import DecodeError

    try:
        return message(f"{call}Request").FromString(data)
    except DecodeError as error:
        raise MalformedBody(f"this is no {call}Request", remedy="Use the protocol's own definition") from error


def _check_address(host: str, port: int) -> None:
    """OSError if the address cannot be listened on. gRPC's own error has no reason, and its library logs to standard
    error by itself."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def address_of(peer: str) -> str:
    """The address in a peer of gRPC, such as `ipv4:10.0.0.1:4711`; empty for any other."""
    family, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if family in {"ipv4", "ipv6"} else ""


def _credentials(grpc: Any, certificate: Path, key: Path) -> Any:
    """Credentials that read changed files for new connections."""
    present: list[tuple[bytes, bytes]] = []

    def read() -> tuple[bytes, bytes]:
        return key.read_bytes(), certificate.read_bytes()

    def fetch() -> Any:
        try:
            found = read()
        except OSError:
            return None  # the ones before stay in use
        if present == [found]:
            return None
        present[:] = [found]
        return grpc.ssl_server_certificate_configuration([found])

    present.append(read())
    first = grpc.ssl_server_certificate_configuration(present)
    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=False)
