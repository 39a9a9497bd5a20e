"""One name for one thing: no two public classes, and no two modules of a package, share a name for different things."""

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "penstock",
    "cli/penstock_cli",
    "operator/penstock_operator",
    "runtime/penstock_runtime",
    "optimizer/penstock_optimizer",
    "gateway/penstock_gateway",
    "bench/penstock_bench",
    "simulator/penstock_simulator",
    "planner/penstock_planner",
)
MOST_LOOSE_MODULES = 12
"""In the root of a package, `__init__.py` and `__main__.py` not counted."""

SAME_KIND = {
    "Row": "a row of a batch of texts, and a row of a step of text generation",
    "Request": "each task module has its checked request",
    "LogSettings": "the same settings group, of the two processes that have one",
    "Settings": "all settings of a process; the operator and the runtime have one each",
    "MeasurementFailed": "bench and optimizer raise the same kind of error",
    "WatchExpired": "the API server ended a watch (410 Gone); the gateway imports the standard library only",
    "WindowRow": "the same kind of row, of the two tasks that split long texts into windows",
}
"""Class names that are used twice on purpose, each with the reason."""
PENDING_CLASSES: set[str] = set()
"""Class names that still need different names."""

SAME_KIND_OF_MODULE = {
    "answers.py": "the answers of an HTTP API, of which each has a folder",
    "base.py": "the base classes of the modules in the same folder",
    "decoder.py": "that kind of model, in the folder of each stage",
    "encoder.py": "that kind of model, in the folder of each stage",
    "engine.py": "the native engine, and the interface of engines of text generation",
    "requests.py": "the bodies of an HTTP API, of which each has a folder",
    "routes.py": "the handlers of an HTTP API, of which each has a folder",
    "settings.py": "the settings of that part",
    "variables.py": "the environment variables of that process",
}
"""Module names that are used twice in one package on purpose, each with the reason."""
PENDING_MODULES: set[str] = set()
"""Module names that still need different names."""
PENDING_ROOTS: set[str] = set()
"""Packages that still have too many modules in their root."""


def modules(package: str) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--", f"{package}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [path for name in names if (path := ROOT / name).is_file()]


def repeated(found: dict[str, list[str]], *excepted: set[str]) -> dict[str, list[str]]:
    known = set[str]().union(*excepted)
    return {name: places for name, places in sorted(found.items()) if len(places) > 1 and name not in known}


def test_no_two_public_classes_share_a_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in modules(package):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found

    assert repeated(found, set(SAME_KIND), PENDING_CLASSES) == {}


def test_no_two_modules_of_a_package_share_a_name() -> None:
    for package in PACKAGES:
        found: dict[str, list[str]] = defaultdict(list)
        for path in modules(package):
            if path.name not in {"__init__.py", "__main__.py"}:
                found[path.name].append(str(path.relative_to(ROOT)))
        assert found, package

        assert repeated(found, set(SAME_KIND_OF_MODULE), PENDING_MODULES) == {}


def test_a_package_root_has_few_loose_modules() -> None:
    loose = {
        package: count
        for package in PACKAGES
        if package not in PENDING_ROOTS
        and (
            count := sum(
                path.parent == ROOT / package and path.name not in {"__init__.py", "__main__.py"}
                for path in modules(package)
            )
        )
        > MOST_LOOSE_MODULES
    }

    assert loose == {}
