"""From the operator's decisions to external.metrics.k8s.io, by real programs: the operator's own /metrics, a Prometheus
that scrapes them, and a server of external metrics with the rule that we ship for prometheus-adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.collectors import ScalingCollector
from penstock_operator.decide import Decision
from penstock_operator.health import HealthChecks, serve
from testbed.aggregated import running_external_metrics
from testbed.build import binary
from testbed.control_plane import ControlPlane
from testbed.ports import some_free_ports
from testbed.programs import LOOPBACK
from testbed.tools import EXTERNAL_METRICS, PROMETHEUS, Tool
from tests.operator.scaling.prometheus_server import Server

VALUES = Path(__file__).parents[3] / "examples/prometheus-adapter.yaml"


def adapter_configuration() -> str:
    """The configuration that prometheus-adapter's chart makes of our values."""
    values = yaml.safe_load(VALUES.read_text())
    return yaml.safe_dump({"externalRules": values["rules"]["external"]})


def registry_of(decisions: Callable[[], Mapping[ObjectKey, Decision]]) -> CollectorRegistry:
    """A registry with the metrics of the operator's decisions."""
    registry = CollectorRegistry()
    registry.register(ScalingCollector(decisions))
    return registry


@asynccontextmanager
async def scraped(
    registry: CollectorRegistry, folder: Path, *, others: Sequence[Mapping[str, Any]] = ()
) -> AsyncIterator[Server]:
    """A Prometheus that has these metrics within a second or two, from where the operator serves its own; `folder` is
    for its files, `others` are what else it scrapes."""
    (port,) = some_free_ports(1)
    metrics = await serve(HealthChecks(limit_seconds=60), registry, host=LOOPBACK, port=port)
    scrape = {"job_name": "operator", "static_configs": [{"targets": [f"{LOOPBACK}:{port}"]}]}
    program = await asyncio.to_thread(binary, PROMETHEUS)
    prometheus = Server(program, folder, [scrape, *others], secure=False)
    try:
        yield prometheus
    finally:
        prometheus.kill()
        await metrics.cleanup()


@asynccontextmanager
async def external_metrics(
    plane: ControlPlane, prometheus: Server, *, configuration: str | None = None, tool: Tool = EXTERNAL_METRICS
) -> AsyncIterator[None]:
    """The API server has external metrics: by the rules that we ship, or by others; from our server, or another."""
    rules = configuration or adapter_configuration()
    context = running_external_metrics(plane, configuration=rules, prometheus_url=prometheus.url, tool=tool)
    await asyncio.to_thread(context.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
