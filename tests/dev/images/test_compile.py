"""Compiled Python that two builds make alike and that no start makes again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from images.inside.compile import compile_folder

UNCHECKED_HASH = 0b01
"""PEP 552: bit 0, a hash instead of a time; bit 1, compare it (not set)."""


def flags(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[4:8], "little")


def test_every_module_is_compiled_with_a_hash_that_is_never_checked(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/a.py").write_text("A = {1, 2, 3}\n")
    (tmp_path / "package/b.py").write_text("def b(): return frozenset(('x', 'y', 'z'))\n")

    assert compile_folder(tmp_path) == 2

    assert [flags(path) for path in sorted(tmp_path.rglob("*.pyc"))] == [UNCHECKED_HASH, UNCHECKED_HASH]


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    source = "NAMES = frozenset({'alpha', 'beta', 'gamma', 'delta'})\ndef f(x): return x in {'p', 'q', 'r'}\n"
    (tmp_path / "a.py").write_text(source)
    script = Path(sys.modules["images.inside.compile"].__file__ or "")
    contents = []

    for time in (1_000_000_000, 1_500_000_000):
        os.utime(tmp_path / "a.py", (time, time))
        subprocess.run([sys.executable, "-I", script, str(tmp_path)], check=True, capture_output=True)
        contents += [path.read_bytes() for path in tmp_path.rglob("*.pyc")]

    assert len(contents) == 2
    assert contents[0] == contents[1]
