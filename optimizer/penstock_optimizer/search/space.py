"""The space of the search: which recipes go on after screening, and which plans of a recipe are tried. Pure.

Of the recipes that the guard accepts, those near the best expected latency go on to the plan search. The plans of a
recipe start from the one that experience suggests (`first_plan`); `neighbours` differ from a plan by one step on one
axis.

A plan may also route short rows to a second recipe: at a few tokens the work around the matrix products decides, at
many the products themselves, so that the recipe that is best over a workload need not be the best for its shortest or
its longest rows. Short rows hardly weigh in the single-request latency over the workload (p50 and p95 are of
longer rows), so a plan with a route is compared with the plan without it by a separate goal (`goal.RouteGoal`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

from penstock.recipe import LARGEST_BATCH_TOKENS, LARGEST_PADDING_SHARE, Batching, Plan, Precision, Recipe, ShortRoute
from penstock_optimizer.load.generator import relative_spread
from penstock_optimizer.search.recipes import is_tuned

T = TypeVar("T")

BATCH_ROWS = (1, 2, 4, 8, 16, 32)
BATCH_TOKENS = (128, 256, 512, 1024, LARGEST_BATCH_TOKENS)
PADDING_SHARES = (0.05, 0.15, LARGEST_PADDING_SHARE)
CLEARLY_FASTER = 0.85
"""All cores must be faster than one by this factor before a lone row runs on all of them: it occupies all of them, and
under load the next rows wait. MiniLM at 32 tokens gained nothing and was overloaded at half of its capacity."""
ANY_FASTER = 0.97
"""The same for a row of a client that is alone: no other row waits, so any gain beyond the noise counts."""
_ORDER = tuple(Batching)


@dataclass(frozen=True)
class PlanLimits:
    """Limits of the plans of one recipe."""

    cores: int
    batching: Batching
    """The widest that the guard has proved."""
    lengths: tuple[int, ...]
    """Measured lengths, rising: the steps of `wide_alone_from_tokens`."""


class WideFrom(NamedTuple):
    """The lengths from which on lone rows run on all cores; None: at no length. `alone` is never the longer one."""

    among_others: int | None
    """While other clients may send requests."""
    alone: int | None
    """For a client that is alone."""

    @classmethod
    def of(cls, plan: Plan) -> WideFrom:
        """The lengths of a plan."""
        return cls(plan.wide_from_tokens, plan.alone_wide_from)

    @property
    def fields(self) -> dict[str, int | None]:
        """As fields of a plan: plans that run alike are equal, so that none is measured twice."""
        alone = None if self.alone == self.among_others else self.alone
        return {"wide_from_tokens": self.among_others, "wide_alone_from_tokens": alone}

    def moved(self, alone: int | None) -> WideFrom:
        """With another length for a client that is alone; the length with other clients is never the shorter one."""
        if self.among_others is None or alone is None:
            return WideFrom(None, alone)
        return WideFrom(max(self.among_others, alone), alone)


NEVER_WIDE = WideFrom(None, None)


def wide_thresholds(lengths: Sequence[int], narrow: Callable[[int], float], wide: Callable[[int], float]) -> WideFrom:
    """The shortest lengths from which on `wide` (milliseconds on all cores) is clearly faster than `narrow` (on one),
    and faster at all; None when it never is. One length without a gain among longer ones with a gain counts as noise,
    unless it is the longest. The length for a client that is alone is never the longer one."""

    def faster(bar: float) -> int | None:
        return _gains_from(lengths, [wide(tokens) < bar * narrow(tokens) for tokens in lengths])

    return WideFrom(among_others=faster(CLEARLY_FASTER), alone=faster(ANY_FASTER))


def _gains_from(lengths: Sequence[int], gains: Sequence[bool]) -> int | None:
    if not gains or not gains[-1]:
        return None
    # Split where most of the shorter ones do not gain and most of the longer ones do.
    best = min(range(len(gains)), key=lambda cut: sum(gains[:cut]) + gains[cut:].count(False))
    return lengths[best]


def splits(cores: int) -> tuple[tuple[int, int], ...]:
    """(streams, threads per stream) that use all cores, most streams first.

    A prime number of cores above three also gets the splits that leave one core to the HTTP front end.
    """
    found = [(streams, cores // streams) for streams in range(cores, 0, -1) if cores % streams == 0]
    if cores > 3 and len(found) == 2:
        rest = cores - 1
        found += [(streams, rest // streams) for streams in range(rest, 0, -1) if rest % streams == 0]
    return tuple(sorted(found, key=lambda split: -split[0]))


def first_plan(recipe: Recipe, limits: PlanLimits, *, wide_from: WideFrom = NEVER_WIDE) -> Plan:
    """The plan to start from: one thread per core, batches of near-equal lengths as far as the guard allows, all cores
    for a long lone row."""
    shape = {
        Batching.SINGLE: {"max_batch_rows": 1, "max_padding_share": 0.0},
        Batching.EQUAL_LENGTH: {"max_batch_rows": 8, "max_padding_share": 0.0},
        Batching.PADDED: {"max_batch_rows": 8, "max_padding_share": 0.15},
    }[limits.batching]
    return Plan.model_validate(
        {
            "recipe": recipe,
            "streams": limits.cores,
            "threads_per_stream": 1,
            "batching": limits.batching,
            "max_batch_tokens": 512,
            **(wide_from if limits.cores > 1 else NEVER_WIDE).fields,
            **shape,
        }
    )


def neighbours(plan: Plan, limits: PlanLimits) -> Iterator[Plan]:
    """The plans that differ from `plan` by one step on one axis, the most promising first."""
    changed = {plan}
    for candidate in _steps(plan, limits):
        if candidate not in changed:
            changed.add(candidate)
            yield candidate


def _steps(plan: Plan, limits: PlanLimits) -> Iterator[Plan]:
    if plan.streams > 1:
        # Before the splits: one stream on all cores is no faster for a lone row than several that share the row. Only
        # for a client that is alone: the measured latencies are of such a client, and do not show that other clients
        # wait.
        steps: tuple[int | None, ...] = (*limits.lengths, None)
        for alone in _adjacent(steps, plan.alone_wide_from):
            yield _with(plan, **WideFrom.of(plan).moved(alone).fields)
    # One stream gives all cores to a lone row of any length; a split that follows keeps that.
    shortest = min(limits.lengths, default=None)
    wide_from = WideFrom.of(plan) if plan.streams > 1 else WideFrom(shortest, shortest)
    for streams, threads in _adjacent(splits(limits.cores), (plan.streams, plan.threads_per_stream)):
        wide = wide_from if streams > 1 else NEVER_WIDE
        yield _with(plan, streams=streams, threads_per_stream=threads, **wide.fields)
    allowed = _ORDER[: _ORDER.index(limits.batching) + 1]
    for batching in _adjacent(allowed, plan.batching):
        yield _rebatched(plan, batching)
    if plan.batching is Batching.SINGLE:
        return
    for rows in _adjacent(BATCH_ROWS[1:], plan.max_batch_rows):
        yield _with(plan, max_batch_rows=rows)
    for tokens in _adjacent(BATCH_TOKENS, plan.max_batch_tokens):
        yield _with(plan, max_batch_tokens=tokens)
    if plan.batching is Batching.PADDED:
        for share in _adjacent(PADDING_SHARES, plan.max_padding_share):
            yield _with(plan, max_padding_share=share)


def _rebatched(plan: Plan, batching: Batching) -> Plan:
    match batching:
        case Batching.SINGLE:
            return _with(plan, batching=batching, max_batch_rows=1, max_padding_share=0.0)
        case Batching.EQUAL_LENGTH:
            return _with(plan, batching=batching, max_batch_rows=max(plan.max_batch_rows, 8), max_padding_share=0.0)
        case Batching.PADDED:
            return _with(plan, batching=batching, max_batch_rows=max(plan.max_batch_rows, 8), max_padding_share=0.15)


def _with(plan: Plan, **changes: object) -> Plan:
    return Plan.model_validate({**dict(plan), **changes})


def _adjacent(steps: Sequence[T], value: T) -> Iterator[T]:
    """The entries before and after `value`; the first entry when `value` is not among them."""
    if value not in steps:
        yield steps[0]
        return
    position = steps.index(value)
    if position + 1 < len(steps):
        yield steps[position + 1]
    if position > 0:
        yield steps[position - 1]


DOMINATED = 1.3
"""A candidate slower than the best accepted one by this factor at every sampled length is dominated: it is not measured
at length."""
FINALIST_WITHIN = 1.25
"""Recipes with an expected latency within this factor of the best go on to the plan search: threads, streams and
batching may still change the order."""
MOST_FINALISTS = 3


@dataclass(frozen=True)
class MeasuredRecipe:
    """A candidate that the guard accepted, with medians of batch-1 latency in milliseconds by tokens."""

    recipe: Recipe
    milliseconds: Mapping[int, float]


def is_dominated(sample: Mapping[int, float], best: Mapping[int, float]) -> bool:
    """True when a quick sample (fastest runs, milliseconds by tokens) is far behind the best accepted candidate's at
    every length of both. Without a common length: False."""
    common = sample.keys() & best.keys()
    return bool(common) and all(sample[tokens] > DOMINATED * best[tokens] for tokens in common)


def expected_milliseconds(milliseconds: Mapping[int, float], lengths: Sequence[int]) -> float:
    """The geometric mean of the latency over a sample of lengths, interpolated between the measured ones.

    Geometric, so that a gain of a tenth counts the same for short and for long requests.
    """
    if not lengths:
        raise ValueError("no lengths to expect a latency for")
    return math.exp(math.fsum(math.log(interpolate(milliseconds, length)) for length in lengths) / len(lengths))


def interpolate(milliseconds: Mapping[int, float], tokens: int) -> float:
    """Latency at a length between measured ones: linear; outside of them by the slope of the nearest two, but never
    below the nearest one in proportion to the length."""
    measured = sorted(milliseconds)
    if tokens in milliseconds or len(measured) == 1:
        nearest = tokens if tokens in milliseconds else measured[0]
        return milliseconds[nearest]
    above = next((position for position, length in enumerate(measured) if length > tokens), len(measured) - 1)
    left, right = measured[max(above - 1, 0)], measured[max(above, 1)]
    slope = (milliseconds[right] - milliseconds[left]) / (right - left)
    nearest = min((left, right), key=lambda length: abs(length - tokens))
    value = milliseconds[left] + slope * (tokens - left)
    return max(value, milliseconds[nearest] * min(1.0, tokens / nearest))


def finalists(accepted: Sequence[MeasuredRecipe], reference: MeasuredRecipe, lengths: Sequence[int]) -> list[Recipe]:
    """The recipes for the plan search, the one that wins a draw first.

    The reference comes first: a recipe that is not faster than fp32 beyond the noise is not worth any loss of accuracy.
    Then the other fp32 engines, then the rest by expected latency, int8 that was not tuned for accuracy last.
    """
    expected = {
        timed.recipe: expected_milliseconds(timed.milliseconds, lengths) for timed in accepted if timed.milliseconds
    }
    expected.pop(reference.recipe, None)
    if not expected:
        return [reference.recipe]
    best = min([*expected.values(), expected_milliseconds(reference.milliseconds, lengths)])
    near = sorted(
        (recipe for recipe, value in expected.items() if value <= FINALIST_WITHIN * best), key=expected.__getitem__
    )[:MOST_FINALISTS]
    near.sort(key=lambda recipe: (recipe.precision is not Precision.FP32, not is_tuned(recipe)))
    return [reference.recipe, *near]


SHORT_LENGTHS = (8, 16)
"""Tokens: the lengths at which a route must gain."""
LEAST_GAIN = 0.10
"""The least gain of a lone row's time at the shortest length: less is not worth a second graph in memory."""
LEAST_STEP = 0.03
"""The least gain at each longer length to be routed as well."""
PROMISING = 0.05
"""A recipe this much faster at the shortest or the longest length in the common measurement is measured again for a
route."""
LEAST_SHARE = 0.02
"""The least share of the workload's rows on each side of the route."""
MOST_RIVALS = 2


def short_lengths(workload: Sequence[int]) -> tuple[int, ...]:
    """The `SHORT_LENGTHS` that enough of the workload's rows (a sample of lengths) do not exceed."""
    return tuple(tokens for tokens in SHORT_LENGTHS if share_within(workload, tokens) >= LEAST_SHARE)


def share_within(workload: Sequence[int], tokens: int) -> float:
    """The share of the workload's rows with at most this many tokens."""
    return sum(length <= tokens for length in workload) / len(workload) if workload else 0.0


def lengths_to_compare(lengths: Sequence[int], short: MeasuredRecipe, long: MeasuredRecipe) -> tuple[int, ...]:
    """The measured lengths that `short` might serve instead of `long`: up to and including the first one at which it
    was slower, without the longest, so that some rows are left for `long`."""
    found = []
    for tokens in sorted(lengths)[:-1]:
        found.append(tokens)
        if interpolate(short.milliseconds, tokens) >= interpolate(long.milliseconds, tokens):
            break
    return tuple(found)


def rivals(
    chosen: MeasuredRecipe, others: Sequence[MeasuredRecipe], tokens: int, *, alone: Collection[Recipe] = ()
) -> list[Recipe]:
    """Recipes that look faster than the chosen one at a length, the most promising first.

    `others`: all that the guard accepts. Recipes with rows that must run `alone` come last: short rows gain from
    batching."""
    bar = (1 - PROMISING) * chosen.milliseconds[tokens]
    faster = {
        other.recipe: time
        for other in others
        if other.recipe != chosen.recipe
        and other.milliseconds
        and (time := interpolate(other.milliseconds, tokens)) < bar
    }
    return sorted(faster, key=lambda recipe: (recipe in alone, faster[recipe]))[:MOST_RIVALS]


def longest_short_row(long: Mapping[int, Sequence[float]], short: Mapping[int, Sequence[float]]) -> int | None:
    """The longest row that the recipe of the short rows serves faster by enough; None: none.

    Gains must exceed the uncertainty of the median over the repetitions; the trial of the whole plan decides in the
    end. Milliseconds of lone rows by tokens, one value for each repetition, in order."""
    found = None
    for tokens in sorted(long.keys() & short.keys()):
        ratios = [theirs / ours for ours, theirs in zip(long[tokens], short[tokens], strict=True)]
        gain = 1 - median(ratios)
        least = LEAST_GAIN if found is None else LEAST_STEP
        if gain <= max(least, relative_spread(ratios) / math.sqrt(len(ratios))):
            break
        found = tokens
    return found


def with_route(
    plan: Plan, recipe: Recipe, limits: PlanLimits, *, longest_tokens: int, wide_from: WideFrom = NEVER_WIDE
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
