"""The rows that wait for a core, and which of them to run next. A data structure: no threads, no clock, no IO.

Order. Every row has a rank, in seconds on the clock of arrivals: the first row of a request ranks at its arrival, each
further row of the same request a little later, as long as it would take to serve the rows before it at a share of the
measured rate (`PACE`). The lowest rank runs next. So a client's batch of a thousand rows does not shut single requests
out, and because arrivals only ever rank later, nothing waits for ever.

Company. The row whose turn it is is joined by others that the plan allows: of the same length, or near enough to stay
within the padding limit, nearest first. (Where the engine pads to a grid by itself, rows with the same point on the
grid are of the same length. Rows that run on another graph because they are short are nobody's company but their own.)
A batch takes at most its worker's fair share of the tokens that wait, or of those of the request whose turn it is: the
other workers will be free soon, and a core that idles beside a full one loses more than a larger batch gains. (Without
the second, a request's rows would be halved and halved again by workers that come for them one after the other.) What
is done in a moment is not shared at all. Nor are a few long rows, if nothing else runs or waits and the engine divides
a batch among the cores: of as many as half the workers each would have one core, and others idle beside it.

There is no timer that waits for company: a batch is whatever waits when a worker gets free. An idle server answers at
once, and a loaded one finds company in its queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from penstock.recipe import Batching, Plan
from penstock_runtime.engines.base import EngineFacts
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.rows import Row

PACE = 2.0
"""A large request is ranked as if it were served at 1/PACE of the measured rate: the rest is for others."""

_DUST = 64
"""Cancelled rows stay in the heaps until their turn, or until there are this many more of them than rows that wait."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One row in the queue."""

    row: Row
    rank: float
    deadline: float
    """Dropped instead of run after this, seconds on the clock of arrivals; infinite: never."""
    owner: Any
    """Whose it is; nothing here looks at it."""
    index: int
    """Which row of its owner's."""
    together: int
    """Tokens of all the rows that came with it, its own among them."""
    gone: bool = False
    """Taken or discarded."""


Place = tuple[bool, int]
"""Where a row waits: whether it runs on the graph of the short rows, and the tokens that it takes when alone."""


class Taken(NamedTuple):
    """What a worker takes out of the queue."""

    rows: list[Waiting]
    """One batch; empty when nothing waits."""
    expired: list[Waiting]
    """Rows whose deadline passed before their turn: not to be run."""
    divided: bool = False
    """The batch is meant for all the cores at once."""


@dataclass(frozen=True, slots=True)
class Company:
    """Who may share a run."""

    batching: Batching
    max_rows: int
    max_tokens: int
    """Padded tokens of one batch; a single longer row still runs, alone."""
    max_padding_share: float
    grid: ShapeGrid | None = None
    """Of the engine, if it has one: lengths count as what they are padded to anyway."""
    divided_from_tokens: int | None = None
    """Rows at least this long are worth dividing among the cores together; None: none are, or the engine cannot."""
    short: Company | None = None
    """Of the rows that run on a graph of their own: they never join the others."""
    short_tokens: int = 0
    """The longest of those."""

    @classmethod
    def of(cls, plan: Plan, facts: EngineFacts | None = None) -> Company:
        """As the plan and the engine say."""
        own = _as_planned(plan, facts)
        short_plan = plan.of_short_rows
        if plan.short is None or short_plan is None:
            return own
        short_facts = facts.short if facts is not None else None
        short = _as_planned(short_plan, short_facts)
        return replace(own, short=short, short_tokens=plan.short.longest_tokens)

    def side(self, tokens: int) -> Company:
        """The company of rows of this length: decided by their own length alone."""
        return self.short if self.short is not None and tokens <= self.short_tokens else self

    def place(self, row: Row) -> Place:
        """Where the row waits. Two places are never the same across the sides."""
        side = self.side(row.length)
        return side is not self, side.length(row)

    def length(self, row: Row) -> int:
        """Tokens that a row of this side takes when it runs alone."""
        return row.length if self.grid is None else self.grid.length(row.length)

    def divides(self, row: Row, rows: int, workers: int) -> bool:
        """Whether so many rows, about as long as this one, are for all the cores together while nothing else runs."""
        side = self.side(row.length)
        least = side.divided_from_tokens
        fitting = rows <= side.max_rows and rows * row.length <= side.max_tokens
        return least is not None and row.length >= least and 1 < rows <= workers // 2 and fitting

    def rows(self, count: int) -> int:
        """How many of `count` rows that could run together do."""
        return count if self.grid is None else self.grid.rows(count)


def _as_planned(plan: Plan, facts: EngineFacts | None) -> Company:
    return Company(
        plan.batching,
        plan.max_batch_rows,
        plan.max_batch_tokens,
        plan.max_padding_share,
        facts.grid if facts is not None else None,
        plan.wide_from_tokens if facts is not None and facts.divides_batches else None,
    )


_Entry = tuple[float, int, Waiting]


@dataclass(slots=True)
class WaitingRows:
    """The queue."""

    company: Company
    rows: int = 0
    """How many wait."""
    tokens: int = 0
    """Of all that wait."""
    _serial: int = 0
    _gone: int = 0
    """Entries in `_all` that are."""
    _all: list[_Entry] = field(default_factory=list)
    _by_place: dict[Place, list[_Entry]] = field(default_factory=dict)

    def push(
        self, rows: Sequence[Row], owner: Any, *, arrived: float, deadline: float, tokens_per_second: float
    ) -> list[Waiting]:
        """Let a request's rows wait; the entries come back in the order of `rows`."""
        entries = []
        together = sum(row.length for row in rows)
        before = 0
        for index, row in enumerate(rows):
            rank = arrived + PACE * before / tokens_per_second
            entry = Waiting(row, rank, deadline, owner, index, together)
            self._serial += 1
            key = (rank, self._serial, entry)
            heappush(self._all, key)
            heappush(self._by_place.setdefault(self.company.place(row), []), key)
            before += row.length
            entries.append(entry)
        self.rows += len(entries)
        self.tokens += together
        return entries

    def discard(self, entry: Waiting) -> bool:
        """Its client is gone: it will not be taken. False when it has been taken (or discarded) already."""
        if entry.gone:
            return False
        self._leave(entry)
        self._left_standing()
        return True

    def expire(self, now: float) -> list[Waiting]:
        """Discard all rows whose deadline has passed, and return them."""
        late = [entry for _, _, entry in self._all if not entry.gone and entry.deadline < now]
        for entry in late:
            self.discard(entry)
        return late

    def next_deadline(self) -> float:
        """The earliest deadline of all that wait; infinite when there is none."""
        return min((entry.deadline for _, _, entry in self._all if not entry.gone), default=math.inf)

    def take(self, *, workers: int, now: float, least: int = 0, idle: bool = False) -> Taken:
        """The next batch for one of `workers` workers. `least`: tokens that are not worth sharing. `idle`: none of the
        others runs anything."""
        expired: list[Waiting] = []
        first = self._first(expired, now)
        if first is None:
            return Taken([], expired)
        share = max(least, -(-max(self.tokens + first.row.length, first.together) // workers))
        company = self.company.side(first.row.length)
        if company.batching is Batching.SINGLE or company.max_rows == 1:
            return Taken([first], expired)
        divided = idle and self.company.divides(first.row, 1 + self.rows, workers)
        joining = self._joining(first, self.tokens + first.row.length if divided else share, now)
        if divided and company.rows(1 + len(joining)) <= self.rows:  # the others would run meanwhile
            divided = False
            self._put_back(joining)
            joining = self._joining(first, share, now)
        keep = company.rows(1 + len(joining)) - 1
        self._put_back(joining[keep:])
        batch = [first]
        for _, _, entry in joining[:keep]:
            self._leave(entry)
            batch.append(entry)
            self._left_standing()
        return Taken(batch, expired, divided)

    def _put_back(self, keys: list[_Entry]) -> None:
        for key in keys:
            heappush(self._by_place.setdefault(self.company.place(key[2].row), []), key)

    def _first(self, expired: list[Waiting], now: float) -> Waiting | None:
        while self._all:
            entry = heappop(self._all)[2]
            if entry.gone:
                self._gone -= 1
                continue
            self._leave(entry)
            # The lowest rank of all is the lowest of its length: only gone entries can stand before it there.
            self._clear_top(self.company.place(entry.row))
            if entry.deadline >= now:
                return entry
            expired.append(entry)
        self._by_place.clear()
        return None

    def _joining(self, first: Waiting, share: int, now: float) -> list[_Entry]:
        """Rows near in length to the first one, oldest first within a length; out of the heaps by length."""
        company = self.company.side(first.row.length)
        short = company is not self.company
        longest = real = company.length(first.row)
        tokens = first.row.length
        found: list[_Entry] = []
        for length in _nearest(longest, company):
            place = (short, length)
            while (key := self._clear_top(place)) is not None:
                count = len(found) + 2
                padded = max(longest, length) * count
                # One whose deadline has passed is told so at its own turn.
                if (
                    count > company.max_rows
                    or padded > company.max_tokens
                    or tokens + key[2].row.length > share
                    or padded - real - length > company.max_padding_share * padded
                    or key[2].deadline < now
                ):
                    break
                found.append(heappop(self._by_place[place]))
                longest, real = max(longest, length), real + length
                tokens += key[2].row.length
        return found

    def _clear_top(self, place: Place) -> _Entry | None:
        """The lowest rank that waits there; gone entries above it are thrown away."""
        heap = self._by_place.get(place)
        if heap is None:
            return None
        while heap:
            if not heap[0][2].gone:
                return heap[0]
            heappop(heap)
        del self._by_place[place]
        return None

    def _left_standing(self) -> None:
        """An entry is gone and still stands in the heap of all."""
        self._gone += 1
        if self._gone > self.rows + _DUST:
            self._sweep()

    def _leave(self, entry: Waiting) -> None:
        entry.gone = True
        self.rows -= 1
        self.tokens -= entry.row.length

    def _sweep(self) -> None:
        self._all = [key for key in self._all if not key[2].gone]
        heapify(self._all)
        self._by_place = {}
        for key in self._all:
            self._by_place.setdefault(self.company.place(key[2].row), []).append(key)
        for heap in self._by_place.values():
            heapify(heap)
        self._gone = 0


def _nearest(length: int, company: Company) -> Iterator[int]:
    """Lengths that may join a row of `length`, the nearest first: none so far off that the two alone pad too much."""
    yield length
    if company.batching is not Batching.PADDED:
        return
    # Of two rows, the shorter one's padding is a share of twice the longer one.
    share = min(2 * company.max_padding_share, 0.999)
    furthest = min(int(length * share / (1 - share)), company.max_tokens)
    for distance in range(1, furthest + 1):
        if distance <= length * share and distance < length:
            yield length - distance
        yield length + distance
