"""TLS for connections: certificate and key from files that are read again when they change, and the TLS layer between a
connection and its socket.

The layer passes the state of the socket through to the connection: how much is still to be sent, and when to stop
writing. asyncio's TLS transport hides it, so that a client could hold any amount of memory by not reading; and it
presents a connection only after the handshake, so that handshakes would not count to the limits.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from penstock.errors import SettingError
from penstock.logs import log_event

logger = logging.getLogger("penstock.http")

READ_BYTES = 256 * 2**10
"""Decrypted at a time: as much as the event loop reads at a time."""
CERTIFICATE_VARIABLE, KEY_VARIABLE = "PENSTOCK_TLS_CERTIFICATE", "PENSTOCK_TLS_KEY"


class TlsFiles:
    """Certificate and key of the server. `refresh` reads them again if they have changed."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """SettingError when they cannot be read or do not belong together."""
        self._certificate = certificate
        self._key = key
        self._signature = self._present()
        try:
            self.context = _context(certificate, key)
        except (OSError, ValueError) as error:
            raise SettingError(
                f"{CERTIFICATE_VARIABLE} and {KEY_VARIABLE}: {certificate} and {key} cannot be used ({error})",
                field=CERTIFICATE_VARIABLE,
                remedy="Give PEM files of a certificate with its chain, and of its key without a password; on a "
                "cluster, create the Secret that spec.tls names: kubectl create secret tls NAME --cert=FILE --key=FILE",
            ) from error

    def refresh(self) -> None:
        """Use changed files for new connections. What cannot be read or does not fit leaves everything as it was."""
        signature = self._present()
        if signature == self._signature:
            return
        try:
            context = _context(self._certificate, self._key)
        except (OSError, ValueError) as error:
            # Reported once: the next attempt follows the next change.
            self._signature = signature
            logger.warning(
                "the changed certificate cannot be used, and the one before stays in use: %s",
                error,
                extra=log_event("CertificateUnusable", reason=error),
            )
            return
        if signature != self._present():
            # One file was read before it changed, the other one after it: read both again.
            return
        self._signature = signature
        self.context = context
        logger.info(
            "new connections get the new certificate in %s",
            self._certificate,
            extra=log_event("CertificateChanged", object=str(self._certificate)),
        )

    def _present(self) -> tuple[object, ...]:
        return _signature(self._certificate), _signature(self._key)


def _signature(path: Path) -> tuple[int, ...]:
    """Changes with the content; empty while there is no file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    """The settings of connections: TLS 1.2 or newer. OSError (ssl.SSLError is one) or ValueError if that fails."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION
    made.set_alpn_protocols(["http/1.1"])
    for path in (certificate, key):
        path.read_bytes()  # OpenSSL's error for a missing file does not name it
    # Without the function, OpenSSL would read the password of an encrypted key from the terminal.
    made.load_cert_chain(certificate, key, password=_no_password)
    return made


def _no_password() -> str:
    raise ValueError("the key has a password")


class TlsLayer(asyncio.Protocol):
    """Decrypts the data of a socket for a connection, which writes through a `TlsTransport`."""

    def __init__(self, context: ssl.SSLContext, connection: asyncio.Protocol) -> None:
        self._connection = connection
        self._incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, outgoing, server_side=True)
        self._outgoing = outgoing
        self._transport: TlsTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected. Its connection counts from now on, before the handshake."""
        # uvloop's transport is another class with the same methods.
        self._transport = TlsTransport(
            cast("asyncio.Transport", transport), self._session, self._outgoing, self._read_rest
        )
        self._connection.connection_made(self._transport)

    def data_received(self, data: bytes) -> None:
        """Encrypted bytes have arrived."""
        transport = self._transport
        if transport is None:
            return
        if transport.has_ended:
            # Only counted and dropped by the connection.
            self._connection.data_received(data)
            return
        self._incoming.write(data)
        self._decrypt(transport)

    def _read_rest(self) -> None:
        """The connection reads again: pass on the data that was received before it paused."""
        if self._transport is not None and self._transport.is_established:
            self._decrypt(self._transport)

    def _decrypt(self, transport: TlsTransport) -> None:
        try:
            if not transport.is_established:
                self._session.do_handshake()
                transport.begin()
            self._read(transport)
        except ssl.SSLWantReadError:
            transport.flush()
        except ssl.SSLError as error:
            # The client may be of another protocol, or refuse the certificate: it gets an alert.
            logger.debug("a TLS connection failed: %s", error)
            transport.flush()
            transport.close_socket()

    def _read(self, transport: TlsTransport) -> None:
        """Pass on what can be decrypted, until the connection pauses. SSLWantReadError when the rest of a record is
        missing."""
        while not (transport.is_closing() or transport.has_ended or transport.is_paused):
            try:
                data = self._session.read(READ_BYTES)
            except ssl.SSLZeroReturnError:
                data = b""
            if not data:
                self._connection.eof_received()
                return
            self._connection.data_received(data)

    def eof_received(self) -> bool | None:
        """The client has closed its side."""
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._connection.connection_lost(exc)
        self._transport = None

    def pause_writing(self) -> None:
        """The client reads more slowly than is written."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """The client has read enough."""
        self._connection.resume_writing()


class TlsTransport(asyncio.Transport):
    """The transport of a connection over TLS: encrypts, and leaves all else to the socket's transport."""

    def __init__(
        self, inner: asyncio.Transport, session: ssl.SSLObject, outgoing: ssl.MemoryBIO, read_rest: Callable[[], None]
    ) -> None:
        """`read_rest` passes on data that was decrypted too late for a connection that had paused."""
        super().__init__()
        self._inner = inner
        self._read_rest = read_rest
        self.is_paused = False
        self._session = session
        self._outgoing = outgoing
        self.is_established = False
        """The handshake is complete."""
        self._waiting: list[bytes] = []
        """Written before the end of the handshake."""
        self._ends = False
        self.has_ended = False
        """The end of the data was sent: nothing more is decrypted."""

    def begin(self) -> None:
        """Send what waits for the end of the handshake, which is complete."""
        self.is_established = True
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.write(data)
        if self._ends:
            self.write_eof()
        self.flush()

    def flush(self) -> None:
        """Send the output of the TLS session."""
        if self._outgoing.pending and not self._inner.is_closing():
            self._inner.write(self._outgoing.read())

    def close_socket(self) -> None:
        """Close after a TLS error, where the session cannot be ended."""
        self._inner.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send; kept until the end of the handshake."""
        if self.has_ended or self._inner.is_closing() or not data:
            return
        if not self.is_established:
            self._waiting.append(bytes(data))
            return
        rest = memoryview(data)
        while rest:
            rest = rest[self._session.write(rest) :]
        self.flush()

    def can_write_eof(self) -> bool:
        """Always."""
        return True

    def write_eof(self) -> None:
        """End the data of this side; the client may go on sending."""
        self._ends = True
        if not self.is_established or self.has_ended:
            return
        self._end_session()
        if not self._inner.is_closing():
            self._inner.write_eof()

    def close(self) -> None:
        """End the session, and close once everything is sent. The client's own end is not waited for."""
        if self.is_established and not self.has_ended and not self._inner.is_closing():
            self._end_session()
        self._inner.close()

    def _end_session(self) -> None:
        self.has_ended = True
        with suppress(ssl.SSLError):  # SSLWantReadError: the client's own end has not come, which is normal
            self._session.unwrap()
        self.flush()

    def abort(self) -> None:
        """Close at once."""
        self._inner.abort()

    def is_closing(self) -> bool:
        """Whether it is closed or being closed."""
        return self._inner.is_closing()

    def get_write_buffer_size(self) -> int:
        """Bytes that the client has not read yet, as far as they are not in the kernel."""
        return self._inner.get_write_buffer_size() + sum(map(len, self._waiting))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of the socket, such as `peername`."""
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Read nothing more from the socket, and pass nothing on."""
        self.is_paused = True
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again, after the data that it had before."""
        if self.is_paused:
            self.is_paused = False
            # Not at once: the connection may be about to parse data that it has received before.
            asyncio.get_running_loop().call_soon(self._read_rest)
        self._inner.resume_reading()
