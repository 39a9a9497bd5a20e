"""The results: figures of a server at one setting over all rounds, and the experiment with its verdicts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pydantic import Field

from penstock.hardware import CpuIdentity
from penstock.manifest import Frozen
from penstock.tasks import TaskName
from penstock_bench.cell import CellResult
from penstock_bench.grid import BenchSetting
from penstock_bench.judge import TABLE_BATCH, TABLE_CORES, LengthVerdict, SpeedRule, judge_lengths
from penstock_optimizer.load.generator import LatencySummary, relative_spread


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


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


OURS = "penstock"
BASELINE = "transformers"


class SettingResult(Frozen):
    """One of the settings."""

    cores: int
    """0: not known, the server was given by URL."""
    tokens: int
    batch: int
    figures: dict[str, Figures]
    """By server: `penstock`, and `transformers` for the baseline."""
    floor_milliseconds: float | None = None
    """Median of the fastest engine's forward pass alone in the same run; batch 1 only."""

    @property
    def setting(self) -> BenchSetting:
        """Its position in the grid."""
        return BenchSetting(cores=self.cores, tokens=self.tokens, batch=self.batch)

    @property
    def ours(self) -> Figures:
        """Of the server that is measured."""
        return self.figures[OURS]

    @property
    def baseline(self) -> Figures | None:
        """Of plain transformers, where it was measured."""
        return self.figures.get(BASELINE)

    @property
    def foreign_share(self) -> float | None:
        """The share of the servers' CPUs that other processes took, at the server with the largest share."""
        known = [one.foreign_cores for one in self.figures.values() if one.foreign_cores is not None]
        return max(known) / self.cores if known and self.cores else None

    @property
    def ratio(self) -> float | None:
        """How many times the baseline's rate."""
        return None if self.baseline is None else paired_ratio(self.ours, self.baseline)


class Served(Frozen):
    """What answered, at one number of cores."""

    cores: int
    plan: str
    """Such as `openvino-int8, 2x1 threads`; empty where the server does not tell."""
    made: str = ""
    """When the artefact was made; empty where that is not known."""
    verdict: str = ""
    """The guard's verdict on it."""
    cpus: tuple[int, ...] = ()
    client_cpus: tuple[int, ...] = ()
    """Empty: the client shared the server's."""


class BenchResults(Frozen):
    """The whole experiment."""

    created: str
    """ISO 8601, UTC."""
    experiment: str = ""
    """The same for runs that measure the same in the same way on one machine: one may go on where another ended."""
    planned: int = 0
    """Settings that this machine can do."""
    version: str
    target: str
    """The endpoint's name, or its URL."""
    model: str
    task: TaskName
    cpu: CpuIdentity
    machine_cores: int
    seconds_per_setting: float
    rounds: int
    libraries: dict[str, str] = Field(default_factory=dict)
    served: tuple[Served, ...] = ()
    settings: tuple[SettingResult, ...] = ()
    left_out: tuple[str, ...] = ()
    """What could not be measured here, one sentence each."""
    notes: tuple[str, ...] = ()
    """What to keep in mind when reading the figures."""

    @property
    def finished(self) -> bool:
        """Every setting was measured."""
        return len(self.settings) >= self.planned

    @property
    def answered(self) -> bool:
        """The server had an answer in one setting at least: something was measured."""
        return any(result.ours.latency is not None for result in self.settings)

    @property
    def rule(self) -> SpeedRule:
        """The rule for this CPU."""
        return SpeedRule.of(self.cpu.isa)

    @property
    def judged_cores(self) -> int | None:
        """The published table is for two cores: they are judged, or what there is when two were not measured."""
        measured = sorted({result.cores for result in self.settings if result.batch == TABLE_BATCH})
        if not measured:
            return None
        return TABLE_CORES if TABLE_CORES in measured else measured[-1]

    @property
    def judged(self) -> dict[int, SettingResult]:
        """By tokens: the results at the judged number of cores and batch 1."""
        return {
            result.tokens: result
            for result in self.settings
            if result.cores == self.judged_cores and result.batch == TABLE_BATCH and result.ours.latency is not None
        }

    @property
    def verdicts(self) -> tuple[LengthVerdict, ...]:
        """By length, of `judged`."""
        judged = self.judged.items()
        return judge_lengths(
            self.cpu.isa,
            milliseconds={tokens: one.ours.latency.p50 for tokens, one in judged if one.ours.latency},
            ratios={tokens: one.ratio for tokens, one in judged if one.ratio is not None},
            floors={tokens: one.floor_milliseconds for tokens, one in judged if one.floor_milliseconds},
            foreign_shares={tokens: one.foreign_share for tokens, one in judged if one.foreign_share},
        )

    @property
    def passed(self) -> bool | None:
        """Every length that could be judged meets the rule; None when none could."""
        known = [verdict.passed for verdict in self.verdicts if verdict.passed is not None]
        return all(known) if known else None

    @property
    def foreign_share(self) -> float | None:
        """The largest share of the servers' CPUs that other processes took in any setting."""
        return max((share for result in self.settings if (share := result.foreign_share) is not None), default=None)
