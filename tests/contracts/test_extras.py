"""Each extra installs all that its packages import: every module is imported in a virtual environment with it alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")

PACKAGES: dict[str, tuple[str, ...]] = {
    "": ("penstock", "penstock_gateway", "penstock_report"),
    "runtime": ("penstock", "penstock_runtime"),
    "optimizer": ("penstock", "penstock_runtime", "penstock_optimizer"),
    "operator": ("penstock", "penstock_operator"),
    "simulator": ("penstock", "penstock_simulator", "penstock_planner"),
    "cli,optimizer,simulator,index": ("penstock_cli", "penstock_bench", "penstock_bulk"),
}
"""What must be importable with each extra; the empty one is the base installation."""

IMPORT_ALL = """
import importlib, pkgutil, sys, traceback

packages = sys.argv[1].split(",")
names = list(packages)
for package in packages:
    names += (one.name for one in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."))
for name in names:
    try:
        importlib.import_module(name)
    except Exception:
        print(name, traceback.format_exc(limit=-1), sep=": ")
print(len(names))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The project's wheel without the native engine, made from a copy: a build writes into its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--", "*.py", "*.toml", "README.md", "LICENSE", ":!tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "source" / name)
    # `false` as the C compiler fails at once.
    uv("build", "--wheel", "--out-dir", folder, folder / "source", environment={"CC": "false"})
    (made,) = folder.glob("*.whl")
    yield made
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for one virtual environment after the other. Python finds the bytecode of an earlier one there, by path
    and time: packages that several extras have are compiled once."""
    return tmp_path_factory.mktemp("extras")


@pytest.fixture
def python(place: Path) -> Iterator[Path]:
    """The interpreter of an empty virtual environment, which is removed afterwards: some have 500 MB."""
    uv("venv", "--python", sys.executable, place / "venv")
    yield place / "venv" / "bin" / "python"
    shutil.rmtree(place / "venv")


def uv(*words: str | Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [UV, *words], env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", PACKAGES, ids=lambda extra: extra or "base")
def test_every_module_can_be_imported(extra: str, wheel: Path, place: Path, python: Path, tmp_path: Path) -> None:
    name = f"penstock[{extra}]" if extra else "penstock"
    uv("pip", "install", "--python", python, "--constraint", ROOT / "constraints.txt", f"{name} @ {wheel.as_uri()}")
    packages = ",".join(PACKAGES[extra])

    done = subprocess.run(
        [python, "-I", "-X", f"pycache_prefix={place / 'bytecode'}", "-c", IMPORT_ALL, packages],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stderr == ""
    *failures, count = done.stdout.splitlines()
    assert failures == []
    assert int(count) > len(PACKAGES[extra])
