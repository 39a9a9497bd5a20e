"""Whether the packages are here that only a part of Penstock needs."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.errors import MissingPackage

_OPTIMIZER = ("onnx", "safetensors")
"""What every optimisation begins with. Looked for and not imported: a server need not load them."""


def require_optimizer() -> None:
    """Raise MissingPackage where artefacts can be served and nothing can be optimised, as in the runtime's image."""
    absent = [name for name in _OPTIMIZER if find_spec(name) is None]
    if absent:
        raise MissingPackage(
            f"{', '.join(absent)} not installed here: artefacts can be served, and nothing can be optimised",
            remedy="Run pip install 'penstock[optimizer]', or take the image penstock-optimizer",
        )
