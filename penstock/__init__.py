"""The contract that all sides of Penstock share: resource types, artefact manifest, capacity model, names and units.

It imports pydantic, PyYAML and the standard library only, and no other package of Penstock. `load` and `Model`, which
run a model in this process, are looked up in `penstock_bulk` when they are first used.
"""

import importlib
from typing import Any

__version__ = "0.2.0"
IN_PROCESS = "penstock_bulk.model"
"""The module with the names of `__init__.pyi` that are not here (docs/decisions/python-api.md)."""


def __getattr__(name: str) -> Any:
    """`load` and `Model`. ModuleNotFoundError names the package that is missing, of the extra `runtime`."""
    if name not in {"load", "Model"}:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(IN_PROCESS), name)
    except ModuleNotFoundError as error:
        error.add_note("penstock.load needs pip install 'penstock[runtime]', or [optimizer] to optimise as well")
        raise
