"""The optimisation key: the same key means the same result, so that it is looked up rather than made again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json

from penstock import __version__
from penstock.hardware import Isa
from penstock.manifest import SCHEMA_VERSION
from penstock.resources.endpoint import ModelEndpointSpec
from penstock_runtime.engines.native.library import ABI, library_path

SHORT = 16
"""Hexadecimal digits of the key in folder names."""
TOOLS = ("onnxruntime", "openvino", "nncf", "onnx", "tokenizers", "numpy")
"""Libraries whose version may change what is made, how fast it is, or what it answers."""


def toolchain() -> dict[str, str]:
    """Versions of ourselves and of the libraries that are installed, without importing them; and whether our own engine
    was compiled, since it can be added later."""
    versions = {"penstock": __version__}
    if library_path().is_file():
        versions["native"] = str(ABI)
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def optimization_key(spec: ModelEndpointSpec, *, model_digest: str, isa: Isa, cores: int, tools: dict[str, str]) -> str:
    """sha256, hexadecimal, over all that decides the result.

    The time budget is not in it: more time refines the same result. Nor are scaling and the class's name: pods of two
    classes with one instruction set share what was made.
    """
    optimization = spec.optimization
    parts = {
        "schema": SCHEMA_VERSION,
        "model": model_digest,
        "task": spec.task.value,
        "isa": isa.value,
        "cores": cores,
        "mode": optimization.mode.value,
        "engines": sorted(engine.value for engine in optimization.engines),
        "precisions": sorted(precision.value for precision in optimization.precisions),
        "accuracy": optimization.accuracy.model_dump(mode="json"),
        "when_no_candidate": optimization.when_no_candidate.value,
        "objective": spec.objective.model_dump(mode="json"),
        "workload": spec.workload.model_dump(mode="json"),
        "max_input_tokens": spec.serving.max_input_tokens,
        "toolchain": tools,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
