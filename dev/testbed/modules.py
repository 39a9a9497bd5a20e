"""Files of other projects, such as their CustomResourceDefinitions, from their Go modules: pinned and checked by the
go.mod and go.sum of a folder here, and kept in Go's own module cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import BedError
from testbed.tools import SOURCES, oldest_go


@dataclass(frozen=True)
class Module:
    """A module that a go.mod here requires."""

    folder: str
    """Below `dev/testbed/`."""
    path: str


KEDA = Module("keda", "github.com/kedacore/keda/v2")
GATEWAY_API = Module("gateway-api", "sigs.k8s.io/gateway-api")
PROMETHEUS_OPERATOR = Module("prometheus-operator", "github.com/prometheus-operator/prometheus-operator")


def files(module: Module) -> Path:
    """The folder of the module's files, downloaded if they are not there.

    Raises BedError without Go, or when the Go proxy does not give them.
    """
    if shutil.which("go") is None:
        raise BedError(
            f"the files of {module.path} come by Go, and there is no Go here",
            remedy=f"install Go {oldest_go(SOURCES / module.folder)} or later (https://go.dev/dl)",
        )
    result = subprocess.run(
        ["go", "mod", "download", "-json", module.path],
        cwd=SOURCES / module.folder,
        env={**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    answer = json.loads(result.stdout) if result.stdout.strip() else {}
    if result.returncode != 0 or "Dir" not in answer:
        why = answer.get("Error") or result.stderr.strip()
        raise BedError(
            f"{module.path} cannot be had: {why}",
            remedy="Modules come from the Go proxy (`go env GOPROXY`): see that it can be reached",
        )
    return Path(answer["Dir"])
