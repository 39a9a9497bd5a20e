"""The `penstock` script: Ctrl-C ends it without a traceback while what it is made of is still imported.

Nothing is imported here that takes time: what is left is the interpreter's own start.
"""

from __future__ import annotations

import signal

from penstock.ending import end_when_told
from penstock.standard_streams import open_closed_streams


def main() -> None:
    """Entry point."""
    open_closed_streams()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in the background of a shell's script
        end_when_told(signal.SIGINT)
    from penstock.cli.main import main as run

    # From here on it is the commands' affair: some say how to go on.
    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
