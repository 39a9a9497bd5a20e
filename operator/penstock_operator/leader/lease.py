"""Which replica leads: a coordination.k8s.io Lease, held by renewing it.

The rules are client-go's. Others' clocks are not believed: a follower takes the lease when it has not *seen it change*
for the duration stated in it. The leader stops writing (`held`) before that, counted from when it *began* its last
successful renewal, so that a stalled process cannot write beside its successor.

    duration 10 s    a follower waits this long after the last change that it saw
    deadline 8 s     the leader gives up after this long without a renewal: an API server may be away for so long
    interval 1.25 s  renewals, and a follower's looks

After a kill -9 the next one leads within duration + 2 x interval, 12.5 s, and works a second later. A leader that ends
in order hands over at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock_operator.cluster.errors import ClusterError, Conflict
from penstock_operator.cluster.kinds import LEASE, Json
from penstock_operator.cluster.port import ClusterPort
from penstock_operator.metrics import LEADER

HAND_OVER_SECONDS = 2.0
"""Whoever ends because the API server is away need not wait for it any longer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTimes:
    """See the module. deadline + interval < duration."""

    duration_seconds: float = 10.0
    deadline_seconds: float = 8.0
    interval_seconds: float = 1.25

    def __post_init__(self) -> None:
        """Refuse times that would let two lead."""
        if self.deadline_seconds + self.interval_seconds >= self.duration_seconds:
            raise ValueError(
                f"deadline {self.deadline_seconds:g} s and interval {self.interval_seconds:g} s reach the lease's "
                f"duration of {self.duration_seconds:g} s: two could lead"
            )


class Leadership:
    """One replica's part in the election."""

    def __init__(
        self,
        port: ClusterPort,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = port
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self.times = times or LeaseTimes()
        self._clock = clock
        self._seen: tuple[str, float] = ("", float("-inf"))
        """The lease's version when it last changed, and when that was seen."""
        self._renewed = float("-inf")
        self._lease: Json | None = None
        self._answered = clock()
        self.looked = False
        """Whether the API server has answered at all."""

    @property
    def silence_seconds(self) -> float:
        """Since the API server last answered."""
        return self._clock() - self._answered

    @property
    def held(self) -> bool:
        """Whether this process may write: renewed recently enough that nobody else can have taken over."""
        return self._clock() - self._renewed < self.times.deadline_seconds

    async def acquire(self) -> None:
        """Wait until this replica leads."""
        waiting_for = ""
        # Well within the deadline, so that one lost packet does not keep it from looking.
        while not await self._try(self.times.deadline_seconds / 2):
            holder = _holder(self._lease)
            if holder and holder != waiting_for:
                logger.info("standing by: %s leads", holder)
                waiting_for = holder
            # Jitter, so that several followers do not collide at every look.
            await asyncio.sleep(self.times.interval_seconds * random.uniform(0.8, 1.0))  # noqa: S311
        LEADER.set(1)
        logger.info("leading as %s", self.identity)

    async def hold(self) -> None:
        """Renew until the lease is lost; returns then. The caller ends the process: it may not write any more."""
        pending: set[asyncio.Task[bool]] = set()
        try:
            while self.held:
                next_at = self._clock() + self.times.interval_seconds
                # A renewal without an answer is not waited for, and not given up: the next one is sent beside it. The
                # answer may have been lost, or the API server may be slow; whichever comes first will do. Several do
                # no harm: each is on condition of the version that it knows.
                pending.add(asyncio.create_task(self._try(self.times.deadline_seconds)))
                while pending and (left := next_at - self._clock()) > 0:
                    done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                    if any(task.result() for task in done):
                        await _cancelled(pending)
                        pending = set()
                if self._lease is not None and _holder(self._lease) != self.identity:
                    break
                await asyncio.sleep(max(0.0, next_at - self._clock()))
        finally:
            await _cancelled(pending)
            LEADER.set(0)
        self._renewed = float("-inf")
        logger.error("the lease %s/%s is lost to %s", self._namespace, self._name, _holder(self._lease) or "silence")

    async def release(self) -> None:
        """Hand over: the next one need not wait for the lease to run out."""
        self._renewed = float("-inf")
        LEADER.set(0)
        if self._lease is None or _holder(self._lease) != self.identity:
            return
        try:
            async with asyncio.timeout(HAND_OVER_SECONDS):
                while _holder(self._lease) == self.identity:
                    try:
                        self._lease = await self._port.replace(self._written(self._lease, holder=""))
                    except Conflict:
                        # A renewal that was cancelled under way may have arrived all the same: its version counts.
                        self._lease = await self._port.get(LEASE, self._name, self._namespace)
        except (ClusterError, TimeoutError) as error:
            seconds, why = self.times.duration_seconds, error or "no answer in time"
            logger.warning("could not hand over the lease; it runs out in %g s: %s", seconds, why)

    async def _try(self, within_seconds: float) -> bool:
        """One look, and a renewal or an attempt to take it. True when this replica holds the lease now."""
        begin = self._clock()
        try:
            async with asyncio.timeout(within_seconds):
                if self._lease is None or _holder(self._lease) != self.identity:
                    self._lease = await self._port.get(LEASE, self._name, self._namespace)
                if self._lease is None:
                    self._lease = await self._port.create(self._written(None, holder=self.identity))
                elif self._may_take(self._lease):
                    self._lease = await self._port.replace(self._written(self._lease, holder=self.identity))
                else:
                    self._heard()
                    return False
        except Conflict:
            # Somebody was faster, or the lease was edited: look again next time.
            self._lease = None
            self._heard()
            return False
        except (ClusterError, TimeoutError) as error:
            logger.warning("lease %s/%s: %s", self._namespace, self._name, error or "no answer in time")
            return False
        self._renewed = max(self._renewed, begin)
        self._heard()
        return True

    def _heard(self) -> None:
        self._answered = self._clock()
        self.looked = True

    def _may_take(self, lease: Json) -> bool:
        version = str(lease["metadata"].get("resourceVersion"))
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder in {"", self.identity}:
            return True
        # What the holder states: its times may be others than ours during an upgrade.
        duration = float(spec.get("leaseDurationSeconds") or self.times.duration_seconds)
        return self._clock() - self._seen[1] >= duration

    def _written(self, lease: Json | None, *, holder: str) -> Json:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = dict((lease or {}).get("spec") or {})
        if _holder(lease) != holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (lease is not None)
        spec.update(
            holderIdentity=holder,
            renewTime=now,
            # Whole seconds, as the API has it; rounded up, so that nobody takes it early.
            leaseDurationSeconds=int(-(-self.times.duration_seconds // 1)),
        )
        metadata = {"name": self._name, "namespace": self._namespace}
        if lease is not None:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata, "spec": spec}


async def _cancelled(tasks: set[asyncio.Task[bool]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _holder(lease: Json | None) -> str:
    return str(((lease or {}).get("spec") or {}).get("holderIdentity") or "")
