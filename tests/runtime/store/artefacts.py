"""Small artefact folders: a real manifest, files that are never loaded."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.manifest import MANIFEST_NAME
from penstock_runtime.store import ArtefactStore
from tests.optimizer.report.sample import sample_manifest

FILES = {
    "model/onnxruntime-fp32/model.onnx": 300_000,
    "model/onnxruntime-fp32/empty.data": 0,
    "tokenizer.json": 20_000,
    "config.json": 40,
}


def content(name: str, size: int) -> bytes:
    """Random bytes."""
    block = hashlib.sha256(name.encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def write_artefact(folder: Path, *, key: str = "a") -> Path:
    """Write one; another key makes another digest."""
    files = {}
    for name, size in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(name, size))
        files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = sample_manifest().model_copy(update={"files": files, "key": key * 64})
    (folder / "report.html").write_text("<title>evidence</title>")
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1))
    return folder


def names(folder: Path) -> set[str]:
    """Of all files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def publish_at_once(publishers: int, store: Callable[[], ArtefactStore], artefact: Path) -> list[BaseException]:
    """Publish an artefact by several threads together, each with a store of its own; what any of them raised."""
    together = threading.Barrier(publishers)

    def publish() -> None:
        own = store()
        together.wait()
        own.publish(artefact)

    with ThreadPoolExecutor(publishers) as pool:
        under_way = [pool.submit(publish) for _ in range(publishers)]
    return [error for one in under_way if (error := one.exception()) is not None]
