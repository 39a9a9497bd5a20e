"""Prints requirements with hashes for downloaded wheels: `pinned.py FOLDER FILE MACHINE` with the hashes of `make
lock`, for the processor MACHINE.

So pip, with --require-hashes, installs only files that were known when the versions were chosen, whatever an index or a
mirror gives out today. Standard library only: this runs in the build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def read_hashes(text: str) -> dict[tuple[str, str], list[str]]:
    """Hashes by canonical name and version, of a file that `uv pip compile --generate-hashes` wrote."""
    found: dict[tuple[str, str], list[str]] = {}
    present: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line):
            present = found.setdefault((canonical(match[1]), match[2]), [])
        present += re.findall(r"--hash=(sha256:[0-9a-f]{64})", line)
    return found


def canonical(name: str) -> str:
    """The name as PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_for(wheel: str, machine: str) -> bool:
    """Whether the wheel is for this processor (`x86_64`), or for all."""
    platforms = wheel.removesuffix(".whl").split("-")[-1].split(".")
    return platforms == ["any"] or all(platform.endswith(f"_{machine}") for platform in platforms)


def pinned(wheels: Iterable[str], hashes: Mapping[tuple[str, str], list[str]], machine: str) -> list[str]:
    """A requirement with hashes for each wheel, sorted. SystemExit names a wheel without any, or for
    another processor."""
    lines = []
    for wheel in sorted(wheels):
        name, version = wheel.split("-")[:2]
        if not is_for(wheel, machine):
            raise SystemExit(f"{wheel} is not for {machine}")
        known = hashes.get((canonical(name), version))
        if not known:
            raise SystemExit(f"{wheel} is not in hashes.txt: run make lock")
        lines.append(" ".join([f"{canonical(name)}=={version}", *(f"--hash={one}" for one in known)]))
    return lines


if __name__ == "__main__":
    found = [path.name for path in Path(sys.argv[1]).iterdir()]
    print("\n".join(pinned(found, read_hashes(Path(sys.argv[2]).read_text(encoding="utf-8")), sys.argv[3])))
