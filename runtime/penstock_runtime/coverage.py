"""What became of the requests of gateways to a classifier, and its verdicts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric


class Coverage(StrEnum):
    """What became of a request to a classifier."""

    CLASSIFIED = "classified"
    ABSTAINED = "abstained"
    PARTIAL = "partial"
    LATE = "late"
    REFUSED = "refused"
    ABANDONED = "abandoned"
    FAILED = "failed"

    @classmethod
    def of_status(cls, status: int) -> Coverage:
        """By the status of the answer."""
        match status:
            case 499:
                return cls.ABANDONED
            case 504:
                return cls.LATE
            case 503:
                return cls.REFUSED
        return cls.CLASSIFIED if status < 400 else cls.REFUSED if status < 500 else cls.FAILED


class GuardMetrics:
    """Counters of one server, for the event loop's thread."""

    def __init__(self) -> None:
        self.coverage = dict.fromkeys(map(str, Coverage), 0)
        self.verdicts: dict[str, int] = {}

    def classified(self, coverage: str, status: int) -> None:
        """A request to a route that classifies has been answered. `coverage`: what became of it; empty: by status."""
        self.coverage[coverage or Coverage.of_status(status)] += 1

    def verdict(self, outcome: str) -> None:
        """A gateway's request got this verdict."""
        self.verdicts[outcome] = self.verdicts.get(outcome, 0) + 1

    def families(self) -> Iterator[Metric]:
        """For Prometheus."""
        coverage = CounterMetricFamily(
            "penstock_classifications",
            "Requests of gateways to a classifier, by what became of them: classified, abstained (also classified: a "
            "score was unsure), partial (a part was not read), late (not within the deadline), refused, abandoned (the "
            "client has gone), failed.",
            labels=["outcome"],
        )
        for outcome, count in self.coverage.items():
            coverage.add_metric([outcome], count)
        yield coverage
        verdicts = CounterMetricFamily(
            "penstock_guard_verdicts",
            "Verdicts for gateways by the endpoint's policy: pass, abstain, mask, block, unavailable (an error).",
            labels=["outcome"],
        )
        for outcome, count in sorted(self.verdicts.items()):
            verdicts.add_metric([outcome], count)
        yield verdicts
