"""Leader election with a coordination.k8s.io Lease, by the rules of client-go.

Clocks of other hosts are not trusted: a follower takes the lease when it has not seen it change for the duration stated
in it. The leader stops writing (`held`) earlier, counted from the start of its last successful renewal, so that a
stalled process cannot write concurrently with its successor.

    duration 10 s    a follower waits this long after the last change that it saw
    deadline 8 s     the leader gives up after this time without a renewal: the API server may be away for so long
    interval 1.25 s  between renewals, and between a follower's checks

After a kill -9 the next replica leads within duration + 2 x interval, 12.5 s. A leader that ends normally hands over
immediately.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.logs import log_event
from penstock_operator.cluster.api import LEASE, ClusterPort, Json
from penstock_operator.cluster.errors import ClusterError, Conflict
from penstock_operator.metrics import LEADER

HAND_OVER_SECONDS = 2.0
"""Limit of the hand-over: a process that ends because the API server is away need not wait longer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTimes:
    """See the module. deadline + interval < duration."""

    duration_seconds: float = 10.0
    deadline_seconds: float = 8.0
    interval_seconds: float = 1.25

    def __post_init__(self) -> None:
        """Reject times with which two replicas could lead."""
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
        self._place = f"{namespace}/{name}"
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
        """Seconds since the API server last answered."""
        return self._clock() - self._answered

    @property
    def held(self) -> bool:
        """Whether this process may write: its last renewal is recent enough that no other replica can have taken
        over."""
        return self._clock() - self._renewed < self.times.deadline_seconds

    async def acquire(self) -> None:
        """Wait until this replica leads."""
        waiting_for = ""
        # Well within the deadline, so that one lost packet does not prevent the next attempt.
        while not await self._try(self.times.deadline_seconds / 2):
            holder = _holder(self._lease)
            if holder and holder != waiting_for:
                logger.info("standing by: %s leads", holder, extra=log_event("StandingBy", object=self._place))
                waiting_for = holder
            # Jitter, so that several followers do not collide at every attempt.
            await asyncio.sleep(self.times.interval_seconds * random.uniform(0.8, 1.0))  # noqa: S311
        LEADER.set(1)
        logger.info("leading as %s", self.identity, extra=log_event("LeaseAcquired", object=self._place))

    async def hold(self) -> None:
        """Renew until the lease is lost, then return. The caller must end the process: it may not write any more."""
        pending: set[asyncio.Task[bool]] = set()
        try:
            while self.held:
                next_at = self._clock() + self.times.interval_seconds
                # A renewal without an answer is neither awaited nor cancelled: the next one is sent in parallel. The
                # answer may be lost or the API server slow; the first answer counts. Several do no harm: each has the
                # known version as a precondition.
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
        holder = _holder(self._lease)
        taken = holder not in {"", self.identity}
        why = f"{holder} holds it" if taken else "it was not renewed in time"
        logger.error(
            "the lease %s is lost: %s",
            self._place,
            why,
            extra=log_event("LeaseLost", object=self._place, reason="Taken" if taken else "NotRenewed"),
        )

    async def release(self) -> None:
        """Hand over: the next replica need not wait until the lease expires."""
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
                        # A cancelled renewal may have been executed nevertheless: its version counts.
                        self._lease = await self._port.get(LEASE, self._name, self._namespace)
        except (ClusterError, TimeoutError) as error:
            logger.warning(
                "could not hand over the lease, it expires in %g s: %s",
                self.times.duration_seconds,
                error or "no answer in time",
                extra=log_event("LeaseNotReleased", object=self._place, reason=error),
            )

    async def _try(self, within_seconds: float) -> bool:
        """Read the lease once, and renew it or try to take it. True when this replica holds the lease now."""
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
                    self._last_contact()
                    return False
        except Conflict:
            # Another replica was faster, or the lease was edited: read it again next time.
            self._lease = None
            self._last_contact()
            return False
        except (ClusterError, TimeoutError) as error:
            logger.warning(
                "cannot renew or read the lease %s: %s",
                self._place,
                error or "no answer in time",
                extra=log_event("LeaseUnavailable", object=self._place, reason=error),
            )
            return False
        self._renewed = max(self._renewed, begin)
        self._last_contact()
        return True

    def _last_contact(self) -> None:
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
        # The holder's duration: during an upgrade its times may differ from ours.
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
            # Whole seconds, as the API requires; rounded up, so that it is not taken early.
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
