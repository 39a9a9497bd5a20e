"""What tests start from and takes long to make, kept outside the repository by the content of all that decides it.

Never what a test finds: only what it begins with. Another line of the code that makes it, and it is made anew.
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
from pathlib import Path
from typing import TypeVar

from penstock_runtime.host import read_host

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
MAKES_GRAPHS = (
    "penstock/*.py",
    "runtime/penstock_optimizer/export/**/*.py",
    "runtime/penstock_optimizer/quantise/**/*.py",
    "runtime/penstock_runtime/engines/**/*.py",
    "runtime/penstock_runtime/models/**/*.py",
    "runtime/penstock_runtime/rows.py",
    "tests/runtime/minilm.py",
    "constraints.txt",
)
"""From a model's folder and rows of tokens to a graph; the rows themselves count by what they are."""
CACHE = Path("~/.cache/penstock/tests").expanduser()
FACTS = "facts.pickle"
MOST = 4
"""Folders kept for one name, so that switching between branches makes nothing again."""


@cache
def code() -> str:
    """A digest of all of ours that makes graphs, of the libraries' versions, and of the kind of processor."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in MAKES_GRAPHS for path in ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    cpu = read_host().cpu
    digest.update(f"{sys.version}\0{cpu.isa}\0{cpu.model_name}".encode())
    return digest.hexdigest()


def kept(name: str, make: Callable[[Path], T], *about: object, made_by: Callable[[], str] = code) -> tuple[Path, T]:
    """A folder that `make` has filled, and what it returned, which must not name the folder.

    made_by: gives a digest of what it is made by. about: what it depends on besides.
    Several test processes want it at the same time: one makes it.
    """
    key = hashlib.sha256(repr((made_by(), about)).encode()).hexdigest()[:16]
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
