"""Keeps libraries from reporting to their makers: nothing that optimises or serves a model talks to strangers.

OpenVINO and ONNX Runtime send an event when they are imported and when a model is loaded, and keep a number of the
machine in the home directory; neither asks. Both decide while they are imported, which is why this comes before them.
"""

from __future__ import annotations

import os
import sys

REFUSALS = {
    "ORT_DISABLE_TELEMETRY": "1",
    "NNCF_CI": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Environment variables that ONNX Runtime, NNCF and huggingface_hub obey; processes that we start inherit them."""
REPORTER = "openvino_telemetry"
"""OpenVINO sends through this package, and has a stub for where it is not found."""


def keep_libraries_silent() -> None:
    """Refuse, where nobody has decided otherwise by setting the variable or importing the package before."""
    for name, value in REFUSALS.items():
        os.environ.setdefault(name, value)
    sys.modules.setdefault(REPORTER, None)  # type: ignore[arg-type]  # None: it is not found
