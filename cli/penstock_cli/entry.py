"""The `penstock` console script: installs signal handlers first, then imports the command line.

Ctrl-C during the imports exits without a traceback, so nothing slow is imported before the handler is installed.
It also checks that the packages of an extra are installed, and names the extra when they are not.
"""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec

from penstock.errors import MissingPackage
from penstock.process import exit_on_signal, open_closed_streams, print_error

_OPTIMIZER = ("onnx",)
"""Packages that every optimisation needs. Looked up, not imported: a process that only serves does not load them."""
PACKAGES_OF_THE_COMMAND = ("click", "rich")
"""Packages of the command line itself."""
_EXTRAS = {
    "serve": "optimizer",
    "optimize": "optimizer",
    "bench": "optimizer",
    "certify": "optimizer",
    "index": "optimizer",
    **dict.fromkeys(("embed", "classify", "rerank", "generate", "bulk"), "optimizer,index"),
    "simulate": "simulator",
    "plan": "runtime",
}
"""Command -> the extra with the packages that it imports. `runtime`, which `optimizer` includes, serves artefacts."""


def require_optimizer() -> None:
    """Raise MissingPackage where only the runtime is installed, as in the runtime's image."""
    absent = [name for name in _OPTIMIZER if not _is_installed(name)]
    if absent:
        raise MissingPackage(
            f"{', '.join(absent)} not installed here: artefacts can be served, and nothing can be optimised",
            remedy="Run pip install 'penstock[optimizer]', or take the image penstock-optimizer",
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def missing_package(package: str, command: str | None) -> MissingPackage:
    """The error for a package that `command` imports and that is not installed."""
    if package in PACKAGES_OF_THE_COMMAND:
        return MissingPackage(
            f"{package} is not installed here, and the penstock command needs it",
            remedy="Run pip install 'penstock[cli]', with [optimizer] or [runtime] as well to optimise or serve",
        )
    extra = _EXTRAS.get(command or "", "runtime")
    return MissingPackage(
        f"{package} is not installed here, and penstock {command or ''}".rstrip() + " needs it",
        remedy=f"Run pip install 'penstock[cli,{extra}]'"
        + (", or take the image penstock-optimizer" if extra == "optimizer" else ""),
    )


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
