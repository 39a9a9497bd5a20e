"""A candidate runner without processes: candidates follow a script, on a fake clock that only their work advances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.manifest import Metric, Verdict
from penstock.recipe import Batching, Plan, Precision, Recipe
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from penstock_optimizer.candidate.work_folder import BuiltFacts, WorkFolder
from penstock_optimizer.search.goal import PlanSample
from penstock_optimizer.search.space import WideFrom
from tests.optimizer.report.sample import IO
from tests.optimizer.search.cost_model import FP32, CostModel


class Clock:
    """A fake clock, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Script:
    """How a candidate behaves."""

    speed: float = 1.0
    cosine: float = 0.999
    batching: Batching = Batching.PADDED
    build_seconds: float = 1.0
    fails: dict[str, WorkerFailed] = field(default_factory=dict)
    """Failures by method."""
    slow_looks: int = 0
    """How many of the first timings are disturbed."""
    timing_seconds: float | None = None
    """Duration of each timing; None: as requested."""
    wide_seconds: float = 1.0
    """Duration of finding the wide thresholds."""
    fails_after: int = 0
    """How many calls of a failing method succeed first."""
    short_speed: float | None = None
    """Speed at 8 and 16 tokens; None: the same."""
    cosine_together: float = 0.999
    """Cosine of plans with a second graph."""

    def milliseconds(self, tokens: int) -> float:
        """Time of a lone row."""
        return tokens / 8 / (self.short_speed if self.short_speed and tokens <= 16 else self.speed)


def crash(number: int = 11) -> WorkerFailed:
    return WorkerFailed(CallFailure.DIED, f"killed by signal {number}")


@dataclass
class FakeRunner:
    """Opens fake sessions, and counts calls."""

    work: WorkFolder
    scripts: dict[Recipe, Script]
    clock: Clock = field(default_factory=Clock)
    calls: list[tuple[str, Recipe]] = field(default_factory=list)
    open_now: int = 0
    max_open: int = 0

    def __post_init__(self) -> None:
        self.model = CostModel(
            speed={recipe: script.speed for recipe, script in self.scripts.items()},
            short_speed={recipe: script.short_speed or script.speed for recipe, script in self.scripts.items()},
        )

    def open(self, recipe: Recipe, *, built: BuiltFacts | None = None) -> FakeSession:
        self.open_now += 1
        self.max_open = max(self.max_open, self.open_now)
        return FakeSession(self, recipe)

    def ceiling(self, precision: Precision, *, timeout_seconds: float) -> float:
        self.calls.append((f"ceiling {precision.value}", FP32))
        return 500.0

    def count(self, method: str, recipe: Recipe | None = None) -> int:
        return sum(name == method and (recipe is None or recipe == of) for name, of in self.calls)


@dataclass
class FakeSession:
    """A fake candidate."""

    runner: FakeRunner
    recipe: Recipe
    closed: bool = False

    @property
    def script(self) -> Script:
        return self.runner.scripts[self.recipe]

    def _call(self, method: str, seconds: float, timeout_seconds: float) -> None:
        assert not self.closed, "a closed session was used"
        assert timeout_seconds > 0
        before = self.runner.count(method, self.recipe)
        self.runner.calls.append((method, self.recipe))
        if seconds > timeout_seconds:
            self.runner.clock.now += timeout_seconds
            reason = f"{method} did not end within {timeout_seconds:.0f} s"
            raise WorkerFailed(CallFailure.TIMED_OUT, reason, seconds=timeout_seconds)
        self.runner.clock.now += seconds
        if method in self.script.fails and before >= self.script.fails_after:
            raise self.script.fails[method]

    def build(self, *, timeout_seconds: float) -> BuiltFacts:
        self._call("build", self.script.build_seconds, timeout_seconds)
        graph = self.runner.work.candidate(self.recipe) / "model.onnx"
        graph.parent.mkdir(parents=True, exist_ok=True)
        graph.write_text(self.recipe.name)
        return BuiltFacts(
            graph=graph.name, io=IO, fused_nodes={"Attention": 6}, size_bytes=7, seconds=self.script.build_seconds
        )

    def judge(self, *, timeout_seconds: float) -> Verdict:
        self._call("judge", 1.0, timeout_seconds)
        if self.recipe == FP32:
            self.runner.work.reference.write_text("outcomes")
        passed = self.script.cosine >= 0.985
        metric = Metric(name="min_cosine", value=self.script.cosine, budget=0.985, passed=passed)
        return Verdict(
            passed=passed,
            reason=f"min_cosine {self.script.cosine} {'is fine' if passed else 'is under the budget of 0.985'}",
            metrics=(metric,),
            texts=100,
            batching=self.script.batching.value,
        )

    def time(self, lengths: Sequence[int], *, seconds: float, timeout_seconds: float) -> dict[int, list[float]]:
        taken = seconds * len(lengths) if self.script.timing_seconds is None else self.script.timing_seconds
        self._call("time", taken, timeout_seconds)
        disturbed = 10 if self.runner.count("time", self.recipe) <= self.script.slow_looks else 1
        return {tokens: [self.script.milliseconds(tokens) * disturbed] * 3 for tokens in lengths}

    def wide_from(self, lengths: Sequence[int], *, timeout_seconds: float) -> WideFrom:
        self._call("wide_from", self.script.wide_seconds, timeout_seconds)
        among_others, alone = (next((tokens for tokens in lengths if tokens >= least), None) for least in (64, 32))
        return WideFrom(among_others, alone)

    def lone(self, lengths: Sequence[int], *, wide: bool, timeout_seconds: float) -> dict[int, float]:
        self._call("lone", 0.1, timeout_seconds)
        return {tokens: self.script.milliseconds(tokens) for tokens in lengths}

    def judge_plan(self, plan: Plan, *, timeout_seconds: float) -> Verdict:
        self._call("judge_plan", 1.0, timeout_seconds)
        together = self.script.cosine_together
        return Verdict(passed=together >= 0.985, reason=f"min_cosine {together} together")

    def sample(self, plan: Plan, *, timeout_seconds: float) -> PlanSample:
        self._call("sample", 2.0, timeout_seconds)
        return self.runner.model(plan)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.runner.open_now -= 1
