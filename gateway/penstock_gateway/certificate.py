"""The certificate of the gateway, from a mounted Secret: HAProxy gets it again when it changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from penstock_gateway.log_events import log_event
from penstock_gateway.settings import GatewayError

CERTIFICATE, KEY = "tls.crt", "tls.key"
LONGEST_FILE = 65_536
"""Bytes of a file that are read."""

logger = logging.getLogger("penstock.gateway")


def read_certificate(folder: Path) -> str:
    """Certificate chain and key, in PEM without empty lines, which would end a command of HAProxy. OSError."""
    # The kubelet replaces both files at once, by pointing the link `..data` to another folder.
    data = folder / "..data"
    present = data.resolve() if data.is_symlink() else folder
    lines: list[str] = []
    for name in (CERTIFICATE, KEY):
        with (present / name).open("rb") as opened:
            text = opened.read(LONGEST_FILE).decode("ascii", errors="replace")
        lines += (line.strip() for line in text.splitlines() if line.strip())
    return "\n".join(lines)


class CertificateSync:
    """Keeps HAProxy's certificate equal to the folder's. New connections get a new one."""

    def __init__(self, folder: Path, send: Callable[[str], str]) -> None:
        """GatewayError when there is no certificate: HAProxy would not start, and explain it less well."""
        self._folder = folder
        self._send = send
        try:
            self._sent = read_certificate(folder)
        except OSError as error:
            raise GatewayError(
                f"the certificate cannot be read: {error}. Create the Secret that spec.tls names: "
                "kubectl create secret tls NAME --cert=FILE --key=FILE."
            ) from error

    @property
    def file(self) -> Path:
        """The file of the certificate, by which HAProxy knows it. The key is in the same folder."""
        return self._folder / CERTIFICATE

    def update(self) -> None:
        """Send the certificate if it has changed. OSError if HAProxy does not answer; what cannot be read or is refused
        stays as it was."""
        try:
            present = read_certificate(self._folder)
        except OSError as error:
            logger.debug("the certificate cannot be read: %s", error)
            return
        if present == self._sent:
            return
        reply = self._send(f"set ssl cert {self.file} <<\n{present}\n")
        if "ransaction" in reply:
            reply = self._send(f"commit ssl cert {self.file}")
        # A refused one is sent again after its next change only.
        self._sent = present
        if reply.endswith("Success!"):
            logger.info("new connections get the new certificate", extra=log_event("GatewayCertificateChanged"))
            return
        self._send(f"abort ssl cert {self.file}")
        logger.warning(
            "HAProxy refused the changed certificate, and the one before stays in use: %s",
            reply.replace("\n", " ")[:500],
            extra=log_event("GatewayCertificateUnusable", reason="Refused"),
        )
