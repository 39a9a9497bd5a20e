"""What is taken for noise, and what is done about it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.scaling.decide.noise import LEVEL_SECONDS, deviation, rest, unrest_of
from tests.operator.scaling.decide.cases import SETTINGS, Replay, flips, service, traffic

STEP = 2.0


def averages(course: np.ndarray, step: float = STEP) -> np.ndarray:
    """The course smoothed once, twice and three times, every so many seconds; shape [steps, 3]."""
    pace = 1 - math.exp(-step / LEVEL_SECONDS)
    once = twice = thrice = float(course[0])
    rows = []
    for value in course.tolist():
        once += pace * (value - once)
        twice += pace * (once - twice)
        thrice += pace * (twice - thrice)
        rows.append((once, twice, thrice))
    return np.array(rows)


def bouts(
    seed: int, *, mean: float, share: float, seconds: int, correlation: float = 30.0, step: float = STEP
) -> np.ndarray:
    """A rate that moves about its mean by a share of it, correlated over some seconds; shape [seconds / step]."""
    random = np.random.default_rng(seed)
    keep = math.exp(-step / correlation)
    path, value = [], 0.0
    for shock in random.normal(0, share * math.sqrt(1 - keep * keep), int(seconds / step)):
        value = keep * value + shock
        path.append(mean * math.exp(value - share * share / 2))
    return np.array(path)


@given(st.floats(1, 1e4), st.floats(-1, 1))
def test_a_line_leaves_nothing_however_steep(begin: float, slope: float) -> None:
    course = begin + slope * begin / 1000 * STEP * np.arange(2000)

    assert rest(*averages(course)[-1].tolist()) == pytest.approx(0, abs=1e-6 * begin)


# As often as the operator scrapes by itself, and as often as a Prometheus does.
paces = pytest.mark.parametrize("step", [STEP, 5.0, 15.0])


@paces
def test_what_moves_about_in_bouts_is_seen_as_wide_as_it_is(step: float) -> None:
    rows = averages(bouts(1, mean=1000.0, share=0.2, seconds=int(100_000 * step), step=step), step)[500:]

    unrest = float(np.mean([unrest_of(once, twice, thrice, step) for once, twice, thrice in rows.tolist()]))

    mean, seen = float(rows[:, 0].mean()), float(rows[:, 0].std())
    assert deviation(mean, unrest) == pytest.approx(seen, rel=0.2)


@paces
def test_a_poisson_count_alone_is_no_unrest(step: float) -> None:
    random = np.random.default_rng(2)
    rows = averages(random.poisson(50 * step, 100_000) / step, step)[500:]

    unrest = float(np.mean([unrest_of(once, twice, thrice, step) for once, twice, thrice in rows.tolist()]))

    assert abs(unrest) < 3e-5
    assert deviation(50, unrest) == pytest.approx(float(rows[:, 0].std()), rel=0.15)


def test_noise_that_is_known_turns_the_number_less_than_once_in_two_hours() -> None:
    turns = []
    for seed in range(12):
        mean = 30.0 + 5 * seed
        rates = bouts(seed, mean=mean, share=0.2, seconds=5500)
        replay = Replay(replicas=20).settled(mean)
        replay.play(lambda since, rates=rates: traffic(float(rates[int(since / STEP)])), 1800)  # type: ignore[misc]
        before = replay.replicas

        numbers = replay.play(
            lambda since, rates=rates: traffic(float(rates[900 + int(since / STEP)])),  # type: ignore[misc]
            3600,
        )

        turns.append(flips([before, *numbers]))
    assert sum(turns) <= len(turns) / 2, turns
    assert max(turns) <= 2, turns


def test_what_a_rise_was_grown_for_stays_for_a_window_even_if_it_was_noise() -> None:
    settings = SETTINGS.model_copy(update={"headroom": 0.7})
    for seed in range(8):
        mean = 25.0 + 2 * seed
        replay = Replay(settings, service(pooled=True), replicas=20).settled(mean)
        grown_at = None
        for rate in bouts(seed, mean=mean, share=0.2, seconds=3600).tolist():
            before = replay.replicas
            decision = replay.tick(traffic(rate), seconds=STEP)
            if decision.replicas > before:
                # The surplus of a surge is given back before it has started.
                surge = decision.demand is not None and decision.demand.surge is not None
                grown_at = None if surge else replay.now
            if decision.replicas < before and grown_at is not None:
                assert replay.now - grown_at >= 0.5 * settings.shrink_window_seconds, (seed, decision.reason)
