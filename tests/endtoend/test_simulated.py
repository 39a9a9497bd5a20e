"""The autoscaler's simulator compared with real replicas under a real load (dev/benchmarks/simulated.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.replicas import Arrival, Played
from benchmarks.simulated import arrivals_of, disagreements, phases, run
from penstock_bench.judge import QUIET_ENOUGH
from penstock_runtime.host import read_host

CALM, PEAK = 20.0, 60.0
OBJECTIVE = 100.0


def played(milliseconds: dict[str, float], *, grown_at: float | None = 24.0) -> Played:
    """A request every tenth of a second, as slow as its phase."""
    arrivals = [
        Arrival(at / 10, milliseconds[phase.name])
        for phase in phases(CALM, PEAK)
        for at in range(int(phase.begin * 10), int(phase.end * 10))
    ]
    return Played(arrivals, grown_at, 5.0, 2 * CALM + PEAK, 0.0)


STEADY = {"calm": 50.0, "peak, growing": 900.0, "peak, grown": 80.0, "calm again": 50.0}


def test_the_arrivals_are_a_step_and_its_end() -> None:
    due = arrivals_of(20.0, CALM, PEAK)

    counts = [sum(phase.begin <= at < phase.end for at in due) for phase in phases(CALM, PEAK)]
    assert counts[0] == 200
    assert sum(counts[1:3]) == 1920
    assert counts[3] == 160
    assert due == sorted(due)


@pytest.mark.parametrize(
    ("other", "grown_at", "differences"),
    [
        (STEADY, 24.0, []),
        ({**STEADY, "calm": 60.0, "peak, grown": 95.0}, 26.0, []),
        ({**STEADY, "peak, grown": 150.0}, 24.0, ["peak, grown: 0.0% late, simulated 100.0%"]),
        ({**STEADY, "calm": 20.0}, 24.0, ["calm: p95 50 ms, simulated 20"]),
        (STEADY, None, ["only one of the two has grown"]),
        (STEADY, 40.0, ["grown after 24 s, simulated 40"]),
    ],
)
def test_differences_are_reported(other: dict[str, float], grown_at: float | None, differences: list[str]) -> None:
    found = disagreements(played(STEADY), played(other, grown_at=grown_at), OBJECTIVE, phases(CALM, PEAK))

    assert found == differences


@pytest.mark.slow
@pytest.mark.extended
def test_late_requests_p95_and_growth_are_as_simulated(tmp_path: Path) -> None:
    if len(read_host().cores) < 3:
        pytest.skip("two replicas and a client need a core each")

    real, model, objective, _ = run(tmp_path, tokens=128, calm=CALM, peak=PEAK, most=2)

    if real.foreign_share > QUIET_ENOUGH:
        pytest.skip(f"other processes used {real.foreign_share:.0%} of the replicas' CPUs: the figures mean nothing")
    assert real.grown_at is not None
    assert disagreements(real, model, objective, phases(CALM, PEAK)) == []
