"""`penstock plan --verify`: measures a running server at the planned rate, compares, and keeps the result."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from penstock.errors import SettingError
from penstock.resources.endpoint import ModelEndpointSpec
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.status import timestamp
from penstock_bench.cell import MeasurementFailed
from penstock_bench.subject import ServerInfo, authorization, everyday_tokenizer, read_info
from penstock_cli.terminal import fact
from penstock_operator.decide import Service
from penstock_optimizer.load.generator import LoadResult, LoadSpec, OpenLoop, run_load
from penstock_optimizer.load.workload import LengthMix, workload_bodies
from penstock_planner.compare import HardwareComparison, OfferRow
from penstock_planner.ledger import LedgerEntry, append_entry, error_text, read_ledger
from penstock_planner.offers import class_of_cpu

BODIES = 256
"""Different requests that are sent one after the other."""
EVERYDAY_MAXIMUM = 512
"""Longest text, tokens: the limit of most encoders."""


def verify_plan(
    comparison: HardwareComparison,
    spec: ModelEndpointSpec,
    *,
    url: str,
    token: str,
    replicas: int,
    seconds: float,
    classes: Mapping[str, HardwareClassSpec],
    ledger: Path,
    quiet: bool,
) -> LedgerEntry:
    """Send the planned mean rate of `replicas` replicas to a server, and print predicted and measured p95.

    The row has the server's class and the endpoint's cores, or else is the chosen one. SettingError when the
    comparison has no such row, or the server answers from memory; MeasurementFailed when it does not answer.
    """
    base = base_of(url)
    found = read_info(base, token=token)
    info = found if isinstance(found, ServerInfo) else None
    if info is not None and info.keeps_answers:
        raise SettingError(
            f"the server at {base} keeps answers, and would answer the texts of the measurement from memory",
            field="--verify",
            remedy="Verify with a server without serving.caches and --answer-cache-bytes",
        )
    row = _row_of(comparison, spec, info, classes)
    if row is None or row.evidence is None or row.sizing is None:
        raise SettingError(
            "no row of the plan has figures to compare with",
            field="--verify",
            remedy="Optimise first (penstock optimize), or give --measurements",
        )
    load = comparison.load
    rate = load.mean / row.sizing.replicas_mean * replicas
    service = Service.from_curve(
        row.evidence.curve, p95_objective_milliseconds=load.p95_milliseconds, pooled=load.pooled
    )
    assert service is not None  # noqa: S101 - the row has figures
    predicted = service.p95_of(rate, replicas)
    result = _measure(base, spec, info, token=token, rate=rate, seconds=seconds)
    if result.latency is None:
        raise MeasurementFailed(
            f"no request to {base} was answered", remedy=f"First answer: {result.first_failure or 'none'}"
        )
    entry = LedgerEntry(
        at=timestamp(datetime.now(UTC)),
        model=spec.model,
        hardware_class=row.offer.hardware_class,
        cores=row.offer.cores,
        plan=row.evidence.plan,
        origin=row.evidence.origin.value,
        url=base,
        requests_per_second=rate,
        predicted_p95_milliseconds=predicted,
        measured_p95_milliseconds=max(result.latency.p95, 1e-6),
        measured_p95_low=result.latency.p95_lower,
        measured_p95_high=result.latency.p95_upper,
        completed_per_second=result.completed_per_second,
        refused_share=result.refused_share,
    )
    append_entry(ledger, entry)
    if not quiet:
        _print(entry, row, result)
        fact("ledger", f"{error_text(read_ledger(ledger))}; {ledger}")
    return entry


def base_of(url: str) -> str:
    """The address without the route. SettingError if it is no plain URL."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise SettingError(f"{url} cannot be measured", field="--verify", remedy="Give http://host:port")
    return f"http://{parts.netloc}{parts.path.rstrip('/').removesuffix('/predict')}"


def _row_of(
    comparison: HardwareComparison,
    spec: ModelEndpointSpec,
    info: ServerInfo | None,
    classes: Mapping[str, HardwareClassSpec],
) -> OfferRow | None:
    own = classes.get(spec.hardware_class)
    on_device = own is not None and own.neuron is not None
    # The CPU of a host with devices is not what computes.
    cpu = info.host.cpu if info is not None and info.host is not None and not on_device else None
    names = [name for name in (class_of_cpu(classes, cpu) if cpu is not None else None, spec.hardware_class) if name]
    for name in names:
        for row in comparison.rows:
            if (row.offer.hardware_class, row.offer.cores) == (name, spec.cores) and row.sizing is not None:
                return row
    return comparison.best


def _measure(
    base: str, spec: ModelEndpointSpec, info: ServerInfo | None, *, token: str, rate: float, seconds: float
) -> LoadResult:
    described = info.artefact.model if info is not None and info.artefact is not None else None
    maximum = min(described.max_tokens if described is not None else EVERYDAY_MAXIMUM, EVERYDAY_MAXIMUM)
    mix = LengthMix.of(spec.workload, maximum=maximum)
    bodies = workload_bodies(
        spec.task,
        everyday_tokenizer(),
        spec.workload,
        mix,
        count=BODIES,
        mask_token="[MASK]",  # noqa: S106
    )
    return run_load(
        LoadSpec(
            url=f"{base}/predict", bodies=bodies, pattern=OpenLoop(arrivals_per_second=rate), seconds=seconds,
            headers={"content-type": "application/json", **authorization(token)},
        )
    )  # fmt: skip


def _print(entry: LedgerEntry, row: OfferRow, result: LoadResult) -> None:
    fact("verified", f"{row.name}, {entry.plan}, at {entry.requests_per_second:.3g} requests/s")
    fact("predicted", f"p95 {entry.predicted_p95_milliseconds:.3g} ms ({entry.origin})")
    interval = f"{entry.measured_p95_low:.3g} to {entry.measured_p95_high:.3g}"
    refused = f", {result.refused_share:.1%} refused" if result.refused_share else ""
    fact(
        "measured",
        f"p95 {entry.measured_p95_milliseconds:.3g} ms (95 % interval {interval}), "
        f"{result.completed_per_second:.3g} answers/s{refused}",
    )
    if result.send_lag_p99_milliseconds > 0.1 * entry.measured_p95_milliseconds:
        fact("note", "the client was late by more than a tenth of the p95: it was measured, too")
