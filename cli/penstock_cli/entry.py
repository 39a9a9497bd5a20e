"""The `penstock` console script: Ctrl-C during its imports exits without a traceback.

It imports nothing that takes time before the handler is installed.
"""

from __future__ import annotations

import signal
import sys

from penstock.errors import MissingPackage
from penstock.process import exit_on_signal, open_closed_streams, print_error


def main() -> None:
    """Entry point."""
    open_closed_streams()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in the background of a shell's script
        exit_on_signal(signal.SIGINT)
    try:
        from penstock_cli.main import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"click", "rich"}:
            raise
        remedy = "Run pip install 'penstock[cli]', with [optimizer] or [runtime] as well to optimise or serve"
        print_error(
            MissingPackage(f"{package} is not installed here, and the penstock command needs it", remedy=remedy)
        )
        sys.exit(1)

    # The commands have handlers of their own: some print how to resume.
    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
