"""The queue of rows that wait for a stream, and the choice of the rows that run next. Pure: no threads, no clock.

Order. Clients have equal shares of the computed tokens (`FairShares`): the client that has had the least runs next.
Among its rows every row has a rank, in seconds on the clock of arrivals. The first row of a request has its arrival
time as its rank; each further row of the request has a later one, by the time it would take to process the rows before
it at a share of the measured throughput (`RANK_SLOWDOWN`). The lowest rank runs next. So a request of a thousand rows
does not block single requests, and because later arrivals always have later ranks, every row is run eventually.

Bulk rows have a lane of their own. They run while no other row waits; while some wait they get a twentieth of the
computed tokens (`BulkFloor`), so that they end. While other rows are expected, bulk rows run in short batches, too.

Several clients. While there are requests of several clients, all rows run in short batches: a batch that runs cannot
be interrupted, and the rows of other clients wait for its end.

Batches. The row that runs next is joined by other rows that the plan allows: of the same length, or of similar
length within the padding limit, nearest first. (Where the engine pads lengths to a grid, rows with the same padded
length count as equally long. Rows that run on a separate graph because they are short are batched only with each
other.) A batch takes at most its stream's fair share of all waiting tokens, or of the tokens of the first row's
request: the other streams will be free soon, and an idle core costs more than a larger batch gains. (Without the second
share, streams that take batches one after the other would split a request's rows into ever smaller batches.) Very small
amounts of work are not shared at all. Nor are a few long rows, if nothing else runs or waits and the engine divides a
batch among the cores: with at most half as many rows as streams, the other cores would be idle.

No timer delays a batch: it consists of the rows that wait when a stream becomes free. An idle server answers at once,
and a loaded one finds rows to batch in its queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from penstock.recipe import Batching, Plan
from penstock_runtime.admission import BulkFloor, FairShares
from penstock_runtime.engines.base import EngineFacts
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.errors import DeadlineExceeded
from penstock_runtime.rows import Row

RANK_SLOWDOWN = 2.0
"""A large request is ranked as if it had 1/RANK_SLOWDOWN of the measured throughput: the rest is for other requests."""

DEFAULT_TOKENS_PER_SECOND = 2000.0
"""Tokens a second and stream, before anything is measured: a small encoder on one core without VNNI."""
_MEMORY_SECONDS = 5.0
"""Half-life of a measurement, in seconds of running."""

SHARED_SECONDS = 1.0
"""How long requests of several clients are expected after two such have come one after the other."""

_MAX_REMOVED = 64
"""Removed rows stay in the heaps until they are at the top, or until there are this many more than waiting rows."""


@dataclass(slots=True, eq=False)
class QueuedRow:
    """One row in the queue."""

    row: Row
    rank: float
    deadline: float
    """Dropped instead of run after this, seconds on the clock of arrivals; infinite: never."""
    owner: Any
    """The caller's own object for the request; not used here."""
    index: int
    """Position in the request."""
    request_tokens: int
    """Tokens of all rows of the request."""
    client: str
    is_bulk: bool = False
    removed: bool = False
    """Taken or discarded."""


Bucket = tuple[bool, bool, int]
"""Rows of one bucket are of one lane, run on the same graph and have the same padded length: (bulk, on the graph of
short rows, tokens)."""


class TakenBatch(NamedTuple):
    """The result of `RowQueue.take`."""

    rows: list[QueuedRow]
    """One batch; empty when nothing waits."""
    expired: list[QueuedRow]
    """Rows that were past their deadline before they were taken: not to be run."""
    divided: bool = False
    """The batch is to be run by all cores together."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Which rows may share a batch."""

    batching: Batching
    max_rows: int
    max_tokens: int
    """Padded tokens of one batch. A single longer row runs alone."""
    max_padding_share: float
    grid: ShapeGrid | None = None
    """The engine's padding grid, if it has one."""
    divided_from_tokens: int | None = None
    """Batches of rows at least this long are divided among all cores; None: never."""
    short: BatchPolicy | None = None
    """Policy of the short rows that run on a separate graph; they are never batched with longer rows."""
    short_tokens: int = 0
    """Length of the longest of them."""

    @classmethod
    def of(cls, plan: Plan, facts: EngineFacts | None = None) -> BatchPolicy:
        """The policy of a plan and an engine."""
        own = _as_planned(plan, facts)
        short_plan = plan.of_short_rows
        if plan.short is None or short_plan is None:
            return own
        short_facts = facts.short if facts is not None else None
        short = _as_planned(short_plan, short_facts)
        return replace(own, short=short, short_tokens=plan.short.longest_tokens)

    def for_tokens(self, tokens: int) -> BatchPolicy:
        """The policy of rows of this length: `short` or this one."""
        return self.short if self.short is not None and tokens <= self.short_tokens else self

    def bucket(self, entry: QueuedRow) -> Bucket:
        """The row's bucket."""
        policy = self.for_tokens(entry.row.length)
        return entry.is_bulk, policy is not self, policy.length(entry.row)

    def length(self, row: Row) -> int:
        """Tokens of the row after padding by the engine, when it runs alone."""
        return row.length if self.grid is None else self.grid.length(row.length)

    def divides(self, row: Row, rows: int, streams: int) -> bool:
        """True if a batch of `rows` rows like this one is to be divided among all cores while nothing else runs."""
        policy = self.for_tokens(row.length)
        least = policy.divided_from_tokens
        fitting = rows <= policy.max_rows and rows * row.length <= policy.max_tokens
        return least is not None and row.length >= least and 1 < rows <= streams // 2 and fitting

    def rows(self, count: int) -> int:
        """How many of `count` rows that may be batched are, given the engine's grid."""
        return count if self.grid is None else self.grid.rows(count)


def _as_planned(plan: Plan, facts: EngineFacts | None) -> BatchPolicy:
    return BatchPolicy(
        plan.batching,
        plan.max_batch_rows,
        plan.max_batch_tokens,
        plan.max_padding_share,
        facts.grid if facts is not None else None,
        plan.wide_from_tokens if facts is not None and facts.divides_batches else None,
    )


_HeapEntry = tuple[float, int, QueuedRow]


@dataclass(slots=True)
class _Clients:
    """The rows of a lane by client."""

    by_client: dict[str, list[_HeapEntry]] = field(default_factory=dict)
    shares: FairShares = field(default_factory=FairShares)
    tokens: int = 0
    rows: int = 0


@dataclass(slots=True)
class RowQueue:
    """The queue."""

    policy: BatchPolicy
    rows: int = 0
    """Number of waiting rows."""
    tokens: int = 0
    """Tokens of the waiting rows."""
    _serial: int = 0
    _removed_count: int = 0
    """How often removed entries are still in the heaps."""
    _lanes: tuple[_Clients, _Clients] = field(default_factory=lambda: (_Clients(), _Clients()))
    """Of interactive and of bulk rows."""
    _by_bucket: dict[Bucket, list[_HeapEntry]] = field(default_factory=dict)
    _floor: BulkFloor = field(default_factory=BulkFloor)
    _interactive_until: float = -math.inf
    """Until then interactive rows are expected, on the clock of arrivals."""
    _last_client: str | None = None
    _shared_until: float = -math.inf
    """Until then requests of several clients are expected, on the clock of arrivals."""

    def push(
        self,
        rows: Sequence[Row],
        owner: Any,
        *,
        arrived: float,
        deadline: float,
        tokens_per_second: float,
        client: str = "",
        is_bulk: bool = False,
    ) -> list[QueuedRow]:
        """Add a request's rows; the entries are in the order of `rows`."""
        lane = self._lanes[is_bulk]
        if not is_bulk:
            self._interactive_until = arrived + SHARED_SECONDS
        if self._last_client not in (None, client):
            self._shared_until = arrived + SHARED_SECONDS
        self._last_client = client
        entries = []
        request_tokens = sum(row.length for row in rows)
        before = 0
        for index, row in enumerate(rows):
            rank = arrived + RANK_SLOWDOWN * before / tokens_per_second
            entry = QueuedRow(row, rank, deadline, owner, index, request_tokens, client, is_bulk)
            self._serial += 1
            key = (rank, self._serial, entry)
            heappush(lane.by_client.setdefault(client, []), key)
            heappush(self._by_bucket.setdefault(self.policy.bucket(entry), []), key)
            before += row.length
            entries.append(entry)
        self.rows += len(entries)
        self.tokens += request_tokens
        lane.rows += len(entries)
        lane.tokens += request_tokens
        return entries

    @property
    def bulk(self) -> tuple[int, int]:
        """Number and tokens of the waiting rows that are bulk."""
        return self._lanes[1].rows, self._lanes[1].tokens

    def discard(self, entry: QueuedRow) -> bool:
        """Remove a row before it is taken. False if it was taken or discarded already."""
        if entry.removed:
            return False
        self._remove(entry)
        self._count_removed(2)
        return True

    def expire(self, now: float) -> list[QueuedRow]:
        """Discard all rows that are past their deadline, and return them."""
        late = [entry for entry in self._waiting() if entry.deadline < now]
        for entry in late:
            self.discard(entry)
        return late

    def next_deadline(self) -> float:
        """The earliest deadline of the waiting rows; infinite if there is none."""
        return min((entry.deadline for entry in self._waiting()), default=math.inf)

    def _waiting(self) -> Iterator[QueuedRow]:
        heaps = (heap for lane in self._lanes for heap in lane.by_client.values())
        return (entry for heap in heaps for _, _, entry in heap if not entry.removed)

    def is_shared(self, now: float) -> bool:
        """Whether requests of several clients are expected, or interactive ones while bulk rows wait."""
        return now < self._shared_until or (self._lanes[1].rows > 0 and now < self._interactive_until)

    def next_row(self) -> QueuedRow | None:
        """The row that runs next."""
        heap = self._next_heap()
        return None if heap is None else heap[0][2]

    def take(
        self,
        *,
        streams: int,
        now: float,
        least: int = 0,
        brief: int | None = None,
        always_brief: bool = False,
        idle: bool = False,
    ) -> TakenBatch:
        """The next batch for one of `streams` streams.

        `least`: a number of tokens that is not shared. `brief`: the most tokens of a batch while requests of several
        clients are expected, or of every one (`always_brief`), unless its only row has more; None: no limit. `idle`: no
        other stream is busy.
        """
        if not always_brief and not self.is_shared(now):
            brief = None
        expired: list[QueuedRow] = []
        first = self._first(expired, now)
        if first is None:
            return TakenBatch([], expired)
        share = max(least, -(-max(self.tokens + first.row.length, first.request_tokens) // streams))
        if brief is not None:
            share = min(share, brief)
        policy = self.policy.for_tokens(first.row.length)
        if policy.batching is Batching.SINGLE or policy.max_rows == 1:
            return TakenBatch([first], expired)
        divided = idle and self.policy.divides(first.row, 1 + self.rows, streams)
        joining = self._joining(first, self.tokens + first.row.length if divided else share, now)
        if divided and policy.rows(1 + len(joining)) <= self.rows:  # other streams would run the rest meanwhile
            divided = False
            self._return_to_buckets(joining)
            joining = self._joining(first, share, now)
        keep = policy.rows(1 + len(joining)) - 1
        self._return_to_buckets(joining[keep:])
        batch = [first]
        for _, _, entry in joining[:keep]:
            self._remove(entry)
            self._charge(entry)
            batch.append(entry)
            self._count_removed(1)
        return TakenBatch(batch, expired, divided)

    def _return_to_buckets(self, keys: list[_HeapEntry]) -> None:
        for key in keys:
            heappush(self._by_bucket.setdefault(self.policy.bucket(key[2]), []), key)

    def _charge(self, entry: QueuedRow) -> None:
        self._lanes[entry.is_bulk].shares.charge(entry.client, entry.row.length)
        if entry.is_bulk:
            self._floor.took(entry.row.length)
        else:
            self._floor.served(entry.row.length, bulk_waits=self._lanes[1].rows > 0)

    def _first(self, expired: list[QueuedRow], now: float) -> QueuedRow | None:
        while (heap := self._next_heap()) is not None:
            entry = heappop(heap)[2]
            self._remove(entry)
            self._count_removed(1)
            self._first_waiting(self.policy.bucket(entry))
            if entry.deadline >= now:
                self._charge(entry)
                return entry
            expired.append(entry)
        return None

    def _next_heap(self) -> list[_HeapEntry] | None:
        """The heap that begins with the row that runs next; None if nothing waits."""
        interactive, bulk = self._lanes
        found = self._next_of(interactive)
        if not bulk.rows:
            return found
        other = self._next_of(bulk)
        return other if found is None or (other and self._floor.is_due(other[0][2].row.length)) else found

    def _next_of(self, lane: _Clients) -> list[_HeapEntry] | None:
        costs: dict[str, float] = {}
        for client in tuple(lane.by_client):
            heap = lane.by_client[client]
            while heap and heap[0][2].removed:
                heappop(heap)
                self._removed_count -= 1
            if heap:
                costs[client] = heap[0][2].row.length
            else:
                del lane.by_client[client]
        return lane.by_client[lane.shares.next(costs)] if costs else None

    def _joining(self, first: QueuedRow, share: int, now: float) -> list[_HeapEntry]:
        """Take rows of similar length as the first one out of the buckets, oldest first within a length."""
        policy = self.policy.for_tokens(first.row.length)
        short = policy is not self.policy
        longest = real = policy.length(first.row)
        tokens = first.row.length
        found: list[_HeapEntry] = []
        for length in _nearest(longest, policy):
            bucket = (first.is_bulk, short, length)
            while (key := self._first_waiting(bucket)) is not None:
                count = len(found) + 2
                padded = max(longest, length) * count
                entry = key[2]
                # An expired row is removed when it becomes the first one.
                if (
                    count > policy.max_rows
                    or padded > policy.max_tokens
                    or tokens + entry.row.length > share
                    or padded - real - length > policy.max_padding_share * padded
                    or entry.deadline < now
                ):
                    break
                found.append(heappop(self._by_bucket[bucket]))
                longest, real = max(longest, length), real + length
                tokens += entry.row.length
        return found

    def _first_waiting(self, bucket: Bucket) -> _HeapEntry | None:
        """The lowest rank of the bucket, after dropping removed entries."""
        heap = self._by_bucket.get(bucket)
        if heap is None:
            return None
        while heap:
            if not heap[0][2].removed:
                return heap[0]
            heappop(heap)
            self._removed_count -= 1
        del self._by_bucket[bucket]
        return None

    def _count_removed(self, heaps: int) -> None:
        """Count an entry that was removed but is still in this number of heaps."""
        self._removed_count += heaps
        if self._removed_count > self.rows + _MAX_REMOVED:
            self._sweep()

    def _remove(self, entry: QueuedRow) -> None:
        entry.removed = True
        lane = self._lanes[entry.is_bulk]
        for counted in (self, lane):
            counted.rows -= 1
            counted.tokens -= entry.row.length

    def _sweep(self) -> None:
        heaps = (heap for lane in self._lanes for heap in lane.by_client.values())
        keys = [key for heap in heaps for key in heap if not key[2].removed]
        self._by_bucket = {}
        for lane in self._lanes:
            lane.by_client = {}
        for key in keys:
            self._lanes[key[2].is_bulk].by_client.setdefault(key[2].client, []).append(key)
            self._by_bucket.setdefault(self.policy.bucket(key[2]), []).append(key)
        for heap in (*(heap for lane in self._lanes for heap in lane.by_client.values()), *self._by_bucket.values()):
            heapify(heap)
        self._removed_count = 0


def _nearest(length: int, policy: BatchPolicy) -> Iterator[int]:
    """Lengths that may join a row of `length`, the nearest first: two such rows are within the padding limit."""
    yield length
    if policy.batching is not Batching.PADDED:
        return
    # Of two rows, the shorter one's padding is a share of twice the longer one.
    share = min(2 * policy.max_padding_share, 0.999)
    furthest = min(int(length * share / (1 - share)), policy.max_tokens)
    for distance in range(1, furthest + 1):
        if distance <= length * share and distance < length:
            yield length - distance
        yield length + distance


@dataclass(slots=True)
class TokenRate:
    """Throughput of all streams together while they are busy, tokens a second, measured from the batches."""

    streams: int
    _tokens: float = 0.0
    _seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a batch of `tokens` real tokens that one stream has run in `seconds`."""
        decay = 0.5 ** (seconds / _MEMORY_SECONDS)
        self._tokens = self._tokens * decay + tokens
        self._seconds = self._seconds * decay + seconds

    @property
    def is_measured(self) -> bool:
        """False before the first batch."""
        return self._seconds > 0 and self._tokens > 0

    @property
    def tokens_per_second(self) -> float:
        """The throughput; a default before the first batch."""
        if not self.is_measured:
            return DEFAULT_TOKENS_PER_SECOND * self.streams
        return self.streams * self._tokens / self._seconds


def partly_run() -> DeadlineExceeded:
    """The error of a request of which some rows were run in time."""
    return DeadlineExceeded(
        "not all of the request had started to run by its deadline",
        remedy="Send fewer texts in one request, or allow more time",
    )
