"""The optimisation from end to end, with real engines, processes and a real server, on a model of two small layers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.endpoint import ModelEndpoint
from penstock.errors import ModelNotFound, OptimizationError, SpecError
from penstock.manifest import Manifest, Outcome
from penstock.recipe import Batching, EngineName, Precision, Recipe
from penstock_optimizer.artefact import digests
from penstock_optimizer.capacity import CapacityFailed, ReplicaBroken, replica
from penstock_optimizer.optimise import optimise, prepare
from penstock_optimizer.planning import Planner
from penstock_optimizer.progress import Progress, Stage
from penstock_optimizer.recipes import TEACHER
from penstock_optimizer.search.climb import Climbed
from penstock_optimizer.search.route import routed
from penstock_optimizer.search.space import Limits, first_plan
from penstock_runtime.batching.rectangle import run_rows
from penstock_runtime.host import read_host
from penstock_runtime.loaded import load_artefact
from penstock_runtime.rows import Row
from tests.optimizer.whole.small_model import HIDDEN, write_small_bert

BROKEN = "onnxruntime int8-dynamic"
QUICK = {"engines": ["onnxruntime"], "precisions": ["fp32", "int8-dynamic"]}
"""A few recipes: what is made and measured in seconds."""


def endpoint(folder: Path, optimization: dict[str, Any], **spec: Any) -> ModelEndpoint:
    return ModelEndpoint.from_object(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": "small"},
            "spec": {
                "model": f"file://{folder}",
                "task": "feature-extraction",
                "cores": 1,
                "optimization": optimization,
                **spec,
            },
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_bert(tmp_path_factory.mktemp("model"))


class Made:
    """One optimisation and what it said."""

    def __init__(self, endpoint: ModelEndpoint, store: Path, *, seconds: float) -> None:
        self.endpoint, self.store = endpoint, store
        self.events: list[Progress] = []
        begin = time.monotonic()
        self.artefact = optimise(
            endpoint, store=store, models=store / "models", budget_seconds=seconds, on_progress=self.events.append
        )
        self.seconds = time.monotonic() - begin
        self.manifest = Manifest.load(self.artefact)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three candidates, one of which cannot be made."""
    store = tmp_path_factory.mktemp("store")
    wanted = endpoint(model, QUICK, objective={"latency": {"p95Milliseconds": 100}})
    baseline = prepare(wanted, store=store, models=store).artefact
    folder = store / f"{baseline.name.removesuffix('.baseline')}.work" / "candidates"
    folder.mkdir(parents=True)
    (folder / BROKEN.replace(" ", "-")).write_text("a file where its folder would be")
    return Made(wanted, store, seconds=60)


def test_the_artefact_is_whole_and_serves(made: Made) -> None:
    assert digests(made.artefact) == made.manifest.files
    loaded = load_artefact(made.artefact, "chosen", read_host())
    try:
        prepared = loaded.task.prepare(loaded.task.parse("the school of music", {}))
        (outputs,) = run_rows(loaded.engine, loaded.io, prepared.rows)
        answer = loaded.task.assemble(prepared, [loaded.task.reduce(prepared.rows[0], outputs)])
    finally:
        loaded.close()

    assert np.asarray(answer).reshape(-1).shape == (HIDDEN,)
    assert np.isfinite(np.asarray(answer)).all()


def test_what_is_chosen_may_serve_and_every_candidate_has_its_reason(made: Made) -> None:
    by_outcome: dict[Outcome, list[str]] = {}
    for candidate in made.manifest.candidates:
        assert candidate.reason
        by_outcome.setdefault(candidate.outcome, []).append(candidate.recipe.name)
    (chosen,) = by_outcome[Outcome.CHOSEN]
    facts = next(one for one in made.manifest.candidates if one.recipe.name == chosen)

    assert facts.recipe == made.manifest.chosen.plan.recipe
    assert facts.verdict is not None
    assert facts.verdict.passed
    assert Outcome.SKIPPED in by_outcome  # OpenVINO, left out by the endpoint
    order = list(Batching)
    assert order.index(made.manifest.chosen.plan.batching) <= order.index(Batching(facts.verdict.batching))


def test_the_evidence_is_complete(made: Made) -> None:
    manifest = made.manifest
    teacher = next(one for one in manifest.candidates if one.recipe == TEACHER)

    assert [point.tokens for point in teacher.latency] == [8, 16, 32, 64]
    assert teacher.fused_nodes["Attention"] == 2
    assert set(manifest.speed_up) == {8, 16, 32, 64}
    assert all(0 < share.share < 1.5 for share in manifest.gemm)
    assert manifest.capacity.p95_objective_milliseconds in {100, None}
    if manifest.seconds < 0.9 * manifest.budget_seconds:
        # On a machine that is too busy for the time budget the last stages are cut, and the findings say so.
        assert len(manifest.gemm) == 4
        assert len(manifest.capacity.points) >= 3
        assert (manifest.capacity.requests_per_second or 0) > 10
        assert (manifest.serving_rss_bytes or 0) > 10e6
    assert manifest.trials
    assert manifest.toolchain["onnxruntime"]
    assert manifest.chosen.plan.summary.split(",")[0] in (made.artefact / "report.html").read_text()


def test_events_count_up_and_end_with_the_artefact(made: Made) -> None:
    last = made.events[-1]

    assert (last.stage, last.facts["artefact"], last.facts["found"]) == (Stage.DONE, str(made.artefact), False)
    assert last.step == last.steps
    steps = [event.step for event in made.events]
    assert steps == sorted(steps)
    assert {event.stage for event in made.events} == set(Stage)
    for event in made.events:
        json.loads(event.to_json_line())


def test_nothing_but_the_results_stays_in_the_store(made: Made) -> None:
    kinds = sorted(path.name.partition(".")[2] for path in made.store.iterdir())

    # A budget that did not suffice on a busy machine leaves the work to go on from.
    assert kinds == ["", "baseline", "baseline.lock", "lock", *(["work"] if made.manifest.cut_short else [])]


def test_the_second_time_it_is_found_by_its_key(made: Made) -> None:
    again = Made(made.endpoint, made.store, seconds=60)

    assert again.seconds < 3
    assert again.artefact == made.artefact
    assert [event.facts.get("found") for event in again.events] == [True]
    assert prepare(made.endpoint, store=made.store, models=made.store).finished
    # Nobody needs the fp32 artefact any more.
    assert not made.artefact.with_name(f"{made.artefact.name}.baseline").exists()


def test_a_damaged_artefact_is_not_found(made: Made, tmp_path: Path) -> None:
    import shutil

    store = tmp_path / "store"
    shutil.copytree(made.store, store)
    (store / made.artefact.name / made.manifest.baseline.path).unlink()

    assert not prepare(made.endpoint, store=store, models=store).finished


def test_fp32_can_be_served_within_seconds(model: Path, tmp_path: Path) -> None:
    prepared = prepare(endpoint(model, QUICK), store=tmp_path, models=tmp_path)
    manifest = Manifest.load(prepared.artefact)

    assert not prepared.finished
    assert manifest.chosen == manifest.baseline
    assert manifest.chosen.plan.recipe == TEACHER
    loaded = load_artefact(prepared.artefact, "baseline", read_host())
    loaded.close()
    assert prepare(endpoint(model, QUICK), store=tmp_path, models=tmp_path) == prepared


def test_without_a_search_there_is_fp32_with_its_curve(model: Path, tmp_path: Path) -> None:
    found = Made(endpoint(model, {"mode": "Disabled"}), tmp_path, seconds=60).manifest

    assert [(one.recipe, one.outcome) for one in found.candidates] == [(TEACHER, Outcome.CHOSEN)]
    assert found.chosen.plan.recipe == TEACHER
    assert found.trials == ()
    assert found.capacity.points


def test_an_impossible_accuracy_budget_is_refused_with_each_candidate_when_the_endpoint_says_so(
    model: Path, tmp_path: Path
) -> None:
    strict = {**QUICK, "accuracy": {"minCosine": 1.0}, "whenNoCandidate": "Fail"}
    with pytest.raises(OptimizationError) as caught:
        optimise(endpoint(model, strict), store=tmp_path, models=tmp_path, budget_seconds=150)

    message = str(caught.value)
    assert "no candidate is within the accuracy budget" in message
    assert message.count("onnxruntime int8-dynamic") >= 2
    assert "min_cosine" in message
    assert "ServeFP32" in message


def test_a_candidate_that_cannot_be_made_is_on_record_and_the_rest_goes_on(made: Made) -> None:
    failed = next(one for one in made.manifest.candidates if one.recipe.name == BROKEN)

    assert failed.outcome is Outcome.FAILED
    assert "Exists" in failed.reason or "Directory" in failed.reason
    assert made.manifest.chosen.plan.recipe != failed.recipe


def test_the_time_budget_holds_for_all_candidates_and_more_time_goes_on_from_there(model: Path, tmp_path: Path) -> None:
    seconds = 15
    short = Made(endpoint(model, {}), tmp_path, seconds=seconds)

    # Ending processes and writing may take a moment more on a busy machine; what is measured may not.
    assert short.manifest.seconds <= seconds + 2
    assert short.seconds <= seconds + 4
    assert {one.outcome for one in short.manifest.candidates} & {Outcome.SKIPPED, Outcome.FAILED}
    assert short.manifest.cut_short
    assert any("time budget" in finding for finding in short.manifest.findings)
    assert short.artefact.with_name(f"{short.artefact.name}.work").is_dir()


def test_an_interrupted_run_goes_on_with_what_it_had(model: Path, tmp_path: Path) -> None:
    wanted = endpoint(model, QUICK)
    file = tmp_path / "endpoint.json"
    file.write_text(json.dumps(wanted.model_dump(mode="json", by_alias=True, exclude={"status"})))
    store = tmp_path / "store"
    script = (
        "import sys, pathlib; from penstock.endpoint import ModelEndpoint; from penstock_optimizer.optimise import *\n"
        f"optimise(ModelEndpoint.from_file(pathlib.Path({str(file)!r})), store=pathlib.Path({str(store)!r}),"
        f" models=pathlib.Path({str(store)!r}), budget_seconds=90,"
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

    def watch(event: Progress) -> None:
        if event.stage is Stage.MEASURE:
            times.append({path: path.stat().st_mtime_ns for path in before})

    artefact = optimise(wanted, store=store, models=store, budget_seconds=20, on_progress=watch)

    assert times[0] == before
    manifest = Manifest.load(artefact)
    assert manifest.candidates[1].verdict is not None
    assert work.exists() is manifest.cut_short


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ({"model": "file:///nowhere/at/all"}, ModelNotFound, "not there"),
        ({"serving": {"maxInputTokens": 65}}, SpecError, "64"),
        ({"cores": 256}, Exception, "256"),
    ],
)
def test_what_cannot_be_optimised_is_an_error_before_anything_is_made(
    model: Path, tmp_path: Path, spec: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        optimise(endpoint(model, QUICK, **spec), store=tmp_path, models=tmp_path)

    assert not list(tmp_path.iterdir())


def test_a_plan_whose_server_breaks_is_not_served(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []

    def breaks(job: object, artefact: Path, **_: object) -> object:
        recipe = Manifest.load(artefact).chosen.plan.recipe
        served.append(recipe.name)
        if recipe != TEACHER:
            raise ReplicaBroken("the server did not start: killed by signal 4 (SIGILL)")
        raise CapacityFailed("the load process failed")

    monkeypatch.setattr("penstock_optimizer.optimise.endpoint_capacity", breaks)
    # fp32 itself may not be served where something else can be: so that something else is chosen first.
    quick = {"engines": ["onnxruntime"], "precisions": ["int8-dynamic"]}
    manifest = Made(endpoint(model, quick), tmp_path, seconds=45).manifest

    assert manifest.chosen.plan.recipe == TEACHER
    assert served[-1] == TEACHER.name
    assert "The capacity was not measured: the load process failed." in manifest.findings
    failed = [one for one in manifest.candidates if one.outcome is Outcome.FAILED]
    assert [one.recipe.name for one in failed] == served[:-1]
    assert all("SIGILL" in one.reason for one in failed)
    assert len(served) == 2


def test_a_server_that_cannot_start_says_why(made: Made, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(made.artefact, broken)
    (broken / made.manifest.chosen.path).write_bytes(b"not a graph")
    with (
        pytest.raises(ReplicaBroken, match="is not the file that was optimised"),
        replica(broken, cores=1, cpus=(), log=tmp_path / "log", start_seconds=60),
    ):
        pytest.fail("it started")


def test_a_server_without_time_to_start_is_not_started(tmp_path: Path) -> None:
    with (
        pytest.raises(CapacityFailed, match="time budget"),
        replica(tmp_path, cores=1, cpus=(), log=tmp_path / "log", start_seconds=0.5),
    ):
        pytest.fail("it started")

    assert not (tmp_path / "log").exists()


def with_route(monkeypatch: pytest.MonkeyPatch) -> tuple[Recipe, Recipe]:
    """Let the search end with OpenVINO for most rows and ONNX Runtime for short ones, whichever was faster today."""
    long = Recipe(engine=EngineName.OPENVINO, precision=Precision.FP32)

    def search(planner: Planner, _: object) -> Climbed:
        limits = Limits(1, Batching.PADDED, tuple(planner.lengths))
        plan = routed(first_plan(long, limits), TEACHER, limits, longest_tokens=16, wide_from_tokens=None)
        return Climbed(plan, None, (), finished=True, noise=0.0, second_graph_bytes=1_000_000)

    monkeypatch.setattr(Planner, "search", search)
    return long, TEACHER


BOTH = {"engines": ["onnxruntime", "openvino"], "precisions": ["fp32"]}


def test_a_route_is_written_proved_by_the_real_server_and_loaded_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = with_route(monkeypatch)
    made = Made(endpoint(model, BOTH), tmp_path, seconds=90)
    manifest = made.manifest

    assert manifest.chosen.plan.recipes == (long, short)
    assert manifest.chosen.short is not None
    assert {one.path for one in manifest.chosen.graphs} <= manifest.files.keys()
    assert digests(made.artefact) == manifest.files
    assert any(f"({short.name}): 1 MB of memory" in finding for finding in manifest.findings)
    assert f"up to 16 tokens {short.name}" in (made.artefact / "report.html").read_text()
    loaded = load_artefact(made.artefact, "chosen", read_host())
    try:
        facts = loaded.engine.facts
        assert facts.short is not None
        assert (facts.engine, facts.short.engine) == ("openvino", "onnxruntime")
        assert [len(run_rows(loaded.engine, loaded.io, [Row([1] * n)])) for n in (16, 17)] == [1, 1]
    finally:
        loaded.close()


def test_a_server_that_breaks_with_a_route_is_tried_without_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = with_route(monkeypatch)
    served: list[tuple[Recipe, ...]] = []

    def breaks(job: object, artefact: Path, **_: object) -> object:
        plan = Manifest.load(artefact).chosen.plan
        served.append(plan.recipes)
        if plan.short is not None:
            raise ReplicaBroken("the server did not start: killed by signal 9 (SIGKILL)")
        raise CapacityFailed("the load process failed")

    monkeypatch.setattr("penstock_optimizer.optimise.endpoint_capacity", breaks)
    manifest = Made(endpoint(model, BOTH), tmp_path, seconds=60).manifest

    assert served == [(long, short), (long,)]
    assert (manifest.chosen.plan.recipe, manifest.chosen.short) == (long, None)
    assert not any("graph of their own" in finding for finding in manifest.findings)
