"""Prints the requirements of extras of pyproject.toml, one a line: `requirements.py EXTRA... [--without NAME...]`.

The dependencies are a separate layer, which changes only when they do. So they are installed
before the project is there, which pip has no command for. Standard library only: this runs in the build.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def canonical(name: str) -> str:
    """The name as PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution(requirement: str) -> str:
    """The canonical name at the beginning of a requirement: `tritonclient[http]>=2.50` -> `tritonclient`."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    if match is None:
        raise SystemExit(
            f"{requirement!r} in pyproject.toml begins with no package's name: write NAME or NAME>=VERSION"
        )
    return canonical(match.group())


def requirements(project: Mapping[str, Any], extras: Iterable[str], without: Iterable[str] = ()) -> list[str]:
    """The project's own requirements and the extras' requirements, each once, sorted.

    project: the `[project]` table. Extras that name the project itself (`penstock[runtime]`) are followed.
    without: names of packages that come from elsewhere, such as Debian's torch.
    """
    name = canonical(str(project["name"]))
    optional = project.get("optional-dependencies", {})
    left_out = {canonical(word) for word in without}
    found: set[str] = set(project.get("dependencies", []))
    waiting, seen = list(extras), set[str]()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in optional:
            raise SystemExit(f"pyproject.toml has no extra {extra!r}; it has {', '.join(sorted(optional))}")
        for requirement in optional[extra]:
            if distribution(requirement) == name:
                inner = re.search(r"\[([^\]]*)\]", requirement)
                waiting += [word.strip() for word in inner.group(1).split(",")] if inner else []
            else:
                found.add(requirement)
    return sorted(requirement for requirement in found if distribution(requirement) not in left_out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the requirements of the extras that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--pyproject", type=Path, default=Path("pyproject.toml"))
    options = parser.parse_args(arguments)
    project = tomllib.loads(options.pyproject.read_text())["project"]
    print("\n".join(requirements(project, options.extras, options.without)))


if __name__ == "__main__":
    main()
