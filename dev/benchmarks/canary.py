"""How often the rule of canaries rejects new pods that are equal, and that are worse, by simulation.

    python -m benchmarks.canary [--trials 2000]

Requests are independent. Latencies are log-normal with a median of 10 ms and a p95 of 23 ms; those of worse pods are
longer by a factor. The new pods get 10 % of the requests. Prints the table of docs/explanation/canary.md.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random

import click

from benchmarks.markdown import markdown_table
from penstock_operator.scaling.decide.trial import LOOKS, CanaryOutcome, CanaryTrial, PlanCounts

BOUNDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, math.inf)
"""Of a latency histogram, in seconds."""
MEDIAN_SECONDS, SPREAD = 0.010, 0.5
ERRORS = 0.002
"""Share of the requests with an error, of the present pods."""
SECONDS = 600.0


def counts_of(dice: random.Random, requests: int, *, errors: float, slow_by: float) -> PlanCounts:
    """The counts of this many requests of a plan. `errors`: their share; `slow_by`: factor of the latencies."""
    counts = [0] * len(BOUNDS)
    for _ in range(requests):
        seconds = slow_by * MEDIAN_SECONDS * math.exp(SPREAD * dice.gauss(0, 1))
        counts[bisect.bisect_left(BOUNDS, seconds)] += 1
    buckets = dict(zip(BOUNDS, map(float, itertools.accumulate(counts)), strict=True))
    return PlanCounts(requests, sum(dice.random() < errors for _ in range(requests)), buckets)


def _sum(one: PlanCounts, other: PlanCounts) -> PlanCounts:
    buckets = {bound: one.buckets.get(bound, 0.0) + count for bound, count in other.buckets.items()}
    return PlanCounts(one.requests + other.requests, one.errors + other.errors, buckets)


def rejected_share(
    dice: random.Random,
    *,
    trials: int,
    requests: int,
    percent: int,
    error_share: float,
    new_errors: float,
    slow_by: float,
) -> float:
    """Share of the canaries that are rejected, of which each has this number of requests in all."""
    rejected = 0
    for _ in range(trials):
        old, new, trial = PlanCounts(), PlanCounts(), CanaryTrial(SECONDS)
        for look in range(1, LOOKS + 1):
            part = requests * percent // 100 // LOOKS
            new = _sum(new, counts_of(dice, part, errors=new_errors, slow_by=slow_by))
            old = _sum(old, counts_of(dice, requests // LOOKS - part, errors=error_share, slow_by=1.0))
            found, trial = trial.look(old, new, look * SECONDS / LOOKS)
            if found.outcome is not CanaryOutcome.CONTINUE:
                rejected += found.outcome is CanaryOutcome.REJECT
                break
    return rejected / trials


CASES = (
    ("equal", ERRORS, 1.0),
    ("1 % errors", 0.01, 1.0),
    ("2 % errors", 0.02, 1.0),
    ("5 % errors", 0.05, 1.0),
    ("latencies 1.2 times as long", ERRORS, 1.2),
    ("latencies 1.4 times as long", ERRORS, 1.4),
    ("latencies twice as long", ERRORS, 2.0),
)


@click.command
@click.option("--trials", default=500, show_default=True, help="Canaries of each cell.")
def main(trials: int) -> None:
    """Print the table."""
    sizes = (2_000, 5_000, 20_000)
    rows = []
    for name, errors, slow_by in CASES:
        shares = (
            rejected_share(
                random.Random(f"{name} {size}"),  # noqa: S311 - a simulation
                trials=trials,
                requests=size,
                percent=10,
                error_share=ERRORS,
                new_errors=errors,
                slow_by=slow_by,
            )
            for size in sizes
        )
        rows.append([name, *(f"{share:.1%}" for share in shares)])
    click.echo(markdown_table(["new pods", *(f"{size // 10:,} of {size:,}" for size in sizes)], rows))


if __name__ == "__main__":
    main()
