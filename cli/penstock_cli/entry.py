"""The `penstock` console script: installs signal handlers first, then imports the command line.

Ctrl-C during the imports exits without a traceback, so nothing slow is imported before the handler is installed.
"""

from __future__ import annotations

import signal
import sys

from penstock.process import exit_on_signal, open_closed_streams, print_error
from penstock_cli.packages import PACKAGES_OF_THE_COMMAND, missing_package


def main() -> None:
    """Entry point."""
    open_closed_streams()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise it is ignored, as for background jobs of a shell script
        exit_on_signal(signal.SIGINT)
    try:
        from penstock_cli.main import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES_OF_THE_COMMAND:
            raise
        print_error(missing_package(package, None))
        sys.exit(1)

    # The commands install their own handlers: some print how to resume.
    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
