"""What the cells of one server at one setting say together: rates by round, latencies of all rounds, noise. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from pydantic import Field

from penstock.manifest import Frozen
from penstock_bench.cell import CellResult
from penstock_optimizer.load.summary import LatencySummary, relative_spread


class Figures(Frozen):
    """One server at one setting, all rounds."""

    per_second: float
    """Requests per second, the median of the rounds."""
    spread: float = 0.0
    """Interquartile range of the rounds' rates over their median."""
    rates: tuple[float, ...] = ()
    """By round."""
    latency: LatencySummary | None = None
    """Milliseconds; of all rounds together, so that p99 rests on as many samples as there are."""
    failures: dict[str, int] = Field(default_factory=dict)
    first_failure: str = ""
    server_cores: float | None = None
    server_cpu_milliseconds: float | None = None
    server_rss_bytes: int | None = None
    """Largest of the rounds."""
    foreign_cores: float | None = None
    """Median of the rounds: what other processes took of the server's CPUs."""
    header_means: dict[str, float] = Field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Requests without a 2xx answer."""
        return sum(self.failures.values())

    @property
    def why_failed(self) -> str:
        """Status and start of the first bad answer; where none came, in words why. Empty where nothing failed."""
        return self.first_failure or ", ".join(self.failures)

    @classmethod
    def of(cls, cells: Sequence[CellResult]) -> Figures:
        """Put the rounds together; `cells` is not empty."""
        failures: dict[str, int] = {}
        for cell in cells:
            for name, count in cell.failures.items():
                failures[name] = failures.get(name, 0) + count
        rates = tuple(cell.completed_per_second for cell in cells)
        headers = sorted({name for cell in cells for name in cell.header_means})
        return cls(
            per_second=median(rates),
            spread=relative_spread(rates),
            rates=rates,
            latency=LatencySummary.of([value / 1e3 for cell in cells for value in cell.latencies_milliseconds]),
            failures=dict(sorted(failures.items())),
            first_failure=next((cell.first_failure for cell in cells if cell.first_failure), ""),
            server_cores=_median([cell.server_cores for cell in cells]),
            server_cpu_milliseconds=_median([cell.server_cpu_milliseconds for cell in cells]),
            server_rss_bytes=max((cell.server_rss_bytes for cell in cells if cell.server_rss_bytes), default=None),
            foreign_cores=_median([cell.foreign_cores for cell in cells]),
            header_means={
                name: median([cell.header_means[name] for cell in cells if name in cell.header_means])
                for name in headers
            },
        )


def paired_ratio(ours: Figures, theirs: Figures) -> float | None:
    """How many times faster ours was: the median over rounds of the ratio within a round.

    Both cells of a round lie seconds apart, so that a machine that slows down for a minute slows both. None when a
    round of theirs answered nothing.
    """
    pairs = list(zip(ours.rates, theirs.rates, strict=False))
    if not pairs or any(rate <= 0 for _, rate in pairs):
        return None
    return median([own / other for own, other in pairs])


def latencies_by_group(cells: Sequence[CellResult]) -> Mapping[int, LatencySummary]:
    """Latencies of all rounds by the bodies' groups, such as lengths in tokens, ascending."""
    groups: dict[int, list[float]] = {}
    for cell in cells:
        for group, value in zip(cell.groups, cell.latencies_milliseconds, strict=True):
            groups.setdefault(group, []).append(value / 1e3)
    summaries = {group: LatencySummary.of(groups[group]) for group in sorted(groups)}
    return {group: summary for group, summary in summaries.items() if summary is not None}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
