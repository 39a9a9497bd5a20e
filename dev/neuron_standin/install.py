"""Write one generation of the stand-in into a folder: `python -m neuron_standin.install FOLDER [inf1|inf2]`.

Then `PYTHONPATH=FOLDER` and `PATH=FOLDER/bin:...` give a process the packages, their versions and the executables.
Nothing else is installed: torch comes from the environment.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

VERSIONS: Mapping[str, Mapping[str, str]] = {
    "inf2": {"torch-neuronx": "2.9.0.2.15.32035", "neuronx-cc": "2.26.6360.0", "libneuronxla": "2.2.17544.0"},
    "inf1": {"torch-neuron": "1.13.1.2.11.13.0", "neuron-cc": "1.24.0.0"},
}
"""Distributions that `importlib.metadata` finds, by generation."""
MODULES = {"inf2": "torch_neuronx", "inf1": "torch_neuron"}
_EXECUTABLE = """#!{python}
# Part of a stand-in for tests: no Neuron SDK is installed.
import sys
sys.path.insert(0, {folder!r})
from neuron_standin import {module}
sys.exit({module}.{call})
"""
_EXECUTABLES = {
    "inf2": {"neuronx-cc": ("compiler", "main(sys.argv[1:], compiler.NEURONX_CC)")},
    "inf1": {"neuron-cc": ("compiler", "main(sys.argv[1:], compiler.NEURON_CC)")},
}


def install(folder: Path, generation: str = "inf2", versions: Mapping[str, str] | None = None) -> Path:
    """Write the stand-in into `folder` and give it back. `versions` replace entries of `VERSIONS`."""
    source = Path(__file__).parent
    shutil.copytree(source, folder / "neuron_standin", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    module = MODULES[generation]
    shutil.copy(source / f"{module}.py", folder / f"{module}.py")
    names = {**VERSIONS[generation], **(versions or {}), "penstock-neuron-standin": "0"}
    for name, version in names.items():
        information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        information.mkdir(parents=True, exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: stand-in for tests\n"
        (information / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "bin").mkdir(exist_ok=True)
    common = {"neuron-ls": ("commands", "neuron_ls(sys.argv[1:])")}
    for name, (part, call) in {**_EXECUTABLES[generation], **common}.items():
        text = _EXECUTABLE.format(python=sys.executable, folder=str(folder), module=part, call=call)
        (folder / "bin" / name).write_text(text, encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    return folder


if __name__ == "__main__":
    print(install(Path(sys.argv[1]).absolute(), sys.argv[2] if len(sys.argv) > 2 else "inf2"))
