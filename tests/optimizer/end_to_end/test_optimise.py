"""The optimisation from end to end, with real engines, processes and a real server, on a model of two small layers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from penstock.errors import CorruptModel, HostError, ModelNotFound, SpecError, UnsupportedModel
from penstock.manifest import Manifest, Outcome
from penstock.recipe import Batching, EngineName, Precision, Recipe
from penstock_optimizer.candidate.work_folder import digests, locked
from penstock_optimizer.capacity.curve import CapacityFailed, ReplicaBroken, serve_replica
from penstock_optimizer.job.progress import Stage
from penstock_optimizer.load.workload import LengthMix
from penstock_optimizer.optimise import optimise, prepare
from penstock_optimizer.search.recipes import REFERENCE
from penstock_runtime.host import read_host
from penstock_runtime.rows import run_rows
from penstock_runtime.serving.loaded_model import load_artefact
from tests.optimizer.end_to_end.optimising import QUICK, Made, endpoint
from tests.optimizer.end_to_end.small_model import HIDDEN

BROKEN = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.INT8_DYNAMIC)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_points")]


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three candidates, one of which cannot be built."""
    store = tmp_path_factory.mktemp("store")
    wanted = endpoint(model, QUICK, objective={"latency": {"p95Milliseconds": 100}})
    baseline = prepare(wanted, store=store, models=store).artefact
    folder = store / f"{baseline.name.removesuffix('.baseline')}.work" / "candidates"
    folder.mkdir(parents=True)
    (folder / BROKEN.slug).write_text("a file where its folder would be")
    return Made(wanted, store)


def test_the_artefact_is_complete_and_can_be_served(made: Made) -> None:
    assert digests(made.artefact) == made.manifest.files
    loaded = load_artefact(made.artefact, "chosen", read_host())
    try:
        prepared = loaded.task.prepare(loaded.task.parse("the school of music", {}))
        (outputs,) = run_rows(loaded.engine.run, loaded.io, prepared.rows)
        answer = loaded.task.assemble(prepared, [loaded.task.reduce(prepared.rows[0], outputs)])
    finally:
        loaded.close()

    assert np.asarray(answer).reshape(-1).shape == (HIDDEN,)
    assert np.isfinite(np.asarray(answer)).all()


def test_the_chosen_recipe_passed_the_guard_and_every_candidate_has_a_reason(made: Made) -> None:
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
    reference = next(one for one in manifest.candidates if one.recipe == REFERENCE)

    assert [point.tokens for point in reference.latency] == [8, 16, 32, 64]
    assert reference.fused_nodes["Attention"] == 2
    assert set(manifest.speed_up) == {8, 16, 32, 64}
    # Below one, if the machine was equally busy during both measurements.
    assert all(share.share > 0 for share in manifest.gemm)
    assert manifest.capacity.p95_objective_milliseconds in {100, None}
    assert not manifest.cut_short
    assert len(manifest.gemm) == 4
    assert manifest.capacity.points
    workload = fmean(LengthMix(maximum=64).sample(1000, seed=0))
    assert manifest.capacity.tokens_per_request == pytest.approx(workload, rel=0.15)
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
    # The model is a local folder: nothing is downloaded.
    assert {event.stage for event in made.events} == set(Stage) - {Stage.DOWNLOAD}
    for event in made.events:
        json.loads(event.to_json_line())


def test_the_store_has_only_the_results(made: Made) -> None:
    kinds = sorted(path.name.partition(".")[2] for path in made.store.iterdir())

    assert kinds == ["", "baseline", "baseline.lock", "lock"]


def test_a_second_optimisation_finds_the_artefact_by_its_key(made: Made) -> None:
    again = Made(made.endpoint, made.store)

    assert again.artefact == made.artefact
    assert [event.facts.get("found") for event in again.events] == [True]
    assert prepare(made.endpoint, store=made.store, models=made.store).finished
    # The fp32 artefact is no longer needed.
    assert not made.artefact.with_name(f"{made.artefact.name}.baseline").exists()


@pytest.mark.parametrize("finds", [prepare, optimise])
def test_leftovers_of_a_run_killed_at_its_end_are_deleted_when_the_artefact_is_found(
    finds: Callable[..., object], made: Made, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(made.store, store)
    key = made.artefact.name
    work, replaced = store / f"{key}.work", store / f".{key}-abcd-old"
    for folder in (work, replaced):
        folder.mkdir()
        (folder / "model.onnx").write_text("large")

    # Not while another process works with it.
    for lock in (f"{key}.lock", f"{key}.baseline.lock"):
        with locked(store / lock, waiting=lambda: None):
            finds(made.endpoint, store=store, models=store)
        assert work.exists()
        assert replaced.exists()
    finds(made.endpoint, store=store, models=store)

    assert sorted(path.name for path in store.iterdir()) == [key, f"{key}.baseline.lock", f"{key}.lock"]


def test_the_work_folder_of_a_cut_run_is_kept_for_a_larger_budget(made: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(made.store, store)
    manifest = made.manifest.model_copy(update={"cut_short": True})
    (store / made.artefact.name / "manifest.json").write_text(manifest.model_dump_json())
    work = store / f"{made.artefact.name}.work"
    work.mkdir()
    Made(made.endpoint, store)

    assert work.exists()


@pytest.mark.parametrize("which", ["chosen", "baseline"])
def test_a_damaged_artefact_is_made_again(
    which: str, made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    shutil.copytree(made.store, store)
    served = made.manifest.chosen if which == "chosen" else made.manifest.baseline
    path = store / made.artefact.name / served.path
    os.truncate(path, path.stat().st_size - 1)

    # A quick start checks only what it serves; fp32 itself may be chosen, where int8 gains nothing.
    fall_back_only = served.path != made.manifest.chosen.path
    assert prepare(made.endpoint, store=store, models=store).finished is fall_back_only
    again = Made(made.endpoint, store)

    assert not any(event.facts.get("found") for event in again.events)
    assert digests(again.artefact) == again.manifest.files
    assert f"{path} is not the file that was optimised" in caplog.text


def test_an_artefact_that_lacks_a_file_is_not_found(made: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(made.store, store)
    (store / made.artefact.name / made.manifest.chosen.path).unlink()

    assert not prepare(made.endpoint, store=store, models=store).finished


def test_a_damaged_fp32_artefact_is_made_again(model: Path, tmp_path: Path) -> None:
    prepared = prepare(endpoint(model, QUICK), store=tmp_path, models=tmp_path)
    (prepared.artefact / "tokenizer.json").write_text("{}")

    again = prepare(endpoint(model, QUICK), store=tmp_path, models=tmp_path)

    assert again == prepared
    assert digests(again.artefact) == Manifest.load(again.artefact).files


def test_fp32_can_be_served_within_seconds(model: Path, tmp_path: Path) -> None:
    prepared = prepare(endpoint(model, QUICK), store=tmp_path, models=tmp_path)
    manifest = Manifest.load(prepared.artefact)

    assert not prepared.finished
    assert manifest.chosen == manifest.baseline
    assert manifest.chosen.plan.recipe == REFERENCE
    loaded = load_artefact(prepared.artefact, "baseline", read_host())
    loaded.close()
    assert prepare(endpoint(model, QUICK), store=tmp_path, models=tmp_path) == prepared


def test_a_candidate_that_cannot_be_built_is_recorded_and_the_others_continue(made: Made) -> None:
    failed = next(one for one in made.manifest.candidates if one.recipe == BROKEN)

    assert failed.outcome is Outcome.FAILED
    assert "Exists" in failed.reason or "Directory" in failed.reason
    assert made.manifest.chosen.plan.recipe != failed.recipe


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ({"model": "file:///nowhere/at/all"}, ModelNotFound, "not there"),
        ({"serving": {"maxInputTokens": 65}}, SpecError, "64"),
        ({"serving": {"maxInputTokens": 2}}, UnsupportedModel, "no room"),
        ({"task": "fill-mask"}, UnsupportedModel, "no head for fill-mask"),
        ({"optimization": {"mode": "Pinned", "artefact": f"sha256:{'a' * 64}"}}, SpecError, "mode is Pinned"),
        ({"cores": 256}, HostError, "256"),
    ],
)
def test_an_invalid_endpoint_is_an_error_before_anything_is_written(
    model: Path, tmp_path: Path, spec: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        optimise(endpoint(model, **{"optimization": QUICK, **spec}), store=tmp_path, models=tmp_path)

    assert not list(tmp_path.iterdir())


def test_a_model_without_a_tokenizer_is_an_error_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    slow, store = tmp_path / "slow", tmp_path / "store"
    shutil.copytree(model, slow)
    (slow / "tokenizer.json").unlink()

    with pytest.raises(CorruptModel, match=f"{slow} has no tokenizer"):
        prepare(endpoint(slow, QUICK), store=store, models=store)

    assert not store.exists()


def test_an_endpoint_that_refuses_long_texts_is_measured_with_requests_that_fit(model: Path, tmp_path: Path) -> None:
    serving = {"maxInputTokens": 5, "truncate": False}
    found = Made(endpoint(model, QUICK, task="sentence-similarity", serving=serving), tmp_path).manifest

    assert found.candidates[0].outcome in {Outcome.REFERENCE, Outcome.CHOSEN}
    assert found.capacity.points


@pytest.mark.parametrize("task", ["feature-extraction", "sentence-similarity"])
def test_a_model_without_special_tokens_is_optimised_though_some_texts_have_no_token(
    task: str, model: Path, tmp_path: Path
) -> None:
    bare, store = tmp_path / "bare", tmp_path / "store"
    shutil.copytree(model, bare)
    for file, change in (
        ("tokenizer.json", {"post_processor": None}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (bare / file).write_text(json.dumps(json.loads((bare / file).read_bytes()) | change))

    found = Made(endpoint(bare, QUICK, task=task), store).manifest

    assert found.candidates[0].outcome in {Outcome.REFERENCE, Outcome.CHOSEN}
    assert found.capacity.points


def test_a_server_that_cannot_start_is_an_error_with_the_reason(made: Made, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(made.artefact, broken)
    (broken / made.manifest.chosen.path).write_bytes(b"not a graph")
    with (
        pytest.raises(ReplicaBroken, match="is not the file that was optimised"),
        serve_replica(broken, cores=1, cpus=(), log=tmp_path / "log", start_seconds=60),
    ):
        pytest.fail("the server was started")


def test_a_server_without_time_to_start_is_not_started(tmp_path: Path) -> None:
    with (
        pytest.raises(CapacityFailed, match="time budget"),
        serve_replica(tmp_path, cores=1, cpus=(), log=tmp_path / "log", start_seconds=0.5),
    ):
        pytest.fail("the server was started")

    assert not (tmp_path / "log").exists()
