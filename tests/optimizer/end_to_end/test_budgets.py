"""An optimisation with little time, with an interruption, or with few choices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import OptimizationError
from penstock.manifest import Manifest, Outcome
from penstock.resources.endpoint import ModelEndpoint
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from penstock_optimizer.candidate.runner import ProcessRunner, ProcessSession
from penstock_optimizer.candidate.work_folder import ExportedFacts
from penstock_optimizer.job.progress import ProgressEvent, Stage
from penstock_optimizer.optimise import optimise, prepare
from penstock_optimizer.search.recipes import REFERENCE
from penstock_optimizer.targets.target import EXPORT_SECONDS, Budget
from tests.optimizer.end_to_end.optimising import ENOUGH_SECONDS, QUICK, Made, endpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_points")]


def test_without_a_search_there_is_fp32_with_its_curve(model: Path, tmp_path: Path) -> None:
    found = Made(endpoint(model, {"mode": "Disabled"}), tmp_path).manifest

    assert [(one.recipe, one.outcome) for one in found.candidates] == [(REFERENCE, Outcome.CHOSEN)]
    assert found.chosen.plan.recipe == REFERENCE
    assert found.trials == ()
    assert found.capacity.points


def test_an_impossible_accuracy_budget_is_an_error_with_each_candidate_when_no_candidate_is_fail(
    model: Path, tmp_path: Path
) -> None:
    strict = {**QUICK, "accuracy": {"minCosine": 1.0}, "whenNoCandidate": "Fail"}
    with pytest.raises(OptimizationError) as caught:
        optimise(endpoint(model, strict), store=tmp_path, models=tmp_path, budget_seconds=ENOUGH_SECONDS)

    message = str(caught.value)
    assert "no candidate is within the accuracy budget" in message
    assert message.count("onnxruntime-int8-dynamic") >= 2
    assert "min_cosine" in message
    assert "ServeFP32" in message


def test_the_time_budget_limits_all_candidates_and_more_time_continues_from_there(model: Path, tmp_path: Path) -> None:
    short = cut_short(endpoint(model, {}), tmp_path)
    seconds = short.manifest.budget_seconds

    # All candidates take minutes. Here a busy machine has time for what is in progress, such as ending processes;
    # tests/optimizer/job/test_screening.py and test_plan_search.py check it to the second with a fake clock.
    assert short.manifest.seconds <= short.seconds <= seconds + 30
    assert {one.outcome for one in short.manifest.candidates} & {Outcome.SKIPPED, Outcome.FAILED}
    assert short.manifest.cut_short
    assert any("time budget" in finding for finding in short.manifest.findings)
    assert short.artefact.with_name(f"{short.artefact.name}.work").is_dir()


def cut_short(wanted: ModelEndpoint, store: Path) -> Made:
    """Enough time for fp32 at least, on this machine, and not for all candidates."""
    for seconds in (15, 30, 60):
        try:
            return Made(wanted, store, seconds=seconds)
        except OptimizationError as error:
            if "Raise spec.optimization.budgetSeconds" not in str(error):
                raise
    return Made(wanted, store, seconds=120)


@pytest.mark.parametrize("budget_seconds", [30.0, 5000.0])
def test_the_export_gets_the_rest_of_the_budget_up_to_the_limit_for_a_hang(
    budget_seconds: float, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def hangs(_: ProcessRunner, flavour: str, *, timeout_seconds: float) -> ExportedFacts:
        limits.append(timeout_seconds)
        raise WorkerFailed(CallFailure.TIMED_OUT, f"export did not end within {timeout_seconds:.0f} s")

    monkeypatch.setattr(ProcessRunner, "exported", hangs)
    by_budget = budget_seconds < EXPORT_SECONDS
    message = "the time budget ended before the fp32 graph was written" if by_budget else "could not be exported"
    with pytest.raises(OptimizationError, match=f"{message}: export did not end within"):
        optimise(endpoint(model, QUICK), store=tmp_path, models=tmp_path, budget_seconds=budget_seconds)
    with pytest.raises(OptimizationError, match="the model could not be exported"):
        prepare(endpoint(model, QUICK), store=tmp_path, models=tmp_path)

    assert 0 < limits[0] <= min(budget_seconds, EXPORT_SECONDS)
    assert limits[1] == EXPORT_SECONDS


def test_an_export_that_takes_nearly_all_of_the_budget_is_an_error_about_the_budget(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = ProcessRunner.exported

    def slow(runner: ProcessRunner, flavour: str, *, timeout_seconds: float) -> ExportedFacts:
        facts = export(runner, flavour, timeout_seconds=timeout_seconds)
        monkeypatch.setattr(Budget, "spent", 59.5)
        return facts

    monkeypatch.setattr(ProcessRunner, "exported", slow)
    with pytest.raises(OptimizationError) as caught:
        optimise(endpoint(model, QUICK), store=tmp_path, models=tmp_path, budget_seconds=60)

    assert str(caught.value).startswith(
        "the time budget of 60 s leaves too little after the export to judge and measure the fp32 graph: it ended "
        "after 59.5 s"
    )
    assert caught.value.remedy == "Raise spec.optimization.budgetSeconds, or --budget: the next run goes on from here"
    assert not list(tmp_path.glob("*.work/candidates"))


def test_an_fp32_graph_that_runs_out_of_time_is_an_error_about_the_budget(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object, **__: object) -> object:
        raise WorkerFailed(CallFailure.TIMED_OUT, "observe_reference did not end within 1 s")

    monkeypatch.setattr(ProcessSession, "judge", late)
    with pytest.raises(
        OptimizationError, match=r"budget of 400 s leaves too little after the export .*: observe_reference did not"
    ):
        optimise(endpoint(model, QUICK), store=tmp_path, models=tmp_path, budget_seconds=ENOUGH_SECONDS)


def test_an_interrupted_run_continues_with_its_results(model: Path, tmp_path: Path) -> None:
    wanted = endpoint(model, QUICK)
    file = tmp_path / "endpoint.json"
    file.write_text(json.dumps(wanted.model_dump(mode="json", by_alias=True, exclude={"status"})))
    store = tmp_path / "store"
    script = (
        "import pathlib\n"
        "from penstock.resources.endpoint import ModelEndpoint\n"
        "from penstock.resources.files.reading import from_file\n"
        "from penstock_optimizer.optimise import *\n"
        f"optimise(from_file(ModelEndpoint, pathlib.Path({str(file)!r})), store=pathlib.Path({str(store)!r}),"
        f" models=pathlib.Path({str(store)!r}), budget_seconds={ENOUGH_SECONDS},"
        " on_progress=lambda event: print(event.to_json_line(), flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["stage"] == "measure":
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (work,) = store.glob("*.work")
    before = {path: path.stat().st_mtime_ns for path in work.glob("candidates/*/*")}
    assert len(before) >= 2

    times: list[dict[Path, int]] = []

    def watch(event: ProgressEvent) -> None:
        if event.stage is Stage.MEASURE:
            times.append({path: path.stat().st_mtime_ns for path in before})

    artefact = optimise(wanted, store=store, models=store, budget_seconds=ENOUGH_SECONDS, on_progress=watch)

    assert times[0] == before
    manifest = Manifest.load(artefact)
    assert manifest.candidates[1].verdict is not None
    assert not manifest.cut_short
    assert not work.exists()
