"""Runs a command with a minimal, stated environment: tests must not depend on a developer's or a container's variables.

    python dev/tools/clean_environment.py COMMAND...

Only the standard library, and any Python 3: `.ci/run` starts it before there is a virtual environment.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

STATED = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    # PyTorch's threads look for work for a while before they sleep, and several test processes share each core.
    "OMP_WAIT_POLICY": "passive",
}
UMASK = 0o022

KEPT = (
    "PATH|HOME|USER|LOGNAME|TMPDIR|LD_LIBRARY_PATH|PYENV_.*",
    # How this machine reaches packages, and where it keeps them.
    "PIP_.*|UV_.*|GO(?!OGLE)[A-Z0-9_]*|CGO_.*|NPM_CONFIG_.*|npm_config_.*|XDG_CACHE_HOME|DEBIAN_.*",
    "(HTTP|HTTPS|ALL|NO|FTP)_PROXY|(http|https|all|no|ftp)_proxy",
    "SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|GIT_SSL_CAINFO|NODE_EXTRA_CA_CERTS",
    # Settings that mathematical libraries need on some processors.
    "(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NVPL)_.*",
    # Compilers of the native engine, and parameters of the Makefile.
    "CC|PYTHON|VENV|(TEST|UNIT)_WORKERS|MYPY_CACHE|CLUSTER|BASE",
    # Parameters of the tests.
    "PENSTOCK_(TEST|FUZZ|IMAGES|TESTBED|RECORD|OPENSEARCH)[A-Z_]*|KUBECONFIG|STANDIN|NEURON_(TORCH_)?INDEX",
)
"""Regular expressions of whole names."""

NOT_PROXIED = ("localhost", "127.0.0.1", "::1", "10.99.0.1")
"""Servers that tests start: on loopback, and at the address of the test bed's nodes."""


def clean_environment(environment: Mapping[str, str], home: str) -> dict[str, str]:
    """The variables of KEPT that are not empty, and STATED. `home`: the user's folder, if no variable names it."""
    names = re.compile("|".join(KEPT))
    kept = {name: value for name, value in environment.items() if value and names.fullmatch(name)}
    for name in ("NO_PROXY", "no_proxy"):
        if any(other.lower().endswith("_proxy") for other in kept):
            hosts = [host for host in kept.get(name, "").split(",") if host]
            kept[name] = ",".join([*hosts, *(host for host in NOT_PROXIED if host not in hosts)])
    return {"HOME": home, "PATH": os.defpath, **kept, **STATED}


def main(command: list[str]) -> None:
    """Become the command, in the repository's folder."""
    environment = clean_environment(os.environ, os.path.expanduser("~"))  # noqa: PTH111 - no error without an account
    os.umask(UMASK)
    os.chdir(Path(__file__).parents[2])
    os.execvpe(command[0], command, environment)  # noqa: S606 - a command of the Makefile


if __name__ == "__main__":
    main(sys.argv[1:])
