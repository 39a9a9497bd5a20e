"""No folder of the product is a long flat list, and the folders of a package import each other in one direction."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.contracts.tracked import PRODUCT, ROOT, sources

MOST_FILES = 14
CIRCLES: dict[str, set[str]] = {}
"""Packages with folders that still import each other in a circle, and these folders."""

ROOTS = [ROOT, *(ROOT / name for name in PRODUCT if name != "penstock")]
"""Where dotted names begin."""


def test_no_folder_has_many_files() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in sources())

    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_folders_of_a_package_do_not_import_each_other_in_a_circle() -> None:
    """Imports in functions count, too. Modules directly in a package are no folder of it."""
    edges: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in sources():
        importer = _name(path)
        for imported in _imports(path, importer):
            package, below, above = _apart(importer, imported)
            if package and below and above:
                edges[package][below].add(above)

    assert edges.keys() >= {"penstock_runtime", "penstock_operator", "penstock_optimizer"}
    found = {package: circle for package, graph in edges.items() if (circle := _in_circles(graph))}
    assert {package: sorted(circle) for package, circle in found.items() if circle - CIRCLES.get(package, set())} == {}


def _name(path: Path) -> str:
    """The dotted name of a module; that of a package ends with `.__init__`."""
    root = next(root for root in reversed(ROOTS) if path.is_relative_to(root))
    return ".".join(path.relative_to(root).with_suffix("").parts)


def _imports(path: Path, name: str) -> set[str]:
    """Dotted names of ours that a file imports; for `from a import b` both `a` and, if it is a module, `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            found |= {node.module or "", *(f"{node.module}.{one.name}" for one in node.names)}
    return {one for one in found if one.startswith("penstock") and _is_ours(one)}


def _is_ours(name: str) -> bool:
    paths = [root.joinpath(*name.split(".")) for root in ROOTS]
    return any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)


def _apart(importer: str, imported: str) -> tuple[str, str, str]:
    """The package that has both modules, and its folders with the one and the other; empty: directly in it."""
    ours, theirs = importer.split("."), imported.split(".")
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
        shared += 1
    folders = [
        words[shared] if shared < len(words) and _is_folder(words[: shared + 1]) else "" for words in (ours, theirs)
    ]
    return ".".join(ours[:shared]), folders[0], folders[1]


def _is_folder(words: list[str]) -> bool:
    return any(root.joinpath(*words).is_dir() for root in ROOTS)


def _in_circles(graph: Mapping[str, Iterable[str]]) -> set[str]:
    """The nodes from which a path leads back to them."""
    return {node for node in graph if node in _reached(graph, node)}


def _reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    found: set[str] = set()
    pending = [*graph.get(start, ())]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += graph.get(node, ())
    return found


def test_circles_are_found() -> None:
    assert _in_circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == {"b", "c"}
