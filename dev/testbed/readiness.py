"""Waiting until a program of this machine answers: there is no event for that, so it polls."""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request

from testbed.daemon import Daemon
from testbed.errors import BedError

POLL_SECONDS = 0.05
ANSWER_SECONDS = 5


class AddressTaken(BedError):
    """Another process has the port that a program needs: other ports may work."""


def await_ready(daemon: Daemon, url: str, *, seconds: float, context: ssl.SSLContext | None = None) -> None:
    """Return once `url` answers 200.

    Raises AddressTaken or BedError, with the end of the log, when the program has ended or `seconds` are over.
    """
    deadline = time.monotonic() + seconds
    while not answers(url, context):
        words = daemon.last_words()
        if daemon.process is None:
            error = AddressTaken if "address already in use" in words else BedError
            raise error(f"{daemon.name} has ended:\n{words}\n")
        if time.monotonic() > deadline:
            raise BedError(f"{daemon.name} does not work after {seconds:g} s ({url}):\n{words}\n")
        time.sleep(POLL_SECONDS)


def answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    """Whether a GET of `url` gets a 200. A proxy of the environment is not used for this machine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=ANSWER_SECONDS) as answer:
            return bool(answer.status == http.HTTPStatus.OK)
    except urllib.error.HTTPError as error:
        error.close()  # it is an answer as well, with an open connection
        return False
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
