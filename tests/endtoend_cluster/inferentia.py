"""What pods of Inferentia need on the cluster of this machine: devices, and an interpreter with torch and the stand-in
for the Neuron SDK.

The images have neither, and torch has gigabytes: a folder of hard links to the files of this interpreter is mounted.
Compile jobs get it as the folder of their `file://` source, serving pods from the device plugin, both at one path.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from neuron_standin.install import install
from neuron_standin.machine import write_machine
from penstock_operator.endpoint.optimization.job import FILES
from testbed.device_plugin import Configuration
from testbed.layout import Node

MACHINE = "/run/neuron-standin"
"""Path of the described devices in serving pods."""
PYTHON = f"{FILES}/python"
INTERPRETER = {
    "PENSTOCK_NEURON_PYTHON": f"{PYTHON}/bin/python3",
    # The interpreter's own library; no other is there.
    "LD_LIBRARY_PATH": f"{PYTHON}/lib",
    "OMP_NUM_THREADS": "1",
}
"""`extraEnv` of the chart."""
RUN_SECONDS = 0.1
"""Of a device: two NeuronCores answer 20 requests/s, whatever the CPUs of the machine do."""
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def write_interpreter(folder: Path) -> None:
    """Write `python` below `folder`: this interpreter, torch, transformers, and the stand-in for Inf2."""
    base, target = Path(sys.base_prefix), folder / "python"
    packages = target / "lib" / VERSION / "site-packages"
    (target / "bin").mkdir(parents=True)
    _link(Path(sys.executable).resolve(), target / "bin" / "python3")
    for library in (base / "lib").glob("libpython*.so*"):
        _link(library, target / "lib" / library.name)
    shutil.copytree(
        base / "lib" / VERSION,
        target / "lib" / VERSION,
        copy_function=_link,
        ignore=shutil.ignore_patterns("site-packages", "test", "idlelib", "__pycache__", "config-*"),
    )
    # PyTorch's build for CUDA loads NVIDIA's libraries, which are extras of its requirements.
    nvidia = [one.name for one in distributions() if one.name.startswith("nvidia-")]
    for found in _with_requirements("torch", "transformers", *nvidia):
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                _link(Path(str(file.locate())), packages / file)
    install(packages, "inf2")
    for program in (packages / "bin").iterdir():
        text = program.read_text(encoding="utf-8").replace(str(packages), f"{PYTHON}/lib/{VERSION}/site-packages")
        path = target / "bin" / program.name
        path.write_text(text.replace(sys.executable, INTERPRETER["PENSTOCK_NEURON_PYTHON"]), encoding="utf-8")
        path.chmod(0o755)


def _with_requirements(*names: str) -> Iterator[Distribution]:
    """These distributions and all that they need, each once."""
    wanted, seen = list(names), set[str]()
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        yield found
        # Those for other systems are not installed.
        wanted += [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in found.requires or () if "extra ==" not in text]


def _link(source: str | Path, target: str | Path) -> None:
    """A hard link, or a copy where the file systems differ."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def devices(node: Node, folder: Path, sources: Path) -> Configuration:
    """One device of Inf2 on a node. `folder`: for the description of the devices; `sources`: what has `python`."""
    state = folder / "state"
    write_machine(folder / "machine.json", state, "inf2", faults={"run_seconds": RUN_SECONDS})
    description = (folder / "machine.json").read_text(encoding="utf-8").replace(str(state), f"{MACHINE}/state")
    (folder / "machine.json").write_text(description, encoding="utf-8")
    folder.chmod(0o755)
    state.chmod(0o777)
    return Configuration(
        "aws.amazon.com/neuron",
        str(node.folder / "kubelet" / "plugins_registry"),
        {"neuron0": (0, 1)},
        {"STANDIN_MACHINE": f"{MACHINE}/machine.json"},
        ((str(sources), FILES, True), (str(folder), MACHINE, False)),
    )
