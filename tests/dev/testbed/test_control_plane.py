"""A real control plane starts, decides as Kubernetes does, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import state
from testbed.control_plane import ControlPlane
from testbed.daemon import Process
from testbed.kubectl import KubectlError


def test_rbac_refuses_a_user_without_rights(private_control_plane: ControlPlane) -> None:
    stranger = private_control_plane.kubectl.using(private_control_plane.user("stranger"))

    with pytest.raises(KubectlError, match='User "stranger" cannot list resource "pods"'):
        stranger("get", "pods")


def test_the_next_run_cleans_up_after_an_interrupted_one(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from testbed.control_plane import running_control_plane\n"
        "with running_control_plane() as plane:\n"
        "    print(plane.settings.folder, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    folder = Path(killed.stdout.strip())
    records = [json.loads(record.read_text()) for record in (folder / "pids").glob("*.json")]
    left = [Process(record["pid"], record["started_ticks"]) for record in records]
    assert len(left) == 4
    assert all(process.alive for process in left)

    swept = state.sweep(folder.parent)

    assert folder in swept
    assert not folder.exists()
    assert not any(process.alive for process in left)
