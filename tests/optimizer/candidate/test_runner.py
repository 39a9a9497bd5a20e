"""Graphs that are made once and reused: exports, and candidates that share a graph. Incomplete ones are not reused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.manifest import CandidateFacts, Outcome
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import TaskName
from penstock_optimizer.candidate.runner import CandidateContext, ProcessRunner
from penstock_optimizer.candidate.work_folder import CandidateRecord, ExportedFacts, WorkFolder, digests
from tests.optimizer.report.sample import IO

STATIC = Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC, options=("per-channel", "smooth"))
FILES = {"model.xml": "<net/>", "model.bin": "weights"}


@pytest.fixture
def runner(tmp_path: Path) -> ProcessRunner:
    context = CandidateContext(model=str(tmp_path), task=TaskName.FEATURE_EXTRACTION, max_tokens=8, cores=1)
    return ProcessRunner(context, WorkFolder(tmp_path / "work"), ())


def make(work: WorkFolder, recipe: Recipe, outcome: Outcome = Outcome.SLOWER) -> None:
    """As a candidate leaves it after it was built and judged."""
    folder = work.candidate(recipe)
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_text(content)
    facts = CandidateFacts(
        recipe=recipe, outcome=outcome, reason="", fused_nodes={"MatMul": 3}, build_seconds=9, size_bytes=13
    )
    work.save(CandidateRecord(facts=facts, graph="model.xml", io=IO, files=digests(folder)))


@pytest.mark.parametrize("outcome", [Outcome.SLOWER, Outcome.REJECTED])
@pytest.mark.parametrize(("first", "second"), [(STATIC, STATIC.with_bf16_rest), (STATIC.with_bf16_rest, STATIC)])
def test_a_graph_that_two_recipes_share_is_copied(
    first: Recipe, second: Recipe, outcome: Outcome, runner: ProcessRunner
) -> None:
    make(runner.work, first, outcome)

    built = runner.copy_of_the_same(second)

    assert built is not None
    assert (built.graph, built.io, built.fused_nodes, built.size_bytes) == ("model.xml", IO, {"MatMul": 3}, 13)
    assert built.seconds < 9
    assert {path.name: path.read_text() for path in runner.work.candidate(second).iterdir()} == FILES


def test_a_changed_graph_is_not_copied(runner: ProcessRunner) -> None:
    make(runner.work, STATIC)
    (runner.work.candidate(STATIC) / "model.bin").write_text("torn")

    assert runner.copy_of_the_same(STATIC.with_bf16_rest) is None


def test_another_graph_is_not_copied(runner: ProcessRunner) -> None:
    make(runner.work, STATIC)

    assert runner.copy_of_the_same(STATIC.model_copy(update={"options": ("per-channel",)})) is None
    assert runner.copy_of_the_same(STATIC) is None


def test_a_candidate_that_failed_before_its_graph_was_written_is_not_copied(runner: ProcessRunner) -> None:
    runner.work.save(CandidateRecord(facts=CandidateFacts(recipe=STATIC, outcome=Outcome.FAILED, reason="it crashed")))

    assert runner.copy_of_the_same(STATIC.with_bf16_rest) is None


# Exports


class Exporter:
    """Replaces the worker: writes a graph with external weights, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(ProcessRunner, "_worker", self._worker)

    @contextmanager
    def _worker(self, _: str) -> Iterator[Exporter]:
        yield self

    def call(self, method: str, *, timeout_seconds: float, out: str, flavour: str) -> dict[str, Any]:
        assert (method, flavour) == ("export", "fused")
        self.count += 1
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.onnx").write_text("graph")
        (folder / "model.onnx.data").write_text("weights")
        graph = str(folder / "model.onnx")
        facts = ExportedFacts(graph=graph, io=IO, fused_nodes={}, how="builder", parameters=7, weights="w", seconds=1.0)
        return facts.model_dump(mode="json")


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Exporter:
    return Exporter(monkeypatch)


def exported(runner: ProcessRunner, work: Path) -> ExportedFacts:
    """In the next run, which reaches the work folder by the path `work`."""
    return ProcessRunner(runner.context, WorkFolder(work), ()).exported("fused", timeout_seconds=60)


def test_an_export_is_found_by_any_path_of_the_store(
    runner: ProcessRunner, exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = exported(runner, Path("store/work"))
    (tmp_path / "store").rename(tmp_path / "moved")
    second = exported(runner, tmp_path / "moved" / "work")

    assert exporter.count == 1
    assert Path(first.graph) == Path("store/work/export/fused/model.onnx")
    assert Path(second.graph) == tmp_path / "moved/work/export/fused/model.onnx"
    assert second.model_copy(update={"graph": first.graph}) == first


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
@pytest.mark.parametrize("damage", ["change", "delete"])
def test_a_changed_export_is_written_again(runner: ProcessRunner, exporter: Exporter, name: str, damage: str) -> None:
    exported(runner, runner.work.path)
    file = runner.work.export("fused") / name
    if damage == "change":
        file.write_text("torn")
    else:
        file.unlink()
    exported(runner, runner.work.path)

    assert exporter.count == 2
    assert file.read_text() == {"model.onnx": "graph", "model.onnx.data": "weights"}[name]
    exported(runner, runner.work.path)
    assert exporter.count == 2


def test_an_export_of_an_earlier_version_is_replaced_completely(runner: ProcessRunner, exporter: Exporter) -> None:
    """Earlier versions had the facts in the folder itself, without digests."""
    folder = runner.work.export("fused")
    folder.mkdir(parents=True)
    facts = ExportedFacts(
        graph=str(folder / "m.onnx"), io=IO, fused_nodes={}, how="torch", parameters=7, weights="w", seconds=1.0
    )
    (folder / "facts.json").write_text(facts.model_dump_json())

    assert exported(runner, runner.work.path).how == "builder"
    assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "model.onnx.data"]
