"""Input and output of an autoscaling policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock_simulator.fleet import Fleet
from penstock_simulator.scraper import Scraper


@dataclass(frozen=True)
class Limits:
    """Settings that all policies share."""

    min_replicas: int = 1
    max_replicas: int = 24

    def clamp(self, replicas: int) -> int:
        """The nearest number that is allowed."""
        return min(max(replicas, self.min_replicas), self.max_replicas)


@dataclass(frozen=True)
class View:
    """The endpoint as its autoscaler may see it."""

    now: float
    fleet: Fleet
    """For the number of replicas and of ready ones, which the API server tells at once; not for its traffic."""
    scraper: Scraper
    """Traffic as Prometheus knows it."""
    concurrency: Sequence[float]
    """Mean requests in flight of each second so far, which Knative's queue proxies and activator report."""


class Policy(Protocol):
    """Decides every `interval` seconds."""

    interval: int

    def decide(self, view: View) -> int | None:
        """How many replicas to ask for; None leaves the number."""
        ...
