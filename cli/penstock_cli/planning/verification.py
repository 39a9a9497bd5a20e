"""`penstock plan --verify`: measures a running server at the rate that the cost is computed from, and keeps the result
if the machine was quiet."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from penstock.errors import SettingError
from penstock.resources.conditions import timestamp
from penstock.resources.endpoint import ModelEndpointSpec
from penstock.resources.hardware_class import HardwareClassSpec
from penstock_bench.cell import MeasurementFailed
from penstock_bench.subject import ServerInfo, authorization, everyday_tokenizer, read_info
from penstock_cli.planning.noise import watch
from penstock_cli.terminal import fact
from penstock_operator.decide import Service
from penstock_optimizer.load.generator import LoadResult, LoadSpec, OpenLoop, run_load
from penstock_optimizer.load.workload import LengthMix, workload_bodies
from penstock_planner.compare import HardwareComparison, OfferRow, counted
from penstock_planner.ledger import NOISE_LIMIT, LedgerEntry, append_entry, error_text, read_ledger
from penstock_planner.offers import class_of_cpu
from penstock_planner.processors import processor_of

BODIES = 256
"""Different requests that are sent one after the other."""
EVERYDAY_MAXIMUM = 512
"""Longest text, tokens: the limit of most encoders."""


ANY_CLASS = "any"
"""Of measurements on a processor that belongs to no class."""
LAG_LIMIT = 0.25
"""Of the measured p95: with a client that is later than that, the client was measured."""


def verify_plan(
    comparison: HardwareComparison,
    spec: ModelEndpointSpec,
    *,
    url: str,
    token: str,
    replicas: int,
    seconds: float,
    classes: Mapping[str, HardwareClassSpec],
    stated: str | None,
    ledger: Path,
    quiet: bool,
) -> LedgerEntry:
    """Send the rate of each replica at the peak, from which the cost was computed, times `replicas` to a server, and
    print predicted and measured p95. Nothing is kept of a measurement above `NOISE_LIMIT`.

    The row has the server's class and cores; `stated` is the class of a server that does not state its processor.
    SettingError when the comparison has no such row, or the server answers from memory; MeasurementFailed when it does
    not answer, or the noise is above the limit.
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
    row, cpu = _row_of(comparison, spec, info, classes, stated=stated, base=base)
    assert row.evidence is not None  # noqa: S101 - `_row_of` returns rows with figures
    assert row.sizing is not None  # noqa: S101
    load = comparison.load
    rate = load.peak / row.sizing.replicas_peak * replicas
    service = Service.from_curve(
        row.evidence.curve, p95_objective_milliseconds=load.p95_milliseconds, pooled=load.pooled
    )
    assert service is not None  # noqa: S101 - the row has figures
    cores = info.host.cores if info is not None and info.host is not None else None
    is_here = (urlsplit(base).hostname or "") in {"127.0.0.1", "localhost", "::1"}
    send = partial(_measure, base, spec, info, token=token, rate=rate, seconds=seconds)
    result, noise = watch(cores.cpus if cores is not None else (), send) if is_here else (send(), None)
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
        predicted_p95_milliseconds=service.p95_of(rate, replicas),
        measured_p95_milliseconds=max(result.latency.p95, 1e-6),
        measured_p95_low=result.latency.p95_lower,
        measured_p95_high=result.latency.p95_upper,
        completed_per_second=result.completed_per_second,
        refused_share=result.refused_share,
        replicas=replicas,
        cpu=cpu,
        noise=None if noise is None else round(noise.share, 3),
        load_average=None if noise is None else noise.load_average,
        shared_with=() if noise is None else noise.programs,
    )
    if not quiet:
        _print(entry, row, result)
    _require_quiet(entry, result)
    append_entry(ledger, entry)
    if not quiet:
        fact("ledger", f"kept as {entry.key} in {ledger}; {error_text(read_ledger(ledger), spec.model)}")
    return entry


def _require_quiet(entry: LedgerEntry, result: LoadResult) -> None:
    """MeasurementFailed for a measurement of other work more than of the server."""
    others = f" ({', '.join(entry.shared_with)})" if entry.shared_with else ""
    if entry.noise is not None and entry.noise > NOISE_LIMIT:
        raise MeasurementFailed(
            f"not kept: other work{others} and the hypervisor had {entry.noise:.0%} of the server's CPUs, load "
            f"{entry.load_average:.1f}; the limit is {NOISE_LIMIT:.0%}",
            remedy="End the other work, or verify a server on a quiet machine",
        )
    if result.send_lag_p99_milliseconds > LAG_LIMIT * entry.measured_p95_milliseconds:
        raise MeasurementFailed(
            f"not kept: the client sent up to {result.send_lag_p99_milliseconds:.3g} ms late (p99), over "
            f"{LAG_LIMIT:.0%} of the p95",
            remedy="Run penstock plan --verify on another, quiet machine",
        )


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
    *,
    stated: str | None,
    base: str,
) -> tuple[OfferRow, str]:
    """The row of the server's class and cores, and its processor in words."""
    own = classes.get(spec.hardware_class)
    host = info.host if info is not None else None
    if own is not None and own.neuron is not None:
        names, cpu = [spec.hardware_class], "Inferentia"  # the CPU of the host is not what computes
    elif host is not None:
        cpu = f"{host.cpu.vendor} family {host.cpu.family} model {host.cpu.model}, {host.cpu.isa.value}"
        allowed = own is not None and not own.objection(host.cpu, name=spec.hardware_class)
        names = [class_of_cpu(classes, host.cpu) or ANY_CLASS, *([spec.hardware_class] if allowed else [])]
    elif stated is not None:
        names, cpu = [stated], f"stated: {stated}"
    else:
        raise SettingError(
            f"the server at {base} does not state its processor",
            field="--verify",
            remedy="Name its class alone in --classes, or verify a Penstock server at its internal port",
        )
    cores = host.cores.granted if host is not None and host.cores is not None else spec.cores
    rows = [row for row in comparison.rows if row.sizing is not None and not row.offer.not_chosen]
    same = [row for name in names for row in rows if processor_of(row.offer.hardware_class) == processor_of(name)]
    found = next((row for row in same if row.offer.cores == cores), None)
    if found is None:
        known = ", ".join(dict.fromkeys(row.name for row in same or rows)) or "none"
        raise SettingError(
            f"the server at {base} is of another class than the plan: {names[0]}, {counted(cores, 'core')} ({cpu}), "
            f"and the plan has figures of {known}",
            field="--verify",
            remedy=f"Verify a server of a class of the plan, or plan with --classes {names[0]} --cores {cores}",
        )
    return found, cpu


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
    if entry.noise is not None:
        others = f"; also ran: {', '.join(entry.shared_with)}" if entry.shared_with else ""
        fact("machine", f"{entry.cpu}; others {entry.noise:.0%} of its CPUs, load {entry.load_average:.1f}{others}")
