"""The process of the gateway's pod: starts HAProxy, keeps its servers as the cluster has them, and ends in order.

HAProxy's end is this process's end, and the kubelet starts both again. Ours need not be HAProxy's: it is told to stop.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from penstock_gateway.config import configuration
from penstock_gateway.control import Control
from penstock_gateway.follow import Access, Follower, Json
from penstock_gateway.roster import Roster
from penstock_gateway.settings import GatewayError, GatewaySettings
from penstock_gateway.slices import Known

START_SECONDS = 10.0
TURN_SECONDS = 0.5

logger = logging.getLogger("penstock.gateway")


class Gateway:
    """One run."""

    def __init__(self, settings: GatewaySettings, access: Access, *, folder: Path, haproxy: str = "haproxy") -> None:
        self._settings = settings
        self._socket = folder / "haproxy.sock"
        self._file = folder / "haproxy.cfg"
        self._command = [haproxy, "-db", "-f", str(self._file)]
        self._control = Control(self._socket)
        self._roster = Roster(self._control.tell, concurrency=settings.concurrency)
        self._follower = Follower(
            access, namespace=settings.namespace, service=settings.service, listener=self._changed
        )
        self._over = threading.Event()
        self._signalled = threading.Event()
        self._announced = False
        self._known = Known()
        self._knowing = threading.Lock()

    def run(self) -> int:
        """Until a signal, or HAProxy ends by itself: that is a failure. The exit status."""
        self._file.write_text(configuration(self._settings, socket=self._socket))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        process = subprocess.Popen(self._command)
        try:
            self._control.wait(START_SECONDS)
            follower = threading.Thread(target=self._follower.run, args=(self._over,), daemon=True, name="follower")
            follower.start()
            while process.poll() is None and not self._signalled.wait(TURN_SECONDS):
                self._turn()
            if process.poll() is None:
                self._drain(process)
        finally:
            self._over.set()
            if process.poll() is None:
                process.kill()
            status = process.wait()
        if not self._signalled.is_set():
            raise GatewayError(f"HAProxy ended by itself, with status {status}: see its log above.")
        logger.info("drained")
        return 0

    def _changed(self, slices: Mapping[str, Json]) -> None:
        with self._knowing:
            self._known.becomes(slices, time.monotonic())
            if self._known.service_gone:
                # It was taken away, and this gateway is about to be. A check finds out when a replica is gone.
                logger.info("the Service that lists the replicas is gone: going on with those that were known last")
            self._roster.want(self._known.servers())
        if not self._announced:
            # Only who knows the replicas can tell that there are none.
            self._control.tell("gateway ready")
            self._announced = True
            logger.info("ready: the replicas are known")

    def _turn(self) -> None:
        try:
            with self._knowing:
                if self._known.forget(time.monotonic()):
                    self._roster.want(self._known.servers())
            self._roster.again()
        except (OSError, ValueError) as error:
            logger.warning("HAProxy does not answer: %s", error)

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        """Go on while the Service forgets this pod, and until nothing is held: HAProxy that is stopping hears of no
        replica any more. Then let HAProxy finish what it has."""
        logger.info("draining")
        self._control.tell("gateway drain")
        begin = time.monotonic()
        settings = self._settings
        while process.poll() is None:
            elapsed = time.monotonic() - begin
            if elapsed >= settings.drain_seconds + settings.finish_seconds:
                break
            self._turn()
            if elapsed >= settings.drain_seconds and self._control.held() == 0:
                break
            time.sleep(min(TURN_SECONDS, max(0.05, settings.drain_seconds - elapsed)))
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
            left = settings.drain_seconds + settings.finish_seconds - (time.monotonic() - begin)
            try:
                process.wait(max(1.0, left))
            except subprocess.TimeoutExpired:
                logger.warning("requests were cut off %d s after the signal", round(time.monotonic() - begin))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._signalled.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled.set()


def main() -> int:
    """Of the pod: everything comes from the environment. The exit status."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        settings = GatewaySettings.from_environment(os.environ)
        with tempfile.TemporaryDirectory(prefix="gateway-") as folder:
            return Gateway(settings, Access.in_pod(os.environ), folder=Path(folder)).run()
    except GatewayError as error:
        logger.error("%s", error)  # noqa: TRY400 - it says all there is to say
        return 1
