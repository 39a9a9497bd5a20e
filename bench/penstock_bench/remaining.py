"""How long the rest of an experiment takes, by what its settings have taken so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_bench.grid import BenchSetting

FEWEST = 3
"""Settings to be measured before an estimate is shown."""


def remaining_seconds(taken: Sequence[tuple[BenchSetting, float]], missing: Sequence[BenchSetting]) -> float | None:
    """Seconds for the settings in `missing`, by the seconds that others took; None while too few are known.

    The shortest took the time that every setting takes; what others took beyond it grew with the tokens of a request
    and shrank with the cores, since a cell ends with whole requests.
    """
    if len(taken) < FEWEST:
        return None
    least = min(seconds for _, seconds in taken)
    work = sum(_work(setting) for setting, _ in taken)
    slope = sum(seconds - least for _, seconds in taken) / work
    return sum(least + slope * _work(setting) for setting in missing)


def _work(setting: BenchSetting) -> float:
    return setting.tokens * setting.batch / max(setting.cores, 1)
