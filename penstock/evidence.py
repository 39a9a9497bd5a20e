"""Evidence that the mean of outcomes is above a limit, valid at any number of looks.

An outcome is a number from 0 to 1: the recall of a query, or the damage of an answer. The evidence is the capital of a
bettor who starts with 1 and bets a part of it on each outcome being above the limit. If the mean of each outcome, given
those before it, is at most the limit, the capital is a non-negative supermartingale, so that it reaches 1/alpha at any
time with a probability of at most alpha (Ville's inequality; Waudby-Smith and Ramdas, arXiv 2010.09686). The mean of
several such values (bets, replicas, kinds of outcomes) is one again.

Plain lists: the operator has no numpy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

BETS = (0.5, 1.0)
"""Capital at stake for each unit of an outcome above a limit near 1. More bets cost evidence, fewer adapt less."""
CAPITAL_LIMIT = 1e12
"""Of one bet. Less capital than a bettor could have keeps the bound."""
RESTART_EVERY = 50
RESTART_SCALE = 1000
"""A share n / (n + RESTART_SCALE) of the capital has been used after n outcomes."""


@dataclass
class MeanEvidence:
    """The evidence of outcomes that arrive one after another. Its fields are its whole state.

    `reserve` is capital that is not at stake yet: 0 without restarts. With them, a part of it comes into play every
    RESTART_EVERY outcomes, so that a change after a long quiet time is found nearly as soon as one at the start.
    """

    limit: float
    """The mean that outcomes have at most, by the hypothesis; in (0, 1)."""
    bets: Sequence[float]
    """Each in (0, 1 / limit]."""
    capital: list[float] = field(default_factory=list)
    """Of each bet."""
    reserve: float = 0.0
    count: int = 0
    """Outcomes so far."""

    @classmethod
    def without_restarts(cls, limit: float, bets: Sequence[float] = BETS) -> Self:
        """All capital is at stake from the first outcome on."""
        return cls(limit, bets, [1 / len(bets)] * len(bets))

    @classmethod
    def with_restarts(cls, limit: float, bets: int = 12) -> Self:
        """For a limit near 0. The bets are a geometric series from 0.004 to 0.4 of the largest possible one."""
        series = [0.004 * 100 ** (index / (bets - 1)) / limit for index in range(bets)]
        return cls(limit, series, [0.0] * bets, reserve=1.0)

    @property
    def value(self) -> float:
        """The evidence so far: the hypothesis is rejected with an error of at most alpha when it reaches 1/alpha."""
        return sum(self.capital) + self.reserve

    def add(self, outcome: float) -> float:
        """The evidence after one more outcome, from 0 to 1."""
        share = self.share_from_reserve()
        self.reserve -= share
        self.capital = [min(CAPITAL_LIMIT, each) for each in self.grown(share, outcome)]
        self.count += 1
        return self.value

    def share_from_reserve(self) -> float:
        """Capital that comes into play before the next outcome."""
        if self.reserve <= 0 or self.count % RESTART_EVERY:
            return 0.0
        before, after = (n / (n + RESTART_SCALE) for n in (self.count, self.count + RESTART_EVERY))
        return min(self.reserve, after - before)

    def grown(self, share: float, outcome: Any) -> list[Any]:
        """The capital of each bet after an outcome. Outcome and capital may be arrays: one stream for each element."""
        part = share / len(self.bets)
        gain = outcome - self.limit
        return [(each + part) * (1 + bet * gain) for each, bet in zip(self.capital, self.bets, strict=True)]


ODDS = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""How many times as probable a hit is in the first group, by the bets of `ShareEvidence`."""


@dataclass(frozen=True)
class ShareEvidence:
    """The evidence that hits (such as errors) are a larger share of one group's items than of another's.

    Each hit is an outcome: 1 if it is of the first group. If both groups are alike, the hits of the first group among
    all hits of a look have the hypergeometric distribution, and their exponential moments are at most those of
    independent hits (Hoeffding, 1963): the product over the looks is a supermartingale.
    """

    logs: tuple[float, ...] = (0.0,) * len(ODDS)
    """The natural logarithm of each bet's capital."""

    def add(self, hits: int, all_hits: int, share: float) -> ShareEvidence:
        """With a further look: `hits` of `all_hits` are of the first group, which has this share of its items."""
        if not 0 < share < 1 or all_hits <= 0:
            return self
        gains = (hits * math.log(odds) - all_hits * math.log1p(share * (odds - 1)) for odds in ODDS)
        return ShareEvidence(tuple(log + gain for log, gain in zip(self.logs, gains, strict=True)))

    @property
    def value(self) -> float:
        """As `MeanEvidence.value`, at most CAPITAL_LIMIT."""
        limit = math.log(CAPITAL_LIMIT)
        return sum(math.exp(min(limit, log)) for log in self.logs) / len(ODDS)


def log_evidence(outcomes: Iterable[float], limit: float, bets: Sequence[float] = BETS) -> float:
    """The natural logarithm of the evidence that the mean of all outcomes is above the limit.

    It is the value of `MeanEvidence.without_restarts` without a limit of the capital, and independent of their order.
    """
    return _log_evidence(Counter(outcomes), limit, bets)


def _log_evidence(counts: Mapping[float, int], limit: float, bets: Sequence[float]) -> float:
    terms = [
        sum(count * math.log1p(bet * (outcome - limit)) for outcome, count in counts.items()) - math.log(len(bets))
        for bet in bets
    ]
    largest = max(terms)
    return largest + math.log(sum(math.exp(term - largest) for term in terms))


def lower_bound(outcomes: Iterable[float], alpha: float, bets: Sequence[float] = BETS) -> float:
    """The lower confidence bound of the mean: the largest limit that the evidence rejects with an error of alpha.

    Bets are at most 1. The bound holds for any number of outcomes, and if the number depends on the outcomes.
    """
    counts = Counter(outcomes)
    low, high = 0.0, 1.0
    if _log_evidence(counts, low, bets) < -math.log(alpha):
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_evidence(counts, middle, bets) >= -math.log(alpha) else (low, middle)
    return low


def upper_bound(outcomes: Iterable[float], alpha: float, bets: Sequence[float] = BETS) -> float:
    """The upper confidence bound of the mean."""
    return 1 - lower_bound((1 - outcome for outcome in outcomes), alpha, bets)
