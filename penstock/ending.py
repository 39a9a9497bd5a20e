"""The first moments of a process in a container.

The kernel passes over signals that the first process of a container has not asked for. A pod that is deleted while its
process still imports its libraries would ignore that, go on, and be killed a minute later.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def end_when_told() -> None:
    """From now on SIGTERM and SIGINT end the process at once, until it has handlers of its own.

    The exit code is that of a process which the signal ended: 128 and its number.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)
