"""Writes the artefact folder of an optimisation: as a whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from penstock.manifest import MANIFEST_NAME, Manifest
from penstock.recipe import Recipe
from penstock_optimizer.candidate.work_folder import REPORT_NAME, digests
from penstock_optimizer.report.view import render_report
from penstock_runtime.models.files import copy_within
from penstock_runtime.models.folder import TOKENIZER, ModelFolder
from penstock_runtime.tokens.convert import convert

MODEL_FOLDER = "model"


def graph_path(recipe: Recipe, graph: Path) -> str:
    """Path of a recipe's graph in the artefact, such as `model/onnxruntime-fp32/model.onnx`."""
    return f"{MODEL_FOLDER}/{recipe.slug}/{graph.name}"


def write_artefact(
    target: Path,
    manifest: Manifest,
    *,
    folder: ModelFolder,
    graphs: Mapping[Recipe, Path],
    more: Mapping[str, Path] = MappingProxyType({}),
) -> Manifest:
    """Write the artefact folder `target` atomically: an older one is replaced only by a complete one.

    The caller holds a lock, so that one process writes at a time; drafts of killed writers are deleted. `manifest`:
    without its files; their digests are added. `graphs`: the graphs to serve; other files in a graph's folder (external
    weights) are copied too. `more`: further files by name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(target)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        # mkdtemp makes a folder for its owner only; the server may run as another user.
        draft.chmod(0o755)
        for path in folder.settings:
            copy_within(folder.path, path, draft / path.relative_to(folder.path))
        if folder.tokenizer.name != TOKENIZER:
            (draft / TOKENIZER).write_bytes(convert(folder.path, folder.config))
        for name, path in more.items():
            _copy(path, draft / name)
        for name, contents in folder.artefact_files.items():
            (draft / name).write_bytes(contents)
        for recipe, graph in graphs.items():
            for path in sorted(graph.parent.iterdir()):
                if path.is_file():
                    _copy(path, draft / MODEL_FOLDER / recipe.slug / path.name)
        manifest = manifest.model_copy(update={"files": digests(draft)})
        (draft / REPORT_NAME).write_text(render_report(manifest), encoding="utf-8")
        (draft / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        _replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return manifest


def remove_drafts(target: Path) -> None:
    """Delete the drafts of killed writers of `target`; each is as large as the artefact. The caller holds the lock."""
    for path in _drafts(target):
        shutil.rmtree(path, ignore_errors=True)


def has_drafts(target: Path) -> bool:
    """True while a process writes `target`, and after a writer was killed."""
    return bool(_drafts(target))


def _drafts(target: Path) -> list[Path]:
    """Drafts of `target`, and the artefact that one replaced."""
    return [path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}-")]


def _copy(source: Path, target: Path) -> None:
    """Copy contents, not links or modes: an artefact must not depend on its sources. No hard link either: a source
    overwritten later would change the artefact."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _replace(draft: Path, target: Path) -> None:
    """Rename the draft to the target. A server with open files of the old one keeps them until it closes them."""
    if not target.exists():
        draft.replace(target)
        return
    old = draft.with_name(f"{draft.name}-old")
    target.replace(old)
    draft.replace(target)
    shutil.rmtree(old, ignore_errors=True)
