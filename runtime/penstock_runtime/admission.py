"""Which requests may wait in the queue of a server, and which give way when it is full. Pure: no clock, no I/O.

The servers of all kinds of models admit their requests here, whichever protocol these came by:

- A request that would not fit into an empty queue gets InvalidInput (422). If it were accepted whenever the queue is
  empty, it would be answered or refused by chance, and never under steady load.
- A request that does not fit now makes the newest waiting requests of other clients give way: of a lower priority class
  first, then of the client with the most tokens in the queue, as long as it has more than the client of the new request
  would have. If that does not make room, the new request gets Overloaded (429), with the time that the waiting tokens
  take at the measured rate as its Retry-After. A request that gives way gets the same error.
- A client is the bearer token of a request or, without one, its address: behind a gateway all addresses are one.
- A request is dropped (504) if it has not started by its deadline, from its header or from the settings.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

from penstock_runtime.errors import InvalidInput, Overloaded, RequestError
from penstock_runtime.settings import QueueSettings

MOST_SECONDS_TO_RETRY = 60
_MOST_KEPT = 1024
"""Clients that `FairShares` remembers, besides those that wait. For one more, the half with the least time is
forgotten."""


class Waiting(NamedTuple):
    """The content of a queue."""

    rows: int
    """Sequences that wait; running ones are not counted."""
    tokens: int


class Work(Protocol):
    """The work of a request in the queue."""

    def is_waiting(self) -> bool:
        """Whether a part of it counts as waiting."""
        ...

    def refuse(self, error: RequestError) -> None:
        """End it with an error."""
        ...


@dataclass(slots=True, eq=False)
class Entry:
    """A request in the queue, from its admission to its end."""

    client: str
    """See `client_of`. Clients share the queue."""
    rows: int
    tokens: int
    """The cost: tokens of all rows."""
    deadline: float
    """Seconds, on the caller's clock."""
    work: Work | None = None
    """Set when it has been admitted."""
    priority: int = 0
    """Priority class: requests of a higher number give way first."""
    model: str = ""
    """The model that it is for, where several share a queue."""


def client_of(token: str, address: str) -> str:
    """The key by which clients share a server: the name of the bearer token, or the address if there is none."""
    return f"token {token}" if token else address


def check_size(limits: QueueSettings, rows: int, tokens: int, *, field: str = "inputs") -> None:
    """InvalidInput if a request can never fit into the queue. A single row always can, as the only one that waits."""
    for found, limit, what in (
        (rows, limits.max_queue_rows, "sequences"),
        (tokens if rows > 1 else 0, limits.max_queue_tokens, "tokens"),
    ):
        if found > limit:
            raise InvalidInput(
                f"this request has {found} {what}, and at most {limit} may wait at once",
                field=field,
                remedy="Split it into smaller requests, sent one after the other or a few at a time",
            )


def fits(limits: QueueSettings, rows: int, tokens: int, waiting: Waiting) -> bool:
    """Whether a request fits into the queue next to the waiting ones. One that is larger than the limit of tokens must
    be the only one."""
    if waiting.rows + rows > limits.max_queue_rows:
        return False
    if tokens > limits.max_queue_tokens:
        return waiting.rows == 0
    return waiting.tokens + tokens <= limits.max_queue_tokens


def retry_after_seconds(tokens: int, tokens_per_second: float) -> int:
    """Until `tokens` will have been processed: whole seconds from 1 to 60; 1 if the rate is not known (0)."""
    seconds = math.ceil(tokens / tokens_per_second) if tokens_per_second else 1
    return max(1, min(MOST_SECONDS_TO_RETRY, seconds))


class Admission:
    """The requests of one queue."""

    def __init__(self, limits: QueueSettings, work: str = "") -> None:
        """`work`: what the requests wait for, for errors; empty: the model."""
        self.limits = limits
        self._work = work
        self._entries: dict[tuple[int, str], dict[Entry, None]] = {}
        """By priority class and client, oldest first."""
        self._tokens: dict[str, int] = {}
        """Of these, by client."""

    def deadline(self, arrived: float, seconds: float | None) -> float:
        """When a request must have started. `seconds`: the limit of the request itself; None: the setting's."""
        return arrived + (self.limits.deadline_seconds if seconds is None else seconds)

    def check(
        self, client: str, waiting: Waiting, tokens_per_second: float, tokens: int = 1, priority: int = 0
    ) -> None:
        """Overloaded if a request of this client would be refused. For before its texts are tokenised: `tokens` are as
        many as it has at least, as far as that is known."""
        least = min(tokens, self.limits.max_queue_tokens)
        if fits(self.limits, 1, least, waiting) or any(other > priority for other, _ in self._entries):
            return
        if max(self._tokens.values(), default=0) <= self._share(client, least):
            raise self._overloaded(waiting, tokens_per_second)

    def admit(
        self, entry: Entry, waiting: Callable[[], Waiting], tokens_per_second: float, *, field: str = "inputs"
    ) -> None:
        """Add a request to the queue, after others have given way if they must. It is to be released at its end.

        `waiting` is called again after each request that has given way. `field`: of the inputs, for errors.
        Overloaded, InvalidInput.
        """
        check_size(self.limits, entry.rows, entry.tokens, field=field)
        while not fits(self.limits, entry.rows, entry.tokens, found := waiting()):
            error = self._overloaded(found, tokens_per_second)
            displaced = self._displaced_by(entry)
            if displaced is None:
                raise error
            self.release(displaced)
            if displaced.work is not None:
                displaced.work.refuse(error)
        self._entries.setdefault((entry.priority, entry.client), {})[entry] = None
        self._tokens[entry.client] = self._share(entry.client, entry.tokens)

    def release(self, entry: Entry) -> None:
        """A request has ended, whatever its end was. Further calls do nothing."""
        key = entry.priority, entry.client
        entries = self._entries.get(key)
        if entries is None or entry not in entries:
            return
        del entries[entry]
        if not entries:
            del self._entries[key]
        self._tokens[entry.client] -= entry.tokens
        if not self._tokens[entry.client]:
            del self._tokens[entry.client]

    def _share(self, client: str, tokens: int) -> int:
        """Tokens that a client has in the queue with `tokens` more."""
        return self._tokens.get(client, 0) + tokens

    def _displaced_by(self, entry: Entry) -> Entry | None:
        """The request that gives way to this one next; None if there is none."""
        own = self._share(entry.client, entry.tokens)
        newest_first = reversed(self._entries)
        for key in sorted(newest_first, key=lambda key: (key[0], self._tokens[key[1]]), reverse=True):
            priority, client = key
            if priority < entry.priority or (priority == entry.priority and self._tokens[client] <= own):
                return None
            for one in reversed(self._entries[key]):
                if one.work is not None and one.work.is_waiting():
                    return one
        return None

    def _overloaded(self, waiting: Waiting, tokens_per_second: float) -> Overloaded:
        if self._work:
            return Overloaded(f"{waiting.rows} requests wait for {self._work} already")
        return Overloaded(
            f"{waiting.rows} sequences with {waiting.tokens} tokens wait already, and at most "
            f"{self.limits.max_queue_rows} with {self.limits.max_queue_tokens} may",
            retry_after_seconds=retry_after_seconds(waiting.tokens, tokens_per_second),
        )


class FairShares:
    """Equal shares of a resource among clients, by cost: fair queueing on a virtual time of all clients.

    Next is the client that will have had the least when its next work is done: of those with equal shares the one with
    the shortest work, which would otherwise wait for a long piece of each of the others. A client that had nothing to
    do starts at the time of the others: it gets no credit for that, and pays no debt for a resource that it had alone.
    """

    def __init__(self) -> None:
        self._now = 0.0
        """What each of the clients has had that always wait; others start here."""
        self._served = 0.0
        """To be added for those that come after the next choice."""
        self._times: dict[str, float] = {}
        self._waiting: Mapping[str, float] = {}

    def next(self, costs: Mapping[str, float]) -> str:
        """The client to be served next, of all that wait, with the cost of the next work of each; 0 if it is not
        known. ValueError if there are none. Among equals the first one."""
        times = self._times
        for client in costs:
            if client not in self._waiting and times.get(client, 0.0) < self._now:
                times[client] = self._now
        self._waiting = costs
        self._now = max(self._now + self._served, min(times.get(client, 0.0) for client in costs))
        self._served = 0.0
        return min(costs, key=lambda client: times.get(client, 0.0) + costs[client])

    def charge(self, client: str, cost: float) -> None:
        """A client has been served work of this cost."""
        self._times[client] = max(self._times.get(client, 0.0), 0.0 if client in self._waiting else self._now) + cost
        self._served += cost / max(len(self._waiting), 1)
        if len(self._times) > _MOST_KEPT + len(self._waiting):
            kept = self._times.keys() & self._waiting.keys()
            now = max(self._now, median(time for name, time in self._times.items() if name not in kept))
            self._times = {name: time for name, time in self._times.items() if time > now or name in kept}


class BulkFloor:
    """The least share of the computed work that bulk requests get while they wait, so that interactive ones cannot keep
    them out for ever."""

    SHARE = 0.05

    def __init__(self) -> None:
        self._credit = 0.0

    def served(self, cost: float, *, bulk_waits: bool) -> None:
        """Other work of this cost was served."""
        self._credit = self._credit + self.SHARE / (1 - self.SHARE) * cost if bulk_waits else 0.0

    def took(self, cost: float) -> None:
        """Bulk work of this cost was served."""
        self._credit = max(0.0, self._credit - cost)

    def is_due(self, cost: float) -> bool:
        """Whether bulk work of this cost is next, before any other."""
        return 0 < cost <= self._credit


class FairLine:
    """Slots for work that few callers may do at a time: the next one is for the client that has had the least of it.
    For one event loop."""

    def __init__(self, slots: int, limits: QueueSettings, work: str) -> None:
        """`limits`: of what waits. `work`: for errors, such as `the chat template`."""
        self._free = slots
        self._admission = Admission(limits, work)
        self._shares = FairShares()
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._rows = self._tokens = 0

    @asynccontextmanager
    async def slot(self, client: str, cost: int = 1) -> AsyncIterator[None]:
        """A slot for the block. Errors as `wait`."""
        entry = await self.wait(client, cost)
        try:
            yield
        finally:
            self.release(entry)

    async def wait(self, client: str, cost: int = 1) -> Entry:
        """Wait for a slot, which is given back with `release`. `client`: see `client_of`.

        Overloaded if too much waits, and none of a client with more.
        """
        entry = Entry(client, 1, cost, math.inf)
        self._admission.admit(entry, lambda: Waiting(self._rows, self._tokens), 0.0)
        if self._free:
            self._free -= 1
            self._shares.charge(self._shares.next({client: cost}), cost)
            return entry
        entry.work = waiter = _Waiter(self, entry)
        self._waiting.setdefault(client, deque()).append(waiter)
        self._rows += 1
        self._tokens += cost
        try:
            await waiter.given
        except BaseException:
            if waiter.has_slot:  # and was cancelled at the same time
                self.release(entry)
            else:
                self.remove(waiter)
                self._admission.release(entry)
            raise
        return entry

    def release(self, entry: Entry) -> None:
        """Give the slot of a caller to the next one."""
        self._admission.release(entry)
        if not self._waiting:
            self._free += 1
            return
        client = self._shares.next({name: waiters[0].entry.tokens for name, waiters in self._waiting.items()})
        waiter = self._waiting[client][0]
        self.remove(waiter)
        self._shares.charge(client, waiter.entry.tokens)
        waiter.has_slot = True
        if not waiter.given.done():  # otherwise it is cancelled, and gives the slot back
            waiter.given.set_result(None)

    def remove(self, waiter: _Waiter) -> None:
        """Take a caller out of the line, if it is still in it."""
        waiters = self._waiting.get(waiter.entry.client)
        if waiters is None or waiter not in waiters:
            return
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[waiter.entry.client]
        self._rows -= 1
        self._tokens -= waiter.entry.tokens


class _Waiter:
    """A caller in a line."""

    def __init__(self, line: FairLine, entry: Entry) -> None:
        self.entry = entry
        self.given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_slot = False
        self._line = line

    def is_waiting(self) -> bool:
        return not self.has_slot and not self.given.done()

    def refuse(self, error: RequestError) -> None:
        self._line.remove(self)
        self.given.set_exception(error)
