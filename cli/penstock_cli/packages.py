"""Checks that the packages of an extra are installed, and names the extra to install when they are not."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.errors import MissingPackage

_OPTIMIZER = ("onnx",)
"""Packages that every optimisation needs. Looked up, not imported: a process that only serves does not load them."""
PACKAGES_OF_THE_COMMAND = ("click", "rich")
"""Packages of the command line itself."""
_EXTRAS = {
    "serve": "optimizer",
    "optimize": "optimizer",
    "bench": "optimizer",
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
