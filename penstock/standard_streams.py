"""Standard input, output and error of a process that was started without one of them (`<&-`, some supervisors)."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Open /dev/null in the place of each that is closed; to be called before anything else is opened.

    The next file or socket would take its number: libuv ends the process when it is to close one of these, and what a
    library prints would go to a client.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # The lowest that is free, which is this one. Programs that are started, or started again, get it as well.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            # Python has None there.
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - to the end
