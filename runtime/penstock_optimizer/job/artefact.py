"""Writes artefact folders: all of it or nothing."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.manifest import MANIFEST_NAME, Manifest
from penstock.recipe import Recipe
from penstock_optimizer.report import render_report
from penstock_runtime.models.folder import ModelFolder

REPORT_NAME = "report.html"
MODEL_FOLDER = "model"


def graph_path(recipe: Recipe, graph: Path) -> str:
    """Where a recipe's graph lies in the artefact, such as `model/onnxruntime-fp32/model.onnx`."""
    return f"{MODEL_FOLDER}/{recipe.slug}/{graph.name}"


def sha256(path: Path) -> str:
    """Of a file's contents, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by relative path; the manifest and the report are not among them."""
    return {
        name: sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := path.relative_to(folder).as_posix()) not in {MANIFEST_NAME, REPORT_NAME}
    }


def write_artefact(
    target: Path,
    *,
    folder: ModelFolder,
    graphs: Mapping[Recipe, Path],
    describe: Callable[[dict[str, str]], Manifest],
) -> Manifest:
    """Write the artefact folder `target`; what stands there is replaced as a whole, and only by a complete one.

    One process at a time, by a lock of the caller's: drafts that others left are deleted.
    `graphs`: the graphs to serve; whatever lies beside one in its folder (weights apart from the graph) goes along.
    `describe`: makes the manifest from the digests of the files.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(target)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        # mkdtemp's folder is for its owner only; whoever serves may be somebody else.
        draft.chmod(0o755)
        for path in folder.settings:
            _copy(path, draft / path.relative_to(folder.path))
        for recipe, graph in graphs.items():
            for path in sorted(graph.parent.iterdir()):
                if path.is_file():
                    _copy(path, draft / MODEL_FOLDER / recipe.slug / path.name)
        manifest = describe(digests(draft))
        (draft / REPORT_NAME).write_text(render_report(manifest), encoding="utf-8")
        (draft / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        _replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return manifest


def remove_drafts(target: Path) -> None:
    """Delete what writers of `target` left that were killed; each is as large as the artefact. With nobody writing."""
    for path in _drafts(target):
        shutil.rmtree(path, ignore_errors=True)


def has_drafts(target: Path) -> bool:
    """True while somebody writes `target`, and after a writer was killed."""
    return bool(_drafts(target))


def _drafts(target: Path) -> list[Path]:
    """Of `target`, and what it replaced."""
    return [path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}-")]


def _copy(source: Path, target: Path) -> None:
    """Copy contents, not links or modes: an artefact stands alone. Not a hard link either: whoever writes the source
    again in place would change the artefact."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _replace(draft: Path, target: Path) -> None:
    """Put the draft in place. A server that has the old one open keeps its files until it lets go of them."""
    if not target.exists():
        draft.replace(target)
        return
    old = draft.with_name(f"{draft.name}-old")
    target.replace(old)
    draft.replace(target)
    shutil.rmtree(old, ignore_errors=True)
