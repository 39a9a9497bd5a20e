"""Heavy libraries are imported where they are needed only, and our folders shadow no module of Python's library."""

import operator
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.contracts.tracked import ROOT, sources

HEAVY = {
    "onnxruntime": {
        "runtime/penstock_runtime/engines/onnxruntime.py",
        "optimizer/penstock_optimizer/quantise/",
        "optimizer/penstock_optimizer/export/",
    },
    "openvino": {
        "runtime/penstock_runtime/engines/openvino",
        "optimizer/penstock_optimizer/quantise/",
    },
    # The Neuron SDK is an extension of torch, in a process of its own.
    "torch": {
        "optimizer/penstock_optimizer/export/",
        "optimizer/penstock_optimizer/neuron/child.py",
    },
}
"""Where each heavy library may be imported: one place each (a quantiser is tied to its engine's library)."""


def test_standard_library_operator_is_not_shadowed() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert operator.itemgetter(1)("ab") == "b"


def test_wheel_has_only_our_packages() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]

    assert all(Path(package).name.startswith("penstock") for package in wheel["packages"])


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_library_is_imported_in_its_place_only(library: str) -> None:
    imported = re.compile(rf"^\s*(import|from) {library}\b", re.MULTILINE)
    importers = {str(path.relative_to(ROOT)) for path in sources() if imported.search(path.read_text(encoding="utf-8"))}

    assert {name for name in importers if not name.startswith(tuple(HEAVY[library]))} == set()


def test_contributing_names_the_packages_that_import_a_part_of_the_operator() -> None:
    imported = re.compile(r"^\s*(?:from|import) (penstock_operator[\w.]*)", re.MULTILINE)
    uses = [
        (path.relative_to(ROOT).parts[1], name)
        for path in sources()
        if "penstock_operator" not in path.parts
        for name in imported.findall(path.read_text(encoding="utf-8"))
    ]

    assert {name for _, name in uses} == {"penstock_operator.decide"}
    *first, last = (f"`{package}`" for package in sorted({package for package, _ in uses}))
    sentence = f"Of the operator, {', '.join(first)} and {last} import `penstock_operator.decide`"
    assert sentence in " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())


def test_contract_package_imports_only_light_libraries() -> None:
    heavy = "numpy onnx onnxruntime openvino torch transformers tokenizers uvicorn matplotlib"
    code = (
        "import sys, pkgutil, importlib, penstock\n"
        "for m in pkgutil.walk_packages(penstock.__path__, 'penstock.'):\n"
        "    # The command line drives everything, and so may load anything.\n"
        "    if not m.name.startswith('penstock_cli'):\n"
        "        importlib.import_module(m.name)\n"
        f"print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"
