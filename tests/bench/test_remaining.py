"""How long an experiment still takes."""

from __future__ import annotations

import pytest

from penstock_bench.grid import FEWEST, BenchSetting, plan_grid, remaining_seconds

SETTINGS = plan_grid((1, 2, 4), (8, 32, 128), (1, 8), machine_cores=4, max_tokens=512).settings


def cost(setting: BenchSetting) -> float:
    """Two seconds each, and some more for every token."""
    return 2 + 0.01 * setting.tokens * setting.batch / setting.cores


def test_there_is_no_estimate_before_the_first_measurement() -> None:
    taken = [(setting, 1.0) for setting in SETTINGS[: FEWEST - 1]]

    assert remaining_seconds(taken, SETTINGS) is None


def test_the_estimate_counts_the_longer_time_of_long_settings() -> None:
    done, missing = SETTINGS[:6], SETTINGS[6:]
    expected = sum(map(cost, missing))

    assert remaining_seconds([(one, cost(one)) for one in done], missing) == pytest.approx(expected, rel=0.1)
