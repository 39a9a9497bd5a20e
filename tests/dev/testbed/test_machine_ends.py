"""Broken clusters and killed users are cleaned up; nothing is left on the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import host, machine
from testbed.cluster import Cluster
from testbed.daemon import daemons
from testbed.machine import BUSYBOX_IMAGE
from testbed.sharing import STARTED_BY_TESTS, USERS

USE = """
import sys
from testbed.sharing import shared_machine
with shared_machine() as machine:
    print(machine.kubeconfig, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def ours(full_cluster: Cluster) -> Cluster:
    """The machine's cluster, which these tests break, and which no user has started for other work."""
    if full_cluster.machine is None or not STARTED_BY_TESTS.exists():
        pytest.skip("the test breaks the cluster, and this one is in use")
    return full_cluster


def test_second_process_gets_the_same_cluster_and_leaves_it_running(ours: Cluster) -> None:
    other = subprocess.run([sys.executable, "-c", USE], input="", capture_output=True, text=True, check=True)

    assert other.stdout.strip() == str(ours.kubeconfig)
    assert machine.find() is not None


def test_user_that_was_killed_does_not_count(ours: Cluster) -> None:
    command = [sys.executable, "-c", USE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == str(ours.kubeconfig)
        record = USERS / f"{other.pid}.json"
        assert record.exists()
        other.kill()

    subprocess.run(command, input="", capture_output=True, text=True, check=True)

    assert not record.exists()
    assert machine.find() is not None


@pytest.mark.extended
def test_a_broken_cluster_is_replaced_and_removed_without_leftovers(ours: Cluster) -> None:
    ours.kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "orphan", "namespace": "default"},
            "spec": {"containers": [{"name": "main", "image": BUSYBOX_IMAGE, "command": ["sleep", "1000"]}]},
        }
    )
    ours.kubectl.wait("condition=Ready", "pod/orphan")
    assert ours.machine is not None
    for folder in [machine.FOLDER, *(node.folder for node in ours.machine.nodes)]:
        for daemon in daemons(folder):
            assert daemon.process is not None
            os.kill(daemon.process.pid, signal.SIGKILL)
    assert machine.find() is None
    assert left()

    fresh = machine.up()
    try:
        assert fresh.kubectl.items("pods") == []
        before = json.loads((machine.FOLDER / "sysctls.json").read_text())
    finally:
        machine.down()

    assert left() == []
    assert {name: Path("/proc/sys", name).read_text().strip() for name in before} == before
    machine.up()  # for the tests that follow


def left() -> list[str]:
    """All on this machine that carries the test bed's name."""
    found = [line for line in host.run("ip", "-brief", "link").splitlines() if "penstock" in line]
    found += [line for line in host.run("nft", "list", "tables").splitlines() if "kube-proxy" in line]
    found += [str(mount) for mount in host.mounts_below(machine.FOLDER)]
    found += [str(group) for group in host.CGROUPS.glob("*/penstock-testbed-*")]
    found += [str(record) for record in Path("/var/lib/cni/results").glob("*") if _names_us(record)]
    found += [
        str(link) for link in Path("/var/log/containers").glob("*") if link.readlink().is_relative_to(machine.FOLDER)
    ]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(machine.FOLDER) in command:
            found.append(command)
    return found


def _names_us(record: Path) -> bool:
    return str(machine.FOLDER) in record.read_text(errors="replace")
