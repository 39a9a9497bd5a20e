"""An endpoint of text generation from the GGUF file to the artefact that a server opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ArtefactError, HostError, OutOfMemory
from penstock.manifest import CandidateFacts, Manifest, Outcome
from penstock.recipe import EngineName, Precision, Recipe
from penstock.resources.endpoint import ModelEndpoint, Objective
from penstock.resources.result import Result
from penstock_optimizer.candidate import decoder as candidate
from penstock_optimizer.candidate.isolation import Worker
from penstock_optimizer.capacity import tokens
from penstock_optimizer.guard.agreement_of_logits import GenerationBudget
from penstock_optimizer.load.streams import StreamResult, StreamSpec, run_streams
from penstock_optimizer.optimise import optimise, prepare
from penstock_optimizer.search import decoder_plans as plans
from penstock_optimizer.targets import decoder, screening
from penstock_runtime.engines.base import StepEngine
from penstock_runtime.engines.native.library import library_path
from penstock_runtime.host import read_host
from penstock_runtime.rows import Float, StepRow
from penstock_runtime.serving.generation_model import load_generation_artefact, open_generation_engine
from tests.runtime.models.gguf_files import write_gguf

pytestmark = pytest.mark.slow

SOME = {"precisions": ["int8-rowwise", "int4-weights", "bf16"]}
"""Candidates of both engines, and of one graph; each has a process, which takes a second to start."""
BUDGET_SECONDS = 3600.0
"""Not reached: the run ends when all candidates have had a turn."""


def endpoint(model: Path, **spec: Any) -> ModelEndpoint:
    return ModelEndpoint.model_validate(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": "chat"},
            "spec": {"model": f"file://{model}", "task": "text-generation", "cores": 1, **spec},
        }
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The fp32 artefact as it was when it was prepared, the finished artefact, and the store."""
    root = tmp_path_factory.mktemp("generation")
    write_gguf(root / "model.gguf")
    chat = endpoint(root / "model.gguf", optimization=SOME)
    prepared = prepare(chat, store=root / "store", models=root / "models")
    assert not prepared.finished
    # The finished artefact replaces it.
    prepared.artefact.rename(root / "baseline")
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        finished = optimise(chat, store=root / "store", models=root / "models", budget_seconds=BUDGET_SECONDS)
    return root / "baseline", finished, root


def shorten(patch: pytest.MonkeyPatch, worker: str = "") -> None:
    """A short search, with a class of `generation_workers` in the processes of candidates."""
    # Eight prompts show as much of a random model as 64.
    patch.setattr(decoder, "PROMPTS", 8)
    patch.setattr(decoder, "LEAST_PROMPTS", 8)
    patch.setattr(decoder, "CONTINUATION", 4)
    patch.setattr(tokens, "LEAST_SECONDS", 0.1)
    patch.setattr(tokens, "MOST_CLIENTS", 4)
    if worker:
        patch.setattr(candidate, "TARGET", f"tests.optimizer.targets.decoder_workers:{worker}")


def first_logits(engine: StepEngine) -> Float:
    try:
        logits: Float = engine.step([StepRow(np.array([5, 6, 7], np.int32), 0, np.array([0], np.int32), 1)])[0]
        return logits
    finally:
        engine.close()


@pytest.mark.skipif(not library_path().is_file(), reason="the native engine was not compiled")
def test_a_native_plan_is_searched_and_served_with_answers_that_do_not_depend_on_company(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = endpoint(folders[2] / "model.gguf", optimization={"engines": ["native"]})
    # Rounding changes the logits of random weights much.
    wide = GenerationBudget(mean_divergence=1e3, p99_divergence=1e3, same_best=0.0, perplexity=1e9)
    monkeypatch.setattr(decoder, "GenerationBudget", lambda: wide)
    shorten(monkeypatch)

    def fastest(measured: Sequence[CandidateFacts], objective: Objective) -> CandidateFacts:
        """The native plan, although times of so small a model mean nothing."""
        del objective
        return next(one for one in measured if one.recipe.engine is EngineName.NATIVE)

    monkeypatch.setattr(plans, "best", fastest)
    finished = optimise(chat, store=tmp_path / "store", models=folders[2] / "models", budget_seconds=BUDGET_SECONDS)

    manifest = Manifest.load(finished)
    assert manifest.chosen.plan.recipe.engine is EngineName.NATIVE
    assert manifest.chosen.path.endswith(".native")
    model = load_generation_artefact(finished, "chosen", read_host())
    try:
        assert model.facts["batch_invariant"] is True
        assert np.isfinite(first_logits(model.engine)).all()
    finally:
        model.engine.close()


def test_an_interrupted_search_goes_on_and_leaves_out_what_ends_the_process(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = endpoint(
        folders[2] / "model.gguf",
        optimization={"engines": ["openvino"], "precisions": ["int8-rowwise", "int8-weights"]},
    )
    shorten(monkeypatch)
    tried: list[Recipe] = []
    original = decoder.DecoderTarget._try

    def ends_with_the_second(run: Any, recipe: Recipe) -> CandidateFacts:
        tried.append(recipe)
        if recipe == (tried[1] if len(tried) > 1 else None):
            raise KeyboardInterrupt  # as the end of the process, which no handler of candidates catches
        return original(run, recipe)

    monkeypatch.setattr(decoder.DecoderTarget, "_try", ends_with_the_second)

    def search() -> Path:
        return optimise(chat, store=tmp_path / "store", models=folders[2] / "models", budget_seconds=BUDGET_SECONDS)

    for _ in range(decoder.MOST_TRIES):
        with pytest.raises(KeyboardInterrupt):
            search()
    assert tried == [tried[0], tried[1], tried[1]]
    manifest = Manifest.load(search())
    assert tried.count(tried[0]) == 1
    assert tried.count(tried[1]) == decoder.MOST_TRIES
    (left_out,) = [one for one in manifest.candidates if one.recipe == tried[1]]
    assert (left_out.outcome, left_out.reason[:29]) == (Outcome.FAILED, "the search ended 2 times whil")


def test_a_candidate_whose_process_is_killed_fails_alone(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed as by the kernel when memory runs out, one crashes while it writes its graph, and one hangs."""
    precisions = ["int4-weights", "int8-rowwise", "int4-rowwise", "int8-weights"]
    chat = endpoint(
        folders[2] / "model.gguf",
        optimization={"engines": ["openvino"], "precisions": precisions, "accuracy": {"minAgreement": 0.01}},
    )
    shorten(monkeypatch, "FailingCandidate")
    monkeypatch.setattr(screening, "HANGS_SECONDS", 1.0)
    original = Worker.call

    def with_limit(process: Worker, method: str, *, timeout_seconds: float, **arguments: Any) -> Any:
        hangs = method == "judge" and "int4-rowwise" in str(process._log)
        return original(process, method, timeout_seconds=1.0 if hangs else timeout_seconds, **arguments)

    monkeypatch.setattr(Worker, "call", with_limit)
    finished = optimise(chat, store=tmp_path / "store", models=folders[2] / "models", budget_seconds=BUDGET_SECONDS)

    manifest = Manifest.load(finished)
    failed = [one for one in manifest.candidates if one.outcome is Outcome.FAILED]
    assert {one.recipe.precision: one.reason for one in failed} == {
        Precision.INT4_WEIGHTS: "killed by signal 9 (SIGKILL, out of memory in all likelihood)",
        Precision.INT8_ROWWISE: "killed by signal 11 (SIGSEGV)",
        Precision.INT4_ROWWISE: "judge did not end within 1 s",
    }
    # The others run, although one has the graph that was cut short.
    others = [one for one in manifest.candidates if one not in failed and one.outcome is not Outcome.SKIPPED]
    assert Precision.INT8_ROWWISE in {one.recipe.precision for one in others}
    assert all(one.verdict is not None for one in others if one.recipe != plans.FP32)
    report = (finished / "report.html").read_text(encoding="utf-8")
    assert "killed by signal 11 (SIGSEGV)" in report
    assert np.isfinite(first_logits(open_generation_engine(finished))).all()


def test_the_search_ends_when_the_capacity_cannot_be_measured(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = endpoint(folders[2] / "model.gguf", optimization={"mode": "Disabled"})
    shorten(monkeypatch)

    def refused(spec: StreamSpec) -> StreamResult:
        return run_streams(spec) if spec.clients == 1 else StreamResult(seconds=0.0, failed=2, first_failure="429 busy")

    monkeypatch.setattr(tokens, "run_streams", refused)
    finished = optimise(chat, store=tmp_path / "store", models=folders[2] / "models", budget_seconds=BUDGET_SECONDS)
    manifest = Manifest.load(finished)
    assert [point.clients for point in manifest.token_capacity.points] == [1]
    assert "The capacity with 2 clients was not measured: no answer to 2 of 2 clients: 429 busy." in manifest.findings


def test_an_fp32_model_that_does_not_run_is_an_error_with_the_reason(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = endpoint(folders[2] / "model.gguf", optimization={"mode": "Disabled"})
    shorten(monkeypatch, "NoReferenceCandidate")
    with pytest.raises(OutOfMemory, match=r"the fp32 model does not run: killed by signal 9") as raised:
        optimise(chat, store=tmp_path / "store", models=folders[2] / "models", budget_seconds=BUDGET_SECONDS)
    assert "memory" in raised.value.remedy


def test_the_fp32_artefact_can_be_served_before_the_search(folders: tuple[Path, Path, Path]) -> None:
    manifest = Manifest.load(folders[0])
    assert manifest.chosen == manifest.baseline
    assert manifest.decoder is not None
    assert np.isfinite(first_logits(open_generation_engine(folders[0]))).all()


def test_the_search_judges_and_times_every_candidate(folders: tuple[Path, Path, Path]) -> None:
    manifest = Manifest.load(folders[1])
    tried = [one for one in manifest.candidates if one.outcome not in {Outcome.SKIPPED, Outcome.REFERENCE}]
    assert tried
    assert not [one.reason for one in tried if one.outcome is Outcome.FAILED]
    for one in tried:
        assert one.verdict is not None or one.recipe == manifest.baseline.plan.recipe
        assert (one.generation is None) == (one.outcome is Outcome.REJECTED)
    assert not manifest.cut_short
    assert sum(one.outcome is Outcome.CHOSEN for one in manifest.candidates) == 1
    assert "tokens/s with 8 clients" in (folders[1] / "report.html").read_text(encoding="utf-8")


def test_the_capacity_of_a_replica_is_measured_in_tokens(folders: tuple[Path, Path, Path]) -> None:
    manifest = Manifest.load(folders[1])
    curve = manifest.token_capacity
    assert curve.points[0].clients == 1
    assert curve.within is not None
    assert curve.summary
    result = Result.of(manifest)
    assert result.token_capacity is not None
    assert len(result.token_capacity.points) == len(curve.points)
    assert "output tokens/s" in (folders[1] / "report.html").read_text(encoding="utf-8")
    assert not [finding for finding in manifest.findings if "capacity" in finding]


def test_the_artefact_holds_tokenizer_template_and_defaults(folders: tuple[Path, Path, Path]) -> None:
    files = Manifest.load(folders[1]).files
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"} <= files.keys()


def test_the_baseline_of_the_finished_artefact_gives_the_same_logits(folders: tuple[Path, Path, Path]) -> None:
    before = first_logits(open_generation_engine(folders[0]))
    after = first_logits(open_generation_engine(folders[1], which="baseline"))
    np.testing.assert_array_equal(before, after)


def test_a_second_run_finds_the_artefact(folders: tuple[Path, Path, Path]) -> None:
    _, finished, root = folders
    again = prepare(endpoint(root / "model.gguf", optimization=SOME), store=root / "store", models=root / "models")
    assert (again.finished, again.artefact) == (True, finished)


def test_the_pool_takes_what_the_memory_leaves(folders: tuple[Path, Path, Path]) -> None:
    small = open_generation_engine(folders[0], memory=300 * 2**20)
    large = open_generation_engine(folders[0], memory=600 * 2**20)
    assert 1 <= small.blocks < large.blocks
    bounded = open_generation_engine(folders[0], memory=600 * 2**20, cache_bytes=2**20)
    assert 1 <= bounded.blocks < small.blocks
    for engine in (small, large, bounded):
        engine.close()
    with pytest.raises(HostError, match="10 bytes do not suffice for a block of the cache"):
        open_generation_engine(folders[0], memory=600 * 2**20, cache_bytes=10)


def test_too_little_memory_is_an_error_that_states_what_is_needed(folders: tuple[Path, Path, Path]) -> None:
    with pytest.raises(HostError, match="which need 257 MiB at least"):
        open_generation_engine(folders[0], memory=2**20)


def test_a_changed_graph_is_refused(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folders[0], tmp_path / "copy")
    graph = tmp_path / "copy" / Manifest.load(folders[0]).chosen.path
    graph.with_suffix(".bin").write_bytes(b"other weights")
    with pytest.raises(ArtefactError, match=r"is not the file that was optimised"):
        open_generation_engine(tmp_path / "copy")
