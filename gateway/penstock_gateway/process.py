"""The process of the gateway's pod: starts HAProxy, keeps its servers equal to the replicas, and drains on SIGTERM.

If HAProxy ends, this process ends as well, and the kubelet restarts both.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import IO

from penstock_gateway.certificate import CertificateSync
from penstock_gateway.config import configuration
from penstock_gateway.follow import ApiServerAccess, Follower, Json
from penstock_gateway.haproxy import HAProxySocket, ServerSync
from penstock_gateway.keys import KeySync
from penstock_gateway.log_events import configure_logs, log_event
from penstock_gateway.settings import GatewayError, GatewaySettings
from penstock_gateway.slices import SliceHistory

START_SECONDS = 10.0
RETRY_SECONDS = 0.5
CLIENT_LEFT = b"aborting Lua processing on expired timeout"
"""HAProxy reports each client that leaves while its request is held in this way, in two lines."""

logger = logging.getLogger("penstock.gateway")


class GatewayProcess:
    """One run of the gateway."""

    def __init__(self, settings: GatewaySettings, access: ApiServerAccess, *, folder: Path) -> None:
        """GatewayError if the certificate is missing."""
        self._settings = settings
        self._socket = folder / "haproxy.sock"
        self._file = folder / "haproxy.cfg"
        self._command = ["haproxy", "-db", "-f", str(self._file)]
        self._haproxy = HAProxySocket(self._socket)
        tls = bool(settings.tls_folder)
        self._sync = ServerSync(self._haproxy.send, concurrency=settings.concurrency, tls=tls)
        self._certificate = CertificateSync(Path(settings.tls_folder), self._haproxy.send) if tls else None
        self._keys = KeySync(Path(settings.keys_folder), self._haproxy.send) if settings.keys_folder else None
        self._follower = Follower(
            access, namespace=settings.namespace, service=settings.service, listener=self._on_slices
        )
        self._ended = threading.Event()
        self._signalled = threading.Event()
        self._is_ready = False
        self._history = SliceHistory(settings.canary)
        self._lock = threading.Lock()

    def run(self) -> int:
        """Run until a signal; returns the exit status. GatewayError if HAProxy ends by itself."""
        self._file.write_text(configuration(self._settings, socket=self._socket))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output = threading.Thread(target=_forward, args=(process.stdout,), daemon=True, name="output")
        output.start()
        try:
            self._haproxy.wait_until_ready(START_SECONDS)
            if self._keys is not None:
                self._keys.update()
            follower = threading.Thread(target=self._follower.run, args=(self._ended,), daemon=True, name="follower")
            follower.start()
            while process.poll() is None and not self._signalled.wait(RETRY_SECONDS):
                self._retry()
            if process.poll() is None:
                self._drain(process)
        finally:
            self._ended.set()
            if process.poll() is None:
                process.kill()
            status = process.wait()
            output.join(START_SECONDS)
        if not self._signalled.is_set():
            raise GatewayError(f"HAProxy ended by itself, with status {status}: see its log above.")
        logger.info("drained", extra=log_event("GatewayDrained"))
        return 0

    def _on_slices(self, slices: Mapping[str, Json]) -> None:
        with self._lock:
            self._history.update(slices, time.monotonic())
            if self._history.service_removed:
                # The endpoint is being deleted, and this gateway too. Health checks detect replicas that have ended.
                logger.info(
                    "the Service of the replicas was deleted: keeping the last known replicas",
                    extra=log_event("ServiceDeleted", object=f"{self._settings.namespace}/{self._settings.service}"),
                )
            self._set_replicas()
        if not self._is_ready:
            # Not ready before the replicas are known.
            self._haproxy.send("gateway ready")
            self._is_ready = True
            logger.info("ready: the replicas are known", extra=log_event("GatewayReady"))

    def _set_replicas(self) -> None:
        self._sync.set_replicas(self._history.replicas(), canary_percent=self._history.canary_percent)

    def _retry(self) -> None:
        try:
            with self._lock:
                if self._history.drop_old(time.monotonic()):
                    self._set_replicas()
            self._sync.retry()
            if self._keys is not None:
                self._keys.update()
            if self._certificate is not None:
                self._certificate.update()
        except (OSError, ValueError) as error:
            logger.warning("HAProxy does not answer: %s", error, extra=log_event("HAProxyUnavailable", reason=error))

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        """Keep running while the Service removes this pod, and until no request is held: a stopping HAProxy accepts no
        new servers. Then let HAProxy finish its requests."""
        logger.info("draining", extra=log_event("GatewayDraining"))
        self._haproxy.send("gateway drain")
        begin = time.monotonic()
        settings = self._settings
        while process.poll() is None:
            elapsed = time.monotonic() - begin
            if elapsed >= settings.drain_seconds + settings.finish_seconds:
                break
            self._retry()
            if elapsed >= settings.drain_seconds and self._haproxy.held() == 0:
                break
            time.sleep(min(RETRY_SECONDS, max(0.05, settings.drain_seconds - elapsed)))
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
            left = settings.drain_seconds + settings.finish_seconds - (time.monotonic() - begin)
            try:
                process.wait(max(1.0, left))
            except subprocess.TimeoutExpired:
                seconds = round(time.monotonic() - begin)
                logger.warning(
                    "requests were cut off %d s after the signal", seconds, extra=log_event("RequestsCutOff")
                )

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._signalled.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled.set()


def _forward(lines: IO[bytes]) -> None:
    """Copy HAProxy's output to this process's, without the lines that clients could flood it with."""
    with lines:
        for line in lines:
            if CLIENT_LEFT not in line:
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()


def main() -> int:
    """Entry point of the pod, configured by environment variables; returns the exit status."""
    configure_logs()
    try:
        settings = GatewaySettings.from_environment(os.environ)
        with tempfile.TemporaryDirectory(prefix="gateway-") as folder:
            return GatewayProcess(settings, ApiServerAccess.in_pod(os.environ), folder=Path(folder)).run()
    except GatewayError as error:
        logger.error("the gateway cannot run: %s", error, extra=log_event("GatewayFailed"))  # noqa: TRY400 - complete without a traceback
        return 1
