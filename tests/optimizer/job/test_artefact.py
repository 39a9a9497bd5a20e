"""Artefacts are written as a whole or not at all; a built graph is reused only when its files are unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.manifest import CandidateFacts, Manifest, Outcome
from penstock_optimizer.candidate.work_folder import CandidateRecord, WorkFolder, digests, locked
from penstock_optimizer.job.job import graph_path, write_artefact
from penstock_runtime.models.folder import ModelFolder
from tests.optimizer.report.sample import FP32, INT8, IO, sample_manifest


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    """A model's settings, with a link among them as the hub's cache has it."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 512})
    )
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("not a setting")
    return ModelFolder.open(path, weights=False)


@pytest.fixture
def graphs(tmp_path: Path) -> dict[object, Path]:
    made = {}
    for recipe, name in ((FP32, "model.onnx"), (INT8, "model.onnx")):
        graph = tmp_path / "built" / recipe.slug / name
        graph.parent.mkdir(parents=True)
        graph.write_bytes(recipe.name.encode())
        made[recipe] = graph
    (made[FP32].parent / "model.onnx.data").write_bytes(b"weights apart")
    return made  # type: ignore[return-value]


def write(target: Path, folder: ModelFolder, graphs: dict[object, Path]) -> Manifest:
    return write_artefact(target, sample_manifest(), folder=folder, graphs=graphs)  # type: ignore[arg-type]


def test_an_artefact_holds_settings_graphs_manifest_and_report(
    tmp_path: Path, folder: ModelFolder, graphs: dict[object, Path]
) -> None:
    target = tmp_path / "store" / "3f9c"
    manifest = write(target, folder, graphs)

    assert {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} == {
        "config.json",
        "tokenizer.json",
        "manifest.json",
        "report.html",
        graph_path(FP32, Path("model.onnx")),
        graph_path(FP32, Path("model.onnx.data")),
        graph_path(INT8, Path("model.onnx")),
    }
    assert Manifest.load(target) == manifest
    assert manifest.files == digests(target)
    assert manifest.files["tokenizer.json"] == hashlib.sha256(b"{}").hexdigest()
    assert (target / manifest.chosen.path).read_bytes() == INT8.name.encode()
    assert target.stat().st_mode & 0o777 == 0o755


def test_an_older_artefact_is_replaced_as_a_whole(
    tmp_path: Path, folder: ModelFolder, graphs: dict[object, Path]
) -> None:
    target = tmp_path / "store" / "3f9c"
    target.mkdir(parents=True)
    (target / "left-over").write_text("old")
    write(target, folder, graphs)

    assert not (target / "left-over").exists()
    assert [path.name for path in target.parent.iterdir()] == ["3f9c"]


def test_a_failed_write_leaves_no_files_and_keeps_the_old_artefact(
    tmp_path: Path, folder: ModelFolder, graphs: dict[object, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "store" / "3f9c"
    write(target, folder, graphs)
    before = digests(target)

    def fail(_: Manifest) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr("penstock_optimizer.report.view.render_report", fail)
    with pytest.raises(OSError, match="No space"):
        write(target, folder, graphs)

    assert digests(target) == before
    assert [path.name for path in target.parent.iterdir()] == ["3f9c"]


def test_leftovers_of_a_killed_writer_are_deleted_by_the_next_one(
    tmp_path: Path, folder: ModelFolder, graphs: dict[object, Path]
) -> None:
    target = tmp_path / "store" / "3f9c"
    code = (
        "import os, pathlib\n"
        "from penstock_optimizer.job import job as artefact\n"
        "from penstock_optimizer.report import view\n"
        "from penstock_runtime.models.folder import ModelFolder\n"
        f"folder = ModelFolder.open(pathlib.Path({str(folder.path)!r}), weights=False)\n"
        "view.render_report = lambda _: os.kill(os.getpid(), 9)\n"
        "from tests.optimizer.report.sample import sample_manifest\n"
        f"artefact.write_artefact(pathlib.Path({str(target)!r}), sample_manifest(), folder=folder, graphs={{}})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (target.parent / ".3f9c-abcd-old").mkdir()
    others = [target.parent / name for name in ("3f9d", ".3f9c.baseline-abcd", ".3f9d-abcd")]
    for other in others:
        other.mkdir()
    assert len(list(target.parent.iterdir())) == 5

    write(target, folder, graphs)

    assert sorted(target.parent.iterdir()) == sorted([target, *others])


def test_the_files_of_an_artefact_are_copies_and_not_links(
    tmp_path: Path, folder: ModelFolder, graphs: dict[object, Path]
) -> None:
    target = tmp_path / "store" / "3f9c"
    write(target, folder, graphs)
    for graph in graphs.values():
        graph.write_bytes(b"built again in place")

    assert digests(target) == Manifest.load(target).files


# The work folder


@pytest.fixture
def work(tmp_path: Path) -> WorkFolder:
    return WorkFolder(tmp_path / "3f9c.work")


def record(work: WorkFolder) -> CandidateRecord:
    graph = work.candidate(INT8) / "model.onnx"
    graph.parent.mkdir(parents=True)
    graph.write_bytes(b"graph")
    facts = CandidateFacts(recipe=INT8, outcome=Outcome.SLOWER, reason="")
    return CandidateRecord(facts=facts, graph="model.onnx", io=IO, files=digests(graph.parent))


def test_a_candidate_record_is_stored_and_loaded(work: WorkFolder) -> None:
    saved = record(work)
    work.save(saved)

    assert work.load(INT8) == saved
    assert work.load(FP32) is None


@pytest.mark.parametrize("damage", ["change", "delete", "add"])
def test_a_candidate_whose_files_are_not_those_that_were_built_is_built_again(work: WorkFolder, damage: str) -> None:
    work.save(record(work))
    graph = work.candidate(INT8) / "model.onnx"
    match damage:
        case "change":
            graph.write_bytes(b"other")
        case "delete":
            graph.unlink()
        case _:
            (graph.parent / "more").write_bytes(b"")

    assert work.load(INT8) is None


@pytest.mark.parametrize("text", ["", "{", '{"facts": 1}', "[]"])
def test_an_unreadable_record_is_ignored(work: WorkFolder, text: str) -> None:
    work.save(record(work))
    (work.path / "candidates" / f"{INT8.slug}.json").write_text(text)

    assert work.load(INT8) is None


def test_a_failed_candidate_needs_no_files(work: WorkFolder) -> None:
    failed = CandidateRecord(
        facts=CandidateFacts(recipe=INT8, outcome=Outcome.FAILED, reason="killed by signal 11 (SIGSEGV)")
    )
    work.save(failed)

    assert work.load(INT8) == failed


def test_two_optimisations_of_one_key_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "store" / "3f9c.lock"
    script = (
        "import pathlib, sys; from penstock_optimizer.candidate.work_folder import locked\n"
        f"with locked(pathlib.Path({str(path)!r}), waiting=lambda: None):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    waits, entered = threading.Event(), threading.Event()

    def second() -> None:
        with locked(path, waiting=waits.set):
            entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert waits.wait(10)
    assert not entered.is_set()
    os.kill(other.pid, 9)
    thread.join(10)
    other.wait()
    for pipe in (other.stdout, other.stdin):
        assert pipe is not None
        pipe.close()

    assert entered.is_set()
