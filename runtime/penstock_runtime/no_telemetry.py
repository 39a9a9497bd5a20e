"""Disables the telemetry of libraries: processes that optimise or serve a model send no usage data.

OpenVINO and ONNX Runtime send an event when they are imported and when a model is loaded, and keep a number of the
machine in the home directory; neither asks. Both decide while they are imported, which is why this comes before them.
"""

from __future__ import annotations

import os
import sys

REFUSALS = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Environment variables that ONNX Runtime and huggingface_hub obey; child processes inherit them."""
REPORTER = "openvino_telemetry"
"""OpenVINO sends through this package, and has a stub in case it is not installed."""


def keep_libraries_silent() -> None:
    """Disable telemetry, unless the variables are set or the package is imported already."""
    for name, value in REFUSALS.items():
        os.environ.setdefault(name, value)
    sys.modules.setdefault(REPORTER, None)  # type: ignore[arg-type]  # None: it is not found
