"""What tests start from and takes long to make, kept outside the repository by the content of all that decides it.

Never what a test finds: only what it begins with. After a change of the code that makes it, it is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from penstock_runtime.host import read_host

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
LIBRARIES = ("ml_dtypes", "numpy", "onnx", "onnxruntime", "openvino")
"""They make graphs, and run them to calibrate."""
CACHE = Path("~/.cache/penstock/tests").expanduser()
FACTS = "facts.pickle"
MOST = 4
"""Folders kept for one name, so that switching between branches makes nothing again."""


@cache
def code(*patterns: str) -> str:
    """A digest of files of ours, of the versions of Python and the libraries, and of the kind of processor."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    cpu = read_host().cpu
    versions = [metadata.version(name) for name in LIBRARIES]
    digest.update(f"{sys.version}\0{versions}\0{cpu.isa}\0{cpu.model_name}".encode())
    return digest.hexdigest()


def kept(name: str, make: Callable[[Path], T], *about: object) -> tuple[Path, T]:
    """A folder that `make` has filled, and what it returned, which must not name the folder.

    about: all that it depends on, such as `code` and a digest of what it is made from. Several test processes want it
    at the same time: one makes it.
    """
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    folder = CACHE / f"{name}-{key}"
    with _alone(name):
        if not (folder / FACTS).is_file():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".{name}-") as temporary:
                place = Path(temporary, "made")
                place.mkdir()
                facts = make(place)
                (place / FACTS).write_bytes(pickle.dumps(facts))
                place.rename(folder)
        folder.touch()
        others = sorted(CACHE.glob(f"{name}-{'[0-9a-f]' * 16}"), key=lambda path: -path.stat().st_mtime)
        for old in others[MOST:]:
            shutil.rmtree(old, ignore_errors=True)
    found: T = pickle.loads((folder / FACTS).read_bytes())
    return folder, found


@contextmanager
def _alone(name: str) -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
