"""The few series of a runtime's /metrics that the autoscaler wants, from Prometheus' text format. Pure.

Not the client library's parser: it makes objects of all hundred and fifty lines, and a thousand pods are read every few
seconds.
"""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass

ANSWERED = "penstock_request_seconds_count"
BUCKET = "penstock_request_seconds_bucket"
REQUESTS = "penstock_requests_total"
IN_FLIGHT = "penstock_in_flight_requests"
UNANSWERED_CODES = frozenset({"429", "499"})
"""Refused, or given up by its client: demand as well, and not in the histogram."""

_CODE = re.compile(r'[{,]code="([^"]*)"')
_BOUND = re.compile(r'[{,]le="([^"]*)"')


class UnreadableMetrics(ValueError):
    """Not what a runtime says; the message is a clause."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one pod said at one moment. Counters count from the start of its process."""

    arrivals: float
    """Requests to the model that were answered, refused or given up."""
    in_flight: float
    """Requests read and not yet answered, without the scrape itself."""
    bounds: tuple[float, ...]
    """Upper bounds of the latency histogram in seconds, rising, the last one infinite."""
    counts: array[float]
    """Answers up to each bound."""


def read(text: str) -> Reading:
    """Of the text of /metrics; UnreadableMetrics when it is none of a runtime, or has a value that is no count."""
    answered: float | None = None
    in_flight: float | None = None
    unanswered = 0.0
    buckets: list[tuple[float, float]] = []
    for line in text.splitlines():
        if not line.startswith("penstock_"):
            continue
        series, _, rest = line.rpartition("} ") if "} " in line else line.partition(" ")
        name = series.partition("{")[0]
        if name == BUCKET:
            found = _BOUND.search(series)
            if found is None:
                raise UnreadableMetrics("its latency histogram has a series without a bound (le)")
            buckets.append((_number(found.group(1), line), _count(rest, line)))
        elif name == REQUESTS:
            code = _CODE.search(series)
            if code is not None and code.group(1) in UNANSWERED_CODES:
                unanswered += _count(rest, line)
        elif name == ANSWERED:
            answered = _count(rest, line)
        elif name == IN_FLIGHT:
            in_flight = _count(rest, line)
    if answered is None or in_flight is None or not buckets:
        raise UnreadableMetrics(f"it says nothing of {ANSWERED}, {BUCKET} and {IN_FLIGHT}")
    buckets.sort()
    if buckets[-1][0] != math.inf:
        raise UnreadableMetrics("its latency histogram has no infinite bound")
    return Reading(
        arrivals=answered + unanswered,
        # The request that asks is being answered while it is counted.
        in_flight=max(0.0, in_flight - 1),
        bounds=tuple(bound for bound, _ in buckets),
        counts=array("d", (count for _, count in buckets)),
    )


def _number(text: str, line: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UnreadableMetrics(f"it says {line[:80]!r}, which is no number") from None


def _count(rest: str, line: str) -> float:
    # A time may follow the value.
    value = _number(rest.split(" ", 1)[0], line)
    if not math.isfinite(value) or value < 0:
        raise UnreadableMetrics(f"it says {line[:80]!r}, which is no count")
    return value
