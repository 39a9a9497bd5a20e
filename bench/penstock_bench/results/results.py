"""What a whole experiment found: settings, verdicts, and on what machine. What tables and the report show."""

from __future__ import annotations

from pydantic import Field

from penstock.hardware import CpuIdentity
from penstock.manifest import Frozen
from penstock.tasks import TaskName
from penstock.manifest import Frozen
from penstock_bench.results.figures import Figures, paired_ratio
from penstock_bench.grid import BenchSetting
from penstock_bench.results.judge import LengthVerdict, SpeedRule, judge_lengths
from penstock_bench.results.published import TABLE_BATCH, TABLE_CORES

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
        """Its place in the grid."""
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
        """The share of the servers' CPUs that others took, of the server that it hit most."""
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
        """What is asked for on this CPU."""
        return SpeedRule.of(self.cpu.isa)

    @property
    def judged_cores(self) -> int | None:
        """The published table is for two cores: they are judged, or what there is when two were not measured."""
        measured = sorted({result.cores for result in self.settings if result.batch == TABLE_BATCH})
        if not measured:
            return None
        return TABLE_CORES if TABLE_CORES in measured else measured[-1]

    @property
    def verdicts(self) -> tuple[LengthVerdict, ...]:
        """By length, at the judged number of cores and batch 1."""
        judged = [
            result
            for result in self.settings
            if result.cores == self.judged_cores and result.batch == TABLE_BATCH and result.ours.latency is not None
        ]
        return judge_lengths(
            self.cpu.isa,
            milliseconds={result.tokens: result.ours.latency.p50 for result in judged if result.ours.latency},
            ratios={result.tokens: result.ratio for result in judged if result.ratio is not None},
            floors={result.tokens: result.floor_milliseconds for result in judged if result.floor_milliseconds},
            foreign_shares={result.tokens: result.foreign_share for result in judged if result.foreign_share},
        )

    @property
    def passed(self) -> bool | None:
        """Every length that could be judged reaches what is asked for; None when none could."""
        known = [verdict.passed for verdict in self.verdicts if verdict.passed is not None]
        return all(known) if known else None

    @property
    def foreign_share(self) -> float | None:
        """The largest share of the servers' CPUs that others took in any setting: how noisy the machine was."""
        return max((share for result in self.settings if (share := result.foreign_share) is not None), default=None)
