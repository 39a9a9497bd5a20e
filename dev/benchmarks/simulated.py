"""The autoscaler's simulator against a real run: the same arrivals, the same policy, late requests and p95 by phase.

    python -m benchmarks.simulated [--tokens 128] [--calm 40] [--peak 120] [--most 2]

One replica of MiniLM (fp32, one core) is measured as the optimiser measures it: its curve is all that the simulator
gets. Then a step of load is played to real replicas, one core each, behind a dispatcher that sends every request to the
least busy one; the operator's own code scrapes them and decides, and each new replica is started as a process. The same
arrivals are simulated with the start-up time that was seen. Latencies count from when a request was due.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer

from benchmarks.models import minilm
from benchmarks.program import Program, verdict
from benchmarks.replicas import Arrival, Played, Replicas, play
from penstock.capacity import CapacityCurve
from penstock.resources.endpoint import ModelEndpoint
from penstock.tasks import TaskName
from penstock_bench.grid import place
from penstock_operator.decide import ScalingSettings, Service
from penstock_optimizer.capacity.curve import measure_capacity, serve_replica
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.generator import poisson_arrivals
from penstock_optimizer.load.workload import predict_bodies
from penstock_optimizer.optimise import prepare
from penstock_runtime.host import read_host
from penstock_simulator.choices import PolicyKind
from penstock_simulator.compare import Traffic, simulate
from penstock_simulator.fleet import FleetSettings, ReplicaModel
from penstock_simulator.policies import OWN_SCRAPE_SECONDS, Endpoint, Limits, make_policy
from penstock_simulator.traces import WARM_UP_SECONDS, Trace

CALM, PEAK, AFTER = 0.5, 1.6, 0.4
"""The load of the phases, as a share of one replica's rate within the objective. The peak is over its highest rate, and
within what two do: near the edge of either, a machine that is a little slower than a minute ago is another one."""
CURVE_SECONDS = 90.0
START_SECONDS = 60.0
HEADROOM = 0.75
LATE_APART = 0.15
"""Shares of late requests that differ by less agree."""
P95_FACTOR, OVERLOADED_P95_FACTOR = 2.0, 4.0
"""So do p95s that differ by less than this factor; in overload a p95 is the integral of every small error."""
OVERLOADED = 0.05
"""A phase in which a larger share is late in either world."""
GROWN_APART = 8.0
"""Seconds: so do times of growing."""


class Phase:
    """What came of one phase: late shares, and p95 in milliseconds, in both worlds."""

    def __init__(self, name: str, begin: float, end: float) -> None:
        self.name = name
        self.begin = begin
        self.end = end

    def of(self, arrivals: Sequence[Arrival], objective: float) -> tuple[int, float, float]:
        """Requests, the share of late ones, and p95."""
        mine = [one.milliseconds for one in arrivals if self.begin <= one.at < self.end]
        if not mine:
            return 0, 0.0, 0.0
        late = sum(1 for value in mine if value > objective)
        return len(mine), late / len(mine), float(np.percentile(mine, 95))


def phases(calm: float, peak: float) -> tuple[Phase, ...]:
    """A calm, a step that one replica cannot take, and a calm again; times are seconds from the begin."""
    return (
        Phase("calm", 0, calm),
        Phase("peak, growing", calm, calm + peak / 2),
        Phase("peak, grown", calm + peak / 2, calm + peak),
        Phase("calm again", calm + peak, calm + peak + calm),
    )


def arrivals_of(rate: float, calm: float, peak: float) -> list[float]:
    """When requests are due, seconds; `rate` is what one replica takes."""
    times: list[float] = []
    begin = 0.0
    for seed, (load, seconds) in enumerate(((CALM, calm), (PEAK, peak), (AFTER, calm))):
        times += [begin + at for at in poisson_arrivals(load * rate, seconds, seed=seed)]
        begin += seconds
    return times


def artefact_of(folder: Path, tokens: int) -> Path:
    """The fp32 artefact of MiniLM for one core: made in seconds, and so slow that the client's share is negligible."""
    endpoint = ModelEndpoint.from_object(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": "simulated"},
            "spec": {
                "model": f"file://{minilm()}",
                "task": "feature-extraction",
                "cores": 1,
                "workload": {"sequenceLengths": [tokens]},
            },
        }
    )
    return prepare(endpoint, store=folder / "artefacts", models=folder / "models").artefact


def measured_curve(
    artefact: Path, bodies: Sequence[RequestBody], cpu: int, client: Sequence[int], log: Path
) -> CapacityCurve:
    """As the optimiser measures it: one replica on its core, over HTTP."""
    deadline = time.monotonic() + CURVE_SECONDS
    with serve_replica(artefact, cores=1, cpus=(cpu,), log=log, start_seconds=START_SECONDS) as server:
        return measure_capacity(
            server,
            bodies,
            p95_objective=None,
            load_cpus=client,
            seconds_left=lambda: deadline - time.monotonic(),
        ).curve


def simulated(curve: CapacityCurve, service: Service, due: Sequence[float], played: Played, most: int) -> Played:
    """The same arrivals, with the replica that the curve describes and the start-up that was measured."""
    model = ReplicaModel.from_curve(curve)
    random = np.random.default_rng(1)
    seconds = int(played.seconds)
    counts, _ = np.histogram(due, bins=np.arange(seconds + 1))
    first = CALM * service.rate
    warm_up = np.sort(random.random(int(first * WARM_UP_SECONDS)) * WARM_UP_SECONDS)
    arrivals = np.concatenate([warm_up, np.array(due) + WARM_UP_SECONDS])
    rates = counts.astype(np.float64)
    rates[0] = first
    traffic = Traffic(
        Trace("real", "as it was played", rates, 2), arrivals, model.service_seconds(random, len(arrivals))
    )
    endpoint = Endpoint(service, model, Limits(1, most))
    answered: list[Arrival] = []

    def note(log: Sequence[tuple[float, int, float]]) -> None:
        answered.extend(
            Arrival(when - min(latency, 1e6) - WARM_UP_SECONDS, min(latency, 1e6) * 1000) for when, _, latency in log
        )

    outcome = simulate(
        traffic,
        endpoint,
        make_policy(PolicyKind.PENSTOCK, endpoint, HEADROOM),
        FleetSettings(start_up_seconds=played.start_up_seconds),
        scrape_interval=OWN_SCRAPE_SECONDS,
        on_answered=note,
    )
    grown = next((float(at) for at, number in enumerate(outcome.replicas) if number > outcome.replicas[0]), None)
    return Played(answered, grown, played.start_up_seconds, played.seconds, played.foreign_share)


def disagreements(real: Played, model: Played, objective: float, parts: Sequence[Phase]) -> list[str]:
    """What differs by more than the two may, in words."""
    found = []
    for phase in parts:
        _, late, p95 = phase.of(real.arrivals, objective)
        _, late_simulated, p95_simulated = phase.of(model.arrivals, objective)
        if abs(late - late_simulated) > LATE_APART:
            found.append(f"{phase.name}: {late:.1%} late, simulated {late_simulated:.1%}")
        factor = OVERLOADED_P95_FACTOR if max(late, late_simulated) > OVERLOADED else P95_FACTOR
        if not 1 / factor <= p95 / max(p95_simulated, 1e-3) <= factor:
            found.append(f"{phase.name}: p95 {p95:.0f} ms, simulated {p95_simulated:.0f}")
    if (real.grown_at is None) is not (model.grown_at is None):
        found.append("only one of the two has grown")
    elif real.grown_at is not None and model.grown_at is not None and abs(real.grown_at - model.grown_at) > GROWN_APART:
        found.append(f"grown after {real.grown_at:.0f} s, simulated {model.grown_at:.0f}")
    return found


def run(
    folder: Path, *, tokens: int, calm: float, peak: float, most: int
) -> tuple[Played, Played, float, CapacityCurve]:
    """Both worlds: the real one, the simulated one, the objective in milliseconds, and the curve."""
    placement = place(read_host(), most)
    client = placement.client or placement.server
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    lengths = np.random.default_rng(3).integers(tokens // 2, tokens * 3 // 2, 200)
    bodies = predict_bodies(TaskName.FEATURE_EXTRACTION, tokenizer, [int(length) for length in lengths])
    artefact = artefact_of(folder, tokens)
    curve = measured_curve(artefact, bodies, placement.server[0], client, folder / "curve.log")
    service = Service.from_curve(curve, pooled=True)
    if service is None:
        raise click.ClickException("the capacity of a replica could not be measured: run it on a quieter machine")
    due = arrivals_of(service.rate, calm, peak)
    settings = ScalingSettings(max_replicas=most, headroom=HEADROOM)
    replicas = Replicas(artefact, placement.server, folder)
    real = asyncio.run(
        play(replicas, service, settings, due, [one.body for one in bodies], seconds=2 * calm + peak, cpus=client)
    )
    return real, simulated(curve, service, due, real, most), service.p95_objective_milliseconds, curve


@click.command(cls=Program, help=__doc__)
@click.option("--tokens", default=128, show_default=True, help="Of a text, on average.")
@click.option("--calm", default=40.0, show_default=True, help="Seconds before and after the peak.")
@click.option("--peak", default=120.0, show_default=True, help="Seconds of the peak.")
@click.option("--most", default=2, show_default=True, help="Replicas at most, a core each.")
def main(*, tokens: int, calm: float, peak: float, most: int) -> None:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="penstock-simulated-") as folder:
        real, model, objective, curve = run(Path(folder), tokens=tokens, calm=calm, peak=peak, most=most)
    rate = curve.rate_within(objective) or 0.0
    click.echo(f"replica   {rate:.1f} requests/s within p95 {objective:.0f} ms; {len(curve.points)} points measured")
    click.echo(f"start-up  {real.start_up_seconds:.1f} s; grown after {real.grown_at} s, simulated {model.grown_at}")
    click.echo(f"{'phase':<16}{'requests':>9}{'late':>9}{'simulated':>11}{'p95 ms':>9}{'simulated':>11}")
    parts = phases(calm, peak)
    for phase in parts:
        count, late, p95 = phase.of(real.arrivals, objective)
        _, late_simulated, p95_simulated = phase.of(model.arrivals, objective)
        click.echo(f"{phase.name:<16}{count:>9}{late:>9.1%}{late_simulated:>11.1%}{p95:>9.0f}{p95_simulated:>11.0f}")
    wrong = disagreements(real, model, objective, parts)
    click.echo(f"agreement {verdict(real.foreign_share, reached=not wrong)}{''.join(f'; {one}' for one in wrong)}")


if __name__ == "__main__":
    main()
