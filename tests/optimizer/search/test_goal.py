"""Comparing measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.resources.endpoint import Latency, Objective, Throughput
from penstock_optimizer.search.goal import Goal, Pair, PlanSample, Quantity, Ranking

LATENCY = Objective(latency=Latency(p95_milliseconds=20))
THROUGHPUT = Objective(throughput=Throughput(requests_per_second=100))
BOTH = Objective(latency=Latency(p95_milliseconds=20), throughput=Throughput(requests_per_second=100))


def sample(p50: float = 5, p95: float = 10, rows: float = 100, loaded: float | None = None) -> PlanSample:
    return PlanSample(
        p50_milliseconds=p50, p95_milliseconds=p95, requests_per_second=rows, loaded_p95_milliseconds=loaded
    )


@pytest.mark.parametrize(
    ("objective", "challenger", "incumbent", "ranking", "criterion"),
    [
        (LATENCY, sample(p95=8), sample(), Ranking.BETTER, "single-request latency"),
        (LATENCY, sample(p95=8, rows=10), sample(), Ranking.BETTER, "single-request latency"),
        (LATENCY, sample(p95=9.8, rows=120), sample(), Ranking.BETTER, "requests/s"),
        (LATENCY, sample(p95=10.2, rows=120), sample(), Ranking.BETTER, "requests/s"),
        (LATENCY, sample(p95=13, rows=500), sample(), Ranking.WORSE, "single-request latency"),
        (LATENCY, sample(rows=101), sample(), Ranking.SAME, "single-request latency"),
        (Objective(), sample(p50=4, p95=8), sample(), Ranking.BETTER, "single-request latency"),
        (THROUGHPUT, sample(p95=50, rows=120), sample(), Ranking.BETTER, "requests/s"),
        (THROUGHPUT, sample(p95=5), sample(), Ranking.BETTER, "single-request latency"),
        (THROUGHPUT, sample(p95=5, rows=80), sample(), Ranking.WORSE, "requests/s"),
        # Both are within the limit: the rate decides, however much closer to the limit the faster one is.
        (BOTH, sample(rows=120, loaded=19), sample(loaded=11), Ranking.BETTER, "requests/s"),
        (BOTH, sample(rows=900, loaded=30), sample(loaded=11), Ranking.WORSE, "p95 over the limit"),
        (BOTH, sample(rows=90, loaded=19), sample(loaded=40), Ranking.BETTER, "p95 over the limit"),
        (BOTH, sample(rows=90, loaded=30), sample(loaded=40), Ranking.BETTER, "p95 over the limit"),
    ],
)
def test_the_objective_decides_which_number_counts_first(
    objective: Objective, challenger: PlanSample, incumbent: PlanSample, ranking: Ranking, criterion: str
) -> None:
    found = Goal.of(objective).compare([Pair(challenger, incumbent)])

    assert (found.ranking, found.criterion) == (ranking, criterion)


def test_a_gain_within_the_scatter_of_the_pairs_does_not_count() -> None:
    pairs = [Pair(sample(p95=p95), sample()) for p95 in (6, 8, 11, 13)]

    found = Goal.of(LATENCY).compare(pairs)

    assert found.ranking is Ranking.SAME
    assert found.noise > 0.1


def test_only_an_objective_of_both_asks_for_a_loaded_measurement() -> None:
    objectives = (Objective(), LATENCY, THROUGHPUT, BOTH)
    asks = [Goal.of(objective).criteria[0].quantity is Quantity.P95_OVER_LIMIT for objective in objectives]

    assert asks == [False, False, False, True]


positive = st.floats(min_value=0.01, max_value=1e4)
samples = st.builds(
    PlanSample,
    p50_milliseconds=positive,
    p95_milliseconds=positive,
    requests_per_second=positive,
    loaded_p95_milliseconds=positive,
)


@given(a=samples, b=samples, objective=st.sampled_from([LATENCY, THROUGHPUT, BOTH, Objective()]))
def test_no_two_samples_both_beat_each_other(a: PlanSample, b: PlanSample, objective: Objective) -> None:
    goal = Goal.of(objective)
    forth = goal.compare([Pair(a, b)])
    back = goal.compare([Pair(b, a)])

    assert not (forth.ranking is Ranking.BETTER and back.ranking is Ranking.BETTER)
    assert goal.compare([Pair(a, a)]).ranking is Ranking.SAME


@given(
    base=samples,
    factor=st.floats(min_value=1.1, max_value=10),
    objective=st.sampled_from([LATENCY, THROUGHPUT, Objective()]),
)
def test_a_plan_that_is_faster_at_everything_is_never_ranked_worse(
    base: PlanSample, factor: float, objective: Objective
) -> None:
    faster = PlanSample(
        p50_milliseconds=base.p50_milliseconds / factor,
        p95_milliseconds=base.p95_milliseconds / factor,
        requests_per_second=base.requests_per_second * factor,
    )

    assert Goal.of(objective).compare([Pair(faster, base)]).ranking is Ranking.BETTER
