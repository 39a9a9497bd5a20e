"""Thousands of ModelEndpoints on a new control plane: the figures of scale in docs/reference/operator.md.

    python -m benchmarks.operator_scale --endpoints 5000
    python -m benchmarks.operator_scale --endpoints 5000 --shared 1     # all of one optimisation

Real etcd, API server, controller manager and scheduler (dev/testbed/), no nodes: jobs and pods stay pending, and each
endpoint gets its Service, NetworkPolicy, OptimizedModel, ConfigMap and Job. The operator is the real process. Measured:
the time until every endpoint has its status; errors; memory; then, at rest, the calls to the API server and CPU time in
a minute; then single changes, from the answer to the PATCH until the status has the new generation.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from penstock.resources.base import API_VERSION
from penstock_operator.cluster.api import MODEL_ENDPOINT, Json, WatchEvent
from penstock_operator.cluster.kubernetes import KubernetesPort, load_configuration
from testbed.cluster import Cluster
from testbed.control_plane import running_control_plane
from testbed.fixtures import install_crds

NAMESPACE = "scale"
REST_SECONDS = 60
PATIENCE = 10
"""Readings of the operator's metrics that may time out in a row."""


class Operator:
    """The process, as seen from outside."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self._log = log
        environment = {
            **os.environ,
            "PENSTOCK_OPERATOR_KUBECONFIG": str(kubeconfig),
            "PENSTOCK_OPERATOR_OPERATOR_NAMESPACE": NAMESPACE,
            "PENSTOCK_OPERATOR_HOST": "127.0.0.1",
            "PENSTOCK_OPERATOR_PORT": "0",
            # All jobs are created, and no kubelet runs them.
            "PENSTOCK_OPERATOR_MAX_CONCURRENT_OPTIMIZATIONS": "1000000",
            "PENSTOCK_OPERATOR_MAX_CONCURRENT_ROLLOUTS": "1000000",
        }
        with log.open("w") as file:
            self.process = subprocess.Popen([sys.executable, "-m", "penstock_operator"], env=environment, stderr=file)

    def check(self) -> None:
        """Raise ClickException when it has ended."""
        if self.process.poll() is not None:
            raise click.ClickException(f"the operator ended: {self._log.read_text()[-2000:]}")

    @property
    def lines(self) -> list[Json]:
        """Its log."""
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    def metrics(self) -> str:
        """Of this moment."""
        url = next(re.search(r"http://\S+", line["message"]) for line in self.lines if "health on" in line["message"])
        assert url is not None
        for patience in range(PATIENCE, -1, -1):
            # On a busy machine a process may get nothing for a while; half an hour of work is not to be lost for that.
            try:
                with urllib.request.urlopen(f"{url.group()}/metrics", timeout=30) as response:
                    return str(response.read().decode())
            except OSError:
                self.check()
                if not patience:
                    raise
        raise AssertionError("unreachable")

    def calls(self) -> dict[str, float]:
        """Requests to the API server so far, by verb and kind, without the lease."""
        pattern = r'api_requests_total{code="\w+",kind="(\S+?)",verb="(\w+)"} (\S+)'
        found: dict[str, float] = {}
        for kind, verb, count in re.findall(pattern, self.metrics()):
            if kind != "Lease":
                found[f"{verb} {kind}"] = found.get(f"{verb} {kind}", 0.0) + float(count)
        return found

    @property
    def memory(self) -> tuple[float, float]:
        """Resident now and at most, MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        now, most = (re.search(rf"{name}:\s+(\d+) kB", status) for name in ("VmRSS", "VmHWM"))
        assert now is not None
        assert most is not None
        return int(now.group(1)) / 1000, int(most.group(1)) / 1000

    @property
    def cpu_seconds(self) -> float:
        """User and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(kubeconfig: Path, folder: Path) -> Iterator[Operator]:
    """The operator, until the block ends."""
    operator = Operator(kubeconfig, folder / "operator.log")
    try:
        yield operator
    finally:
        operator.process.terminate()
        operator.process.wait(30)


def endpoint(number: int, shared: int) -> Json:
    """One of `shared` different optimisations."""
    model = f"hf://org/model-{number % shared}@main"
    return {
        "apiVersion": API_VERSION,
        "kind": "ModelEndpoint",
        "metadata": {"name": f"e{number:05}", "namespace": NAMESPACE},
        "spec": {"model": model, "task": "text-classification"},
    }


def processor() -> str:
    """The machine's name for it, and how many there are."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{found.group(1) if found else 'unknown'}, {os.cpu_count()} CPUs"


def settled(value: Json) -> bool:
    """Whether the status is of the present spec."""
    return bool((value.get("status") or {}).get("observedGeneration") == value["metadata"]["generation"])


async def create(port: KubernetesPort, count: int, shared: int) -> float:
    """Create all; seconds."""
    begin = time.monotonic()
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            # Not `create`: one that is tried again on a busy machine finds the object that it made.
            await port.apply(endpoint(number, shared))

    await asyncio.gather(*(some() for _ in range(8)))
    return time.monotonic() - begin


async def changes(port: KubernetesPort, version: str) -> Any:
    """All changes since a version, through the ends of streams."""
    while True:
        async for change in port.watch(MODEL_ENDPOINT, NAMESPACE, resource_version=version):
            version = change.object["metadata"]["resourceVersion"]
            if change.type != "BOOKMARK":
                yield change


async def watch_until_settled(port: KubernetesPort, operator: Operator, count: int, say: Any) -> None:
    """Return when every endpoint has its status."""
    done: set[str] = set()
    last = time.monotonic()
    async for change in changes(port, "0"):
        assert isinstance(change, WatchEvent)
        if settled(change.object):
            done.add(change.object["metadata"]["name"])
        if time.monotonic() - last > 10:
            last = time.monotonic()
            operator.check()
            say(f"  {len(done)} of {count}")
        if len(done) == count:
            return


async def change_one(port: KubernetesPort, number: int, shared: int) -> float:
    """Seconds from the answer to a change until the status is of it."""
    value = endpoint(number, shared)
    value["spec"]["rollout"] = {"drainSeconds": 10 + int(time.time()) % 10}
    after = await port.apply(value)
    begin = time.monotonic()
    async for change in changes(port, after["metadata"]["resourceVersion"]):
        if change.object["metadata"]["name"] == value["metadata"]["name"] and settled(change.object):
            return time.monotonic() - begin
    raise AssertionError("a watch without end ended")


async def measure(kubeconfig: Path, operator: Operator, *, count: int, shared: int, single: int) -> Json:
    """All figures."""
    async with KubernetesPort(await load_configuration(str(kubeconfig)), timeout_seconds=60) as port:
        begin, cpu = time.monotonic(), operator.cpu_seconds
        watcher = asyncio.create_task(watch_until_settled(port, operator, count, click.echo))
        created = await create(port, count, shared)
        click.echo(f"created in {created:.1f} s")
        await watcher
        figures: Json = {
            "created_seconds": round(created, 1),
            "settled_seconds": round(time.monotonic() - begin, 1),
            "settling_cpu_seconds": round(operator.cpu_seconds - cpu, 1),
        }
        click.echo(f"settled after {figures['settled_seconds']} s; waiting for rest")
        before = operator.calls()
        while True:
            await asyncio.sleep(10)
            now = operator.calls()
            if sum(now.values()) - sum(before.values()) < 20:
                break
            before = now
        figures["calls"] = {name: int(number) for name, number in sorted(operator.calls().items())}
        before, cpu = operator.calls(), operator.cpu_seconds
        await asyncio.sleep(REST_SECONDS)
        after = operator.calls()
        figures["rest_calls_per_minute"] = {
            name: number - before.get(name, 0) for name, number in after.items() if number != before.get(name, 0)
        }
        figures["rest_cpu_share"] = round((operator.cpu_seconds - cpu) / REST_SECONDS, 4)
        figures["rss_megabytes"], figures["peak_rss_megabytes"] = operator.memory
        waits = sorted([await change_one(port, (7919 * turn) % count, shared) for turn in range(single)])
        figures["change_seconds"] = {
            "p50": round(waits[len(waits) // 2], 4),
            "p99": round(waits[min(len(waits) - 1, int(len(waits) * 0.99))], 4),
        }
        levels = [line["level"] for line in operator.lines]
        figures["log"] = {level: levels.count(level) for level in sorted(set(levels))}
        figures["problems"] = [line["message"] for line in operator.lines if line["level"] != "info"][:5]
        return figures


@click.command()
@click.option("--endpoints", default=5000, show_default=True)
@click.option("--shared", default=0, help="Different optimisations; 0: one for each endpoint.")
@click.option("--changes", "single", default=200, show_default=True, help="Single changes to time.")
def main(endpoints: int, shared: int, single: int) -> None:
    """Measure the operator with many endpoints."""
    with running_control_plane(report=click.echo) as plane, tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(plane.kubeconfig, plane.kubectl)
        install_crds(cluster)
        cluster.kubectl.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
            {"apiVersion": API_VERSION, "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}},
        )
        with started(plane.kubeconfig, Path(folder)) as operator:
            while not any(line.get("event") == "ControllerStarted" for line in operator.lines):
                operator.check()
                time.sleep(0.2)
            measured = measure(plane.kubeconfig, operator, count=endpoints, shared=shared or endpoints, single=single)
            figures = asyncio.run(measured)
    about = {"processor": processor(), "load": round(os.getloadavg()[1], 1)}
    asked = {"endpoints": endpoints, "optimisations": shared or endpoints}
    click.echo(json.dumps({**about, **asked, **figures}, indent=1))


if __name__ == "__main__":
    main()
