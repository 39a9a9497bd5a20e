"""Routing by length: does it pay to hold a second graph for short rows? Pure.

At a few tokens what an engine does around the products decides, at many the products themselves: the recipe that is
best over a workload need not be the best for its shortest rows, nor for its longest. The shortest hardly weigh in lone
latency over the workload (p50 and p95 are those of longer rows), so a route for them is held against the plan without
it by a measure of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.recipe import Plan, Recipe, ShortRoute
from penstock_optimizer.load.summary import median, relative_spread
from penstock_optimizer.search.goal import NEAR_LATENCY, NOISE_FLOOR, Comparison, Criterion, Goal, Pair, Ranking, Sample
from penstock_optimizer.search.space import NEVER_WIDE, Limits, WideFrom, first_plan
from penstock_optimizer.search.survivors import Timed, interpolate

SHORT_LENGTHS = (8, 16)
"""Tokens: the lengths that a route must gain at."""
LEAST_GAIN = 0.10
"""Of a lone row's time at the shortest length: less is not worth a second graph in memory."""
LEAST_STEP = 0.03
"""The gain that each longer length must still show to be routed as well."""
PROMISING = 0.05
"""A recipe this much faster at the shortest or the longest length, as it was measured among all, is looked at again."""
LEAST_SHARE = 0.02
"""Of the workload's rows that each side must have."""
MOST_RIVALS = 2


def short_lengths(workload: Sequence[int]) -> tuple[int, ...]:
    """Those of `SHORT_LENGTHS` that enough of the workload's rows (a sample of lengths) do not exceed."""
    return tuple(tokens for tokens in SHORT_LENGTHS if share_within(workload, tokens) >= LEAST_SHARE)


def share_within(workload: Sequence[int], tokens: int) -> float:
    """The share of the workload's rows that have at most so many tokens."""
    return sum(length <= tokens for length in workload) / len(workload) if workload else 0.0


def looked_at(lengths: Sequence[int], short: Timed, long: Timed) -> tuple[int, ...]:
    """Of the measured lengths, those that `short` might serve beside `long`: up to the first at which it looked slower,
    that one included, and never the longest, so that some are left."""
    found = []
    for tokens in sorted(lengths)[:-1]:
        found.append(tokens)
        if interpolate(short.milliseconds, tokens) >= interpolate(long.milliseconds, tokens):
            break
    return tuple(found)


def rivals(chosen: Timed, others: Sequence[Timed], tokens: int, *, alone: Collection[Recipe] = ()) -> list[Recipe]:
    """Recipes that look faster than the chosen one at a length, the most promising first.

    `others`: all that the guard lets serve. Those whose rows must run `alone` come last: short rows gain from company.
    """
    bar = (1 - PROMISING) * chosen.milliseconds[tokens]
    faster = {
        other.recipe: time
        for other in others
        if other.recipe != chosen.recipe
        and other.milliseconds
        and (time := interpolate(other.milliseconds, tokens)) < bar
    }
    return sorted(faster, key=lambda recipe: (recipe in alone, faster[recipe]))[:MOST_RIVALS]


def boundary(long: Mapping[int, Sequence[float]], short: Mapping[int, Sequence[float]]) -> int | None:
    """The longest row that is better off with the recipe of the short rows; None: none is, or not by enough.

    Gains must be beyond what the median over the turns is uncertain by; the trial that follows has the last word.
    Milliseconds of lone rows by tokens, one for each of several turns, in the order of the turns.
    """
    found = None
    for tokens in sorted(long.keys() & short.keys()):
        ratios = [theirs / ours for ours, theirs in zip(long[tokens], short[tokens], strict=True)]
        gain = 1 - median(ratios)
        least = LEAST_GAIN if found is None else LEAST_STEP
        if gain <= max(least, relative_spread(ratios) / math.sqrt(len(ratios))):
            break
        found = tokens
    return found


def routed(
    plan: Plan, recipe: Recipe, limits: Limits, *, longest_tokens: int, wide_from: WideFrom = NEVER_WIDE
) -> Plan:
    """The plan with another recipe for its short rows; `limits` and `wide_from` are that recipe's."""
    short = first_plan(recipe, limits)
    reached = (None if tokens is None or tokens > longest_tokens else tokens for tokens in wide_from)
    route = ShortRoute(
        longest_tokens=longest_tokens,
        recipe=recipe,
        batching=short.batching,
        max_batch_rows=short.max_batch_rows,
        max_padding_share=short.max_padding_share,
        **(WideFrom(*reached) if plan.streams > 1 else NEVER_WIDE).fields,
    )
    return Plan.model_validate({**dict(plan), "short": route})


@dataclass(frozen=True)
class RouteGoal:
    """Holds a plan with a route against the same plan without it.

    For pure throughput more requests/s decide. Else the lone latency at the shortest lengths does, and nothing that the
    objective is about may get worse beyond the noise.
    """

    goal: Goal
    longest_tokens: int
    """Of the route: lengths beyond it are not its doing."""

    def compare(self, pairs: Sequence[Pair]) -> Comparison:
        """Like `Goal.compare`."""
        short = self._of_short_rows(pairs)
        first = self.goal.criteria[0]
        if first.name == "requests/s":
            rate = self._by(first, pairs, NOISE_FLOOR)
            worse = next((one for one in self._others(pairs) if one.ranking is Ranking.WORSE), None)
            return worse if rate.ranking is Ranking.BETTER and worse is not None else rate
        if short.ranking is not Ranking.BETTER:
            return short
        return next((one for one in self._others(pairs) if one.ranking is Ranking.WORSE), short)

    def _others(self, pairs: Sequence[Pair]) -> list[Comparison]:
        return [self._by(criterion, pairs, NEAR_LATENCY) for criterion in self.goal.criteria]

    def _by(self, criterion: Criterion, pairs: Sequence[Pair], tolerance: float) -> Comparison:
        ratios = [
            criterion.cost(pair.challenger, self.goal) / criterion.cost(pair.incumbent, self.goal) for pair in pairs
        ]
        return _compared(criterion.name, ratios, max(tolerance, criterion.tolerance))

    def _of_short_rows(self, pairs: Sequence[Pair]) -> Comparison:
        name = f"lone latency up to {self.longest_tokens} tokens"
        return _compared(name, [self._short_ratio(pair.challenger, pair.incumbent) for pair in pairs], NEAR_LATENCY)

    def _short_ratio(self, challenger: Sample, incumbent: Sample) -> float:
        """Median over the short lengths; 1 where none was measured."""
        ours, theirs = challenger.short_milliseconds, incumbent.short_milliseconds
        ratios = [
            ours[tokens] / theirs[tokens] for tokens in ours.keys() & theirs.keys() if tokens <= self.longest_tokens
        ]
        return median(ratios) if ratios else 1.0


def _compared(name: str, ratios: Sequence[float], tolerance: float) -> Comparison:
    gain, noise = 1 - median(ratios), max(NOISE_FLOOR, relative_spread(ratios))
    bar = max(noise, tolerance)
    ranking = Ranking.BETTER if gain > bar else Ranking.WORSE if gain < -bar else Ranking.SAME
    return Comparison(ranking, name, gain, noise, by_first=True, pairs=len(ratios))
