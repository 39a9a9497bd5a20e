"""Metrics of a device other than the CPU, of servers that have one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from penstock_runtime.engines.base import DeviceState


def device_families(state: DeviceState) -> Iterator[Metric]:
    """All families."""
    cores = GaugeMetricFamily(
        "penstock_device_cores",
        "Cores of the device: granted, and in service. If these are fewer, some have failed (event NeuronCoreFailed).",
        labels=["kind"],
    )
    cores.add_metric(["granted"], state.cores)
    cores.add_metric(["in-service"], state.cores_in_service)
    yield cores
    copies = GaugeMetricFamily(
        "penstock_device_copies", "Copies of the model on the device: loaded, and in service.", labels=["kind"]
    )
    copies.add_metric(["loaded"], state.copies)
    copies.add_metric(["in-service"], state.copies - len(state.out_of_service))
    yield copies
    yield CounterMetricFamily("penstock_device_runs", "Runs of a compiled shape that ended well.", value=state.runs)
    errors = CounterMetricFamily(
        "penstock_device_errors",
        "Failed runs by kind: hardware and timed-out take a core out of service, not-a-number and other fail one run.",
        labels=["kind"],
    )
    for kind, count in sorted(state.errors.items()):
        errors.add_metric([kind], count)
    yield errors
    tokens = CounterMetricFamily(
        "penstock_device_tokens",
        "Tokens of compiled shapes that have run: real ones, and padding of lengths and rows.",
        labels=["kind"],
    )
    tokens.add_metric(["real"], state.real_tokens)
    tokens.add_metric(["padding"], state.padded_tokens - state.real_tokens)
    yield tokens
