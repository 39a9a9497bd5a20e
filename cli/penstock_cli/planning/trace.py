"""`penstock plan --trace`: the candidates of a plan under a trace of requests, by the simulator of the autoscaler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from penstock_cli.terminal import bytes_text
from penstock_operator.decide import Service
from penstock_planner.compare import HardwareComparison, OfferRow, Traced
from penstock_simulator.choices import Dispatch, PolicyKind
from penstock_simulator.compare import Traffic, simulate
from penstock_simulator.fleet import FleetSettings, ReplicaModel
from penstock_simulator.policies import OWN_SCRAPE_SECONDS, Endpoint, Limits, make_policy
from penstock_simulator.traces import Trace, from_file

MOST_CANDIDATES = 4
"""Classes that are simulated: a run of a million requests takes some three seconds."""
LARGE_BYTES = 2**23
"""Reading such a file takes seconds."""
PEAK_SECONDS = 300
"""The peak of a trace is the highest mean of this time: a replica starts within a fraction of it."""


def read_trace(path: Path, say: Callable[[str], None]) -> tuple[Trace, float, float]:
    """The trace in a file, its mean rate, and its peak. SettingError for a file that is none."""
    if path.is_file() and path.stat().st_size >= LARGE_BYTES:
        say(f"trace: reading {path} ({bytes_text(path.stat().st_size)})")
    trace = from_file(path)
    width = min(PEAK_SECONDS, trace.seconds)
    sums = np.concatenate([[0.0], np.cumsum(trace.rates)])
    mean, peak = float(trace.rates.mean()), float(((sums[width:] - sums[:-width]) / width).max())
    return trace, mean, max(mean, peak)


def traced(
    comparison: HardwareComparison, trace: Trace, *, start_up_seconds: float, say: Callable[[str], None]
) -> tuple[Traced, ...]:
    """The chosen row, the likely one, and the best of further classes, each through the whole trace. `say` gets the
    progress, many times a second."""
    rows: list[OfferRow] = []
    for row in comparison.rows:
        new = row.offer.hardware_class not in {one.offer.hardware_class for one in rows}
        if (row.is_feasible or row.is_likely) and not row.offer.not_chosen and new:
            rows.append(row)
    del rows[MOST_CANDIDATES:]
    found = []
    for number, row in enumerate(rows, 1):
        say_share = partial(_say_share, say, f"trace: {number} of {len(rows)}, {row.name}", trace.requests)
        found.append(_traced(row, comparison, trace, start_up_seconds, say_share))
    return tuple(found)


def _say_share(say: Callable[[str], None], what: str, requests: float, done: int) -> None:
    say(f"{what}: {min(done / requests, 1):.0%} of {requests:,.0f} requests")


def _traced(
    row: OfferRow,
    comparison: HardwareComparison,
    trace: Trace,
    start_up_seconds: float,
    say_done: Callable[[int], None],
) -> Traced:
    assert row.evidence is not None  # noqa: S101 - feasible and likely rows have figures
    assert row.sizing is not None  # noqa: S101
    load = comparison.load
    curve = row.evidence.curve.faster(row.evidence.interval.low) if row.is_rough and not row.is_likely else (
        row.evidence.curve
    )  # fmt: skip
    service = Service.from_curve(curve, p95_objective_milliseconds=load.p95_milliseconds, pooled=load.pooled)
    assert service is not None  # noqa: S101
    # A trace may rise above its peak of five minutes.
    most = load.most_replicas or 2 * max(row.sizing.replicas_peak, row.slow.replicas_peak if row.slow else 1) + 2
    endpoint = Endpoint(service, ReplicaModel.from_curve(curve), Limits(load.least_replicas, most))
    dispatch = Dispatch.LEAST_OUTSTANDING if load.pooled else Dispatch.RANDOM
    done = 0

    def count(log: Sequence[object]) -> None:
        nonlocal done
        done += len(log)
        say_done(done)

    result = simulate(
        Traffic.of(trace, endpoint, seed=1),
        endpoint,
        make_policy(PolicyKind.PENSTOCK, endpoint, load.headroom),
        FleetSettings(dispatch=dispatch, start_up_seconds=start_up_seconds),
        scrape_interval=OWN_SCRAPE_SECONDS,
        on_answered=count,
    )
    replicas = np.array(result.replicas)
    hours = [float(replicas[begin : begin + 3600].mean()) for begin in range(0, len(replicas), 3600)]
    return Traced(
        row=row,
        late_share=result.late / max(result.requests, 1),
        replica_hours=result.replica_hours,
        hours=trace.seconds / 3600,
        by_hour=tuple(hours),
        most_replicas=int(replicas.max()),
    )
