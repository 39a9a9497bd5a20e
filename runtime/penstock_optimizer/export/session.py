"""Runs a graph a few times, to see whether and what it answers. The engines that serve are elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ERRORS_ONLY = 3


def open_session(path: Path) -> Any:
    """An ONNX Runtime session of one thread; raises whatever the library does when the graph does not load."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
