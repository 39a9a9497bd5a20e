"""How much a demand moves about that goes nowhere: what hysteresis has to be wider than. Pure arithmetic.

All rates are requests per second over the whole endpoint.

Requests that come by chance are a Poisson count, whose deviation is known. Real traffic moves about by more than
that, in bouts of half a minute or so; by how much is observed. Noise is what is left of the smoothed demand when its
course is taken away, and the course is a straight line: smoothed once, twice and three times, a line lags by one, two
and three time constants, so that the first less twice the second and the third has nothing of the line in it, and
something of all else.
"""

from __future__ import annotations

import math

LEVEL_SECONDS = 30.0
"""Time constant of the smoothed demand: shorter than a start-up, longer than chance at a few requests a second."""
BASE_SECONDS = 150.0
"""Time constant of what the level is held against to see it rise: long enough that a slow rise is more than chance."""
UNREST_SECONDS = 300.0
"""Time constant of the average over what was observed."""
LASTING_SECONDS = 1200.0
"""Time constant with which noise that was seen is forgotten, by those who ask how much may come back."""
BAND = 3.0
"""A demand that is over its longer average by no more than so many deviations of their difference goes nowhere."""
AVERAGED = 0.6
"""The deviation of the longer average is this share of the level's, where bouts last for half a minute."""
WIDER = 3.0
"""The deviation of the level is so many times that of what is left of it, where bouts last for half a minute."""
POISSON = 8 / 3
"""The same for the variance, where there is nothing but chance."""
STEADY = 3.5
"""Standard deviations of the level: of the sixty independent values of an hour none is beyond them in 70 hours."""
UNSEEN = (0.13 / STEADY / WIDER) ** 2
"""Unrest before any was observed: with it so many deviations are 13 %."""


def rest(once: float, twice: float, thrice: float) -> float:
    """What is left of the demand without its course, requests/s; it is given smoothed once, twice and three times."""
    return once - 2 * twice + thrice


def unrest_of(once: float, twice: float, thrice: float, elapsed_seconds: float) -> float:
    """One observation: the variance of that as a share of the level squared, without that of a Poisson count.

    `elapsed_seconds` is the time since the last decision: the longer, the less is left of the demand, since all three
    have then followed it further.
    """
    chance = once / (2 * LEVEL_SECONDS) / POISSON
    return (rest(once, twice, thrice) ** 2 * _coarseness(elapsed_seconds) - chance) / (once * once)


def _coarseness(elapsed_seconds: float) -> float:
    """By how much less the variance of what is left is than with decisions all the time; at least 1.

    Smoothing step by step with q = exp(-t/T) leaves of independent values H = (1-q)/(1-qz) of the level, variance
    (1-q)/(1+q), and H(1-H)^2 of the rest, variance 6 q^4 (1-q)/(1+q)^5: their ratio is ((1+q)/q)^4 / 6.
    """
    followed = math.exp(min(elapsed_seconds, LEVEL_SECONDS) / LEVEL_SECONDS)
    return ((1 + followed) / 2) ** 4


def deviation(level: float, unrest: float) -> float:
    """The standard deviation of the level, requests/s: chance, and what was observed beyond it."""
    # An average over an exponential of constant T is as sure as a count over 2 T.
    return math.sqrt(level / (2 * LEVEL_SECONDS) + max(0.0, unrest) * (WIDER * level) ** 2)
