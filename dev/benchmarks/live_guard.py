"""What the guard of live traffic costs: p99 and CPU time with it and without it, in turn, at shares of the capacity.

    python -m benchmarks.live_guard ARTEFACT [--seconds 10] [--rounds 5] [--share 0.3 --share 0.6 --share 0.8]

Both servers are pinned to the artefact's cores and wait while the other one is measured. Requests arrive at random;
each has a text of its own, since the guard compares a text once. The load generator has the other cores of the machine,
if there are any.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import click

from benchmarks.program import Program
from penstock.manifest import Manifest
from penstock.process import python_module
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.generator import ClosedLoop, LoadSpec, OpenLoop, run_load
from penstock_optimizer.load.workload import EVERYDAY_WORDS

SHARE = 0.02
TEXTS = 4000
PORTS = {"off": 18531, "on": 18532}
CLIENTS = 16


@contextmanager
def server(artefact: Path, kind: str) -> Iterator[str]:
    """`penstock serve`, until it is ready; its URL."""
    words = [
        "serve",
        str(artefact),
        "--port",
        str(PORTS[kind]),
        "--live-guard-share",
        str(SHARE if kind == "on" else 0),
    ]
    url = f"http://127.0.0.1:{PORTS[kind]}"
    process = subprocess.Popen([*python_module("penstock_cli.main"), *words], stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"{url}/readyz", timeout=1):
                    break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def metric(url: str, name: str) -> float:
    """A metric without labels; 0 if there is none."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def bodies(dice: random.Random) -> tuple[RequestBody, ...]:
    """Different texts of 8 to 60 words."""
    texts = (" ".join(dice.choices(EVERYDAY_WORDS, k=dice.randint(8, 60))) for _ in range(TEXTS))
    return tuple(RequestBody(body=json.dumps({"inputs": text})) for text in texts)


@click.command(cls=Program, help=__doc__)
@click.argument("artefact", type=click.Path(exists=True, path_type=Path))
@click.option("--seconds", default=10.0, show_default=True, help="Of each measurement.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--share", "shares", multiple=True, default=(0.3, 0.6, 0.8), show_default=True, help="Of the capacity.")
def main(*, artefact: Path, seconds: float, rounds: int, shares: Sequence[float]) -> None:
    """Measure."""
    cores, dice = Manifest.load(artefact).cores, random.Random(1)  # noqa: S311 - reproducible, not secret
    with ExitStack() as stack:
        urls = {kind: stack.enter_context(server(artefact, kind)) for kind in PORTS}
        os.sched_setaffinity(0, set(range(cores, os.cpu_count() or 1)) or os.sched_getaffinity(0))

        def measure(kind: str, pattern: ClosedLoop | OpenLoop) -> tuple[float, float, float]:
            """Answers per second, p99 in milliseconds, and the guard's share of the cores' time."""
            url = urls[kind]
            spec = LoadSpec(url=f"{url}/predict", bodies=bodies(dice), pattern=pattern, seconds=seconds)
            before, begin = metric(url, "penstock_shadow_cpu_seconds_total"), time.monotonic()
            found = run_load(spec)
            spent = metric(url, "penstock_shadow_cpu_seconds_total") - before
            assert found.latency is not None, found.first_failure
            return found.completed_per_second, found.latency.p99, spent / (time.monotonic() - begin) / cores

        capacity, _, _ = measure("off", ClosedLoop(clients=CLIENTS))
        measure("on", ClosedLoop(clients=CLIENTS))  # loads fp32
        click.echo(f"capacity: {capacity:.0f} requests/s on {cores} cores")
        for share in shares:
            found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in PORTS}
            for number in range(rounds):
                for kind in sorted(PORTS, reverse=bool(number % 2)):
                    found[kind].append(measure(kind, OpenLoop(arrivals_per_second=capacity * share)))
            p99 = {kind: [one[1] for one in measured] for kind, measured in found.items()}
            ratios = sorted(on / off for on, off in zip(p99["on"], p99["off"], strict=True))
            click.echo(
                f"{share:.0%} of it: p99 {median(p99['off']):.1f} ms without ({min(p99['off']):.1f} to "
                f"{max(p99['off']):.1f}), {median(p99['on']):.1f} ms with ({min(p99['on']):.1f} to "
                f"{max(p99['on']):.1f}), ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); the guard "
                f"took {median([one[2] for one in found['on']]):.2%} of the cores' time"
            )


if __name__ == "__main__":
    main()
