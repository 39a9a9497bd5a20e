"""When requests arrive: a Poisson process, which is what many independent clients look like from the server."""

from __future__ import annotations

import random


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> list[float]:
    """Arrival times in seconds from 0 to below `seconds`, at a mean of `rate` a second; the same for the same seed.

    Given their number, the arrivals of a Poisson process are independent and uniform over the interval; we fix the
    number at its mean, so that an offered rate is exactly what it says and only the spacing is random.
    """
    if rate <= 0 or seconds <= 0:
        raise ValueError(f"rate ({rate}) and seconds ({seconds}) must be positive")
    generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
    return sorted(generator.random() * seconds for _ in range(max(1, round(rate * seconds))))
