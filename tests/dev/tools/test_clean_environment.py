"""Tests start with a stated environment, whatever a developer or a container has set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.clean_environment import NOT_PROXIED, STATED, clean_environment

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "dev" / "tools" / "clean_environment.py"
BARE = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}

HOSTILE = {
    "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "/nowhere", "PYTHONWARNINGS": "error",
    "PYTHONOPTIMIZE": "2", "PYTHONHASHSEED": "1", "PYTHONIOENCODING": "latin-1", "PYTEST_ADDOPTS": "--maxfail=1",
    "LC_ALL": "de_DE.UTF-8", "LANG": "C", "LANGUAGE": "de", "TZ": "Asia/Kathmandu", "TERM": "xterm-256color",
    "COLUMNS": "20", "NO_COLOR": "1", "FORCE_COLOR": "1", "CI": "true", "MAKEFLAGS": "-n", "GIT_DIR": "/nowhere",
    "PENSTOCK_STORE": "/nowhere", "PENSTOCK_CORES": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "secret",
    "AWS_ACCESS_KEY_ID": "secret", "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "VIRTUAL_ENV": "/nowhere",
    "LD_PRELOAD": "", "SOURCE_DATE_EPOCH": "0", "HYPOTHESIS_PROFILE": "other", "OMP_WAIT_POLICY": "active",
}  # fmt: skip

KEPT = {
    "PIP_INDEX_URL": "https://packages.example/simple", "PIP_FIND_LINKS": "/wheels", "UV_CACHE_DIR": "/cache",
    "GOPROXY": "https://modules.example", "GOSUMDB": "off", "SSL_CERT_FILE": "/ca.crt", "REQUESTS_CA_BUNDLE": "/ca.crt",
    "DEBIAN_MIRROR": "http://mirror.example", "OPENBLAS_CORETYPE": "Haswell", "OMP_NUM_THREADS": "2", "TMPDIR": "/tmp",
    "PENSTOCK_TEST_KUBECONFIG": "/kubeconfig", "TEST_WORKERS": "3", "CC": "gcc-14",
}  # fmt: skip


def test_only_what_installs_and_tests_need_is_kept() -> None:
    assert clean_environment({**BARE, **HOSTILE, **KEPT}, "/home/one") == {**BARE, **KEPT, **STATED}


def test_servers_of_the_tests_are_not_reached_by_a_proxy() -> None:
    found = clean_environment({"https_proxy": "http://proxy:3128", "no_proxy": "intern,localhost"}, "/home/one")

    assert found["https_proxy"] == "http://proxy:3128"
    assert found["no_proxy"].split(",") == ["intern", *NOT_PROXIED]
    assert found["NO_PROXY"].split(",") == [*NOT_PROXIED]


SHOW = "import json, os; mask = os.umask(0); print(json.dumps([dict(os.environ), mask, os.getcwd()]))"


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_command_starts_in_the_repository_with_a_stated_umask(umask: int, tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-E", PROGRAM, sys.executable, "-c", SHOW],
        env={**BARE, **HOSTILE},
        umask=umask,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )

    environment, mask, folder = json.loads(printed.stdout)

    assert environment == {**BARE, **STATED}
    assert (mask, folder) == (0o022, str(ROOT))


@pytest.mark.parametrize("target", ["unit", "test", "test-all"])
def test_targets_of_the_makefile_start_tests_with_it(target: str) -> None:
    lines = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    starts = [line for line in lines if "-m pytest" in line or "run_tests.py" in line]

    assert starts
    assert all(".venv/bin/python dev/tools/clean_environment.py .venv/bin/python" in line for line in starts)
