"""Replica-hours and late requests of this autoscaler on simulated traces, and of another version of it.

The traces are the built-in ones and those shaped like recorded traffic. A change of the autoscaler is judged with two
runs: one with the package of another version (`--package`) that writes its figures, one with this version that prints
the differences.

    git archive COMMIT operator/penstock_operator/autoscaler | tar -x -C /tmp/before
    python -m benchmarks.autoscaler --package /tmp/before/operator/penstock_operator/autoscaler --out before.json
    python -m benchmarks.autoscaler --against before.json
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.program import Program

PACKAGE = "penstock_operator.decide"
HEADROOM = 0.75
START_UP_SECONDS = 40.0


@dataclass(frozen=True)
class Figures:
    """One trace: means over the seeds."""

    requests: float
    late: float
    replica_hours: float
    flips: float


def load_package(folder: Path | None) -> None:
    """Import the autoscaler from another folder, in a process that has not imported it yet."""
    if folder is None:
        return
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or PACKAGE in sys.modules:
        raise click.ClickException(f"the autoscaler cannot be imported from {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


def run(job: tuple[str, int]) -> Figures:
    """One trace with one seed."""
    # Imported here, since `load_package` has to come first.
    from benchmarks.recorded import RECORDED, recorded
    from penstock_operator.decide import Service
    from penstock_simulator.choices import PolicyKind
    from penstock_simulator.compare import Traffic, simulate
    from penstock_simulator.fleet import MODEL, FleetSettings, reference_curve
    from penstock_simulator.policies import OWN_SCRAPE_SECONDS, Endpoint, Limits, make_policy
    from penstock_simulator.traces import built_in

    name, seed = job
    service = Service.from_curve(reference_curve(), pooled=True)
    if service is None:
        raise click.ClickException("the reference endpoint has no capacity curve")
    endpoint = Endpoint(service, MODEL, Limits())
    trace = (recorded if name in RECORDED else built_in)(name, service.rate, seed)
    outcome = simulate(
        Traffic.of(trace, endpoint, seed),
        endpoint,
        make_policy(PolicyKind.PENSTOCK, endpoint, HEADROOM),
        FleetSettings(start_up_seconds=START_UP_SECONDS),
        scrape_interval=OWN_SCRAPE_SECONDS,
    )
    return Figures(outcome.requests, outcome.late, outcome.replica_hours, outcome.flips)


def mean(figures: list[Figures]) -> Figures:
    """Of several seeds."""
    count = len(figures)
    return Figures(
        sum(one.requests for one in figures) / count,
        sum(one.late for one in figures) / count,
        sum(one.replica_hours for one in figures) / count,
        sum(one.flips for one in figures) / count,
    )


def total(figures: Mapping[str, Figures], names: list[str]) -> Figures:
    """Of several traces."""
    chosen = [figures[name] for name in names]
    one = mean(chosen)
    count = len(chosen)
    return Figures(one.requests * count, one.late * count, one.replica_hours * count, one.flips * count)


def row(name: str, now: Figures, before: Figures | None) -> str:
    """A row of the table, in Markdown."""
    cells = [name, f"{now.requests:,.0f}"]
    if before is not None:
        cells += [f"{before.late:,.0f}", f"{now.late:,.0f}", f"{now.late / before.late - 1:+.1%}"]
        cells += [f"{before.replica_hours:.2f}", f"{now.replica_hours:.2f}"]
        cells += [f"{now.replica_hours / before.replica_hours - 1:+.1%}", f"{before.flips:.1f}", f"{now.flips:.1f}"]
    else:
        cells += [f"{now.late:,.0f}", f"{now.late / now.requests:.2%}", f"{now.replica_hours:.2f}", f"{now.flips:.1f}"]
    return f"| {' | '.join(cells)} |"


@click.command(cls=Program, help=__doc__)
@click.option("--seeds", default=3, show_default=True, help="Runs of each trace, with seeds 1, 2, ...")
@click.option("--workers", default=2, show_default=True, help="Processes.")
@click.option("--trace", "only", multiple=True, help="Only these traces.")
@click.option("--package", type=click.Path(path_type=Path, exists=True), help="Folder of another version's package.")
@click.option("--out", type=click.Path(path_type=Path), help="File for the figures, JSON.")
@click.option("--against", type=click.Path(path_type=Path, exists=True), help="Figures of another version.")
def main(
    *, seeds: int, workers: int, only: tuple[str, ...], package: Path | None, out: Path | None, against: Path | None
) -> None:
    """Simulate, and print a table."""
    from benchmarks.recorded import RECORDED
    from penstock_simulator.choices import BUILT_IN_TRACES

    names = [name for name in (*BUILT_IN_TRACES, *RECORDED) if not only or name in only]
    jobs = [(name, seed) for name in names for seed in range(1, seeds + 1)]
    figures: dict[str, Figures] = {}
    before: dict[str, Figures] = {}
    if against is not None:
        before = {name: Figures(**values) for name, values in json.loads(against.read_text()).items()}
    head = ["trace", "requests", "late", "share", "replica-hours", "flips"]
    if before:
        head = ["trace", "requests", "late before", "late", "", "replica-hours before", "replica-hours", ""]
        head += ["flips before", "flips"]
    click.echo(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    with ProcessPoolExecutor(workers, initializer=load_package, initargs=(package,)) as pool:
        outcomes = pool.map(run, jobs)
        for name in names:
            figures[name] = mean([next(outcomes) for _ in range(seeds)])
            click.echo(row(name, figures[name], before.get(name)))
    for title, group in (("built-in", BUILT_IN_TRACES), ("recorded-like", RECORDED), ("all", names)):
        chosen = [name for name in group if name in figures]
        if chosen:
            known = all(name in before for name in chosen)
            click.echo(row(f"**{title}**", total(figures, chosen), total(before, chosen) if known else None))
    if out is not None:
        out.write_text(json.dumps({name: vars(one) for name, one in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
