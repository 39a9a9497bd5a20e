"""The plans of a recipe on some cores: where the climb starts, and what lies one step away. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from penstock.recipe import Batching, Plan, Recipe

T = TypeVar("T")

BATCH_ROWS = (1, 2, 4, 8, 16, 32)
BATCH_TOKENS = (128, 256, 512, 1024, 2048)
PADDING_SHARES = (0.05, 0.15, 0.25)
_ORDER = tuple(Batching)


@dataclass(frozen=True)
class Limits:
    """What a plan of one recipe may use."""

    cores: int
    batching: Batching
    """The widest that the guard proved."""
    lengths: tuple[int, ...]
    """Measured lengths, rising: the steps of `wide_alone_from_tokens`."""


class WideFrom(NamedTuple):
    """The lengths from which on lone rows run on all the cores; None: never. `alone` never begins later."""

    among_others: int | None
    """While other clients may come."""
    alone: int | None
    """Of a client that is alone."""

    @classmethod
    def of(cls, plan: Plan) -> WideFrom:
        """What a plan says."""
        return cls(plan.wide_from_tokens, plan.alone_wide_from)

    @property
    def fields(self) -> dict[str, int | None]:
        """As a plan has it: plans that run alike are equal, so that none is measured twice."""
        alone = None if self.alone == self.among_others else self.alone
        return {"wide_from_tokens": self.among_others, "wide_alone_from_tokens": alone}

    def moved(self, alone: int | None) -> WideFrom:
        """With another length for a client that is alone; the other one goes along where it would begin sooner."""
        if self.among_others is None or alone is None:
            return WideFrom(None, alone)
        return WideFrom(max(self.among_others, alone), alone)


NEVER_WIDE = WideFrom(None, None)


def splits(cores: int) -> tuple[tuple[int, int], ...]:
    """(streams, threads per stream) that use all the cores, most streams first.

    A prime number of cores above three also gets the splits that leave one core to the HTTP front end.
    """
    found = [(streams, cores // streams) for streams in range(cores, 0, -1) if cores % streams == 0]
    if cores > 3 and len(found) == 2:
        rest = cores - 1
        found += [(streams, rest // streams) for streams in range(rest, 0, -1) if rest % streams == 0]
    return tuple(sorted(found, key=lambda split: -split[0]))


def first_plan(recipe: Recipe, limits: Limits, *, wide_from: WideFrom = NEVER_WIDE) -> Plan:
    """One thread per core, near-equal lengths together as far as the guard allows, all cores for a lone long row:
    the plan that experience starts from."""
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


def neighbours(plan: Plan, limits: Limits) -> Iterator[Plan]:
    """The plans that differ from `plan` by one step on one axis, those worth trying first in front."""
    changed = {plan}
    for candidate in _steps(plan, limits):
        if candidate not in changed:
            changed.add(candidate)
            yield candidate


def _steps(plan: Plan, limits: Limits) -> Iterator[Plan]:
    if plan.streams > 1:
        # Before the splits: one stream for all cores is no faster for a lone row than several that all work for it.
        # Only for a client that is alone: the climb's latencies are such a client's, and do not see who waits.
        steps: tuple[int | None, ...] = (*limits.lengths, None)
        for alone in _beside(steps, plan.alone_wide_from):
            yield _with(plan, **WideFrom.of(plan).moved(alone).fields)
    # One stream gives all the cores to a lone row of any length: those that come after it do so too.
    shortest = min(limits.lengths, default=None)
    wide_from = WideFrom.of(plan) if plan.streams > 1 else WideFrom(shortest, shortest)
    for streams, threads in _beside(splits(limits.cores), (plan.streams, plan.threads_per_stream)):
        wide = wide_from if streams > 1 else NEVER_WIDE
        yield _with(plan, streams=streams, threads_per_stream=threads, **wide.fields)
    allowed = _ORDER[: _ORDER.index(limits.batching) + 1]
    for batching in _beside(allowed, plan.batching):
        yield _rebatched(plan, batching)
    if plan.batching is Batching.SINGLE:
        return
    for rows in _beside(BATCH_ROWS[1:], plan.max_batch_rows):
        yield _with(plan, max_batch_rows=rows)
    for tokens in _beside(BATCH_TOKENS, plan.max_batch_tokens):
        yield _with(plan, max_batch_tokens=tokens)
    if plan.batching is Batching.PADDED:
        for share in _beside(PADDING_SHARES, plan.max_padding_share):
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


def _beside(steps: Sequence[T], value: T) -> Iterator[T]:
    """The entries before and behind `value`; the first one where `value` is not among them."""
    if value not in steps:
        yield steps[0]
        return
    position = steps.index(value)
    if position + 1 < len(steps):
        yield steps[position + 1]
    if position > 0:
        yield steps[position - 1]
