"""The compiled models, once for all tests of a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.engines.neuron.small import KIND_OF_TASK, KINDS, Standin, compile_kinds, install_standin


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    """The packages of the stand-in, and a machine with one device of two cores."""
    pytest.importorskip("torch")
    return install_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def compiled(standin: Standin, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`neuron.json` of a small model of each kind."""
    found = compile_kinds(standin, tmp_path_factory.mktemp("compiled") / "models", [(kind, 1) for kind in KINDS])
    return {kind: path for (kind, _), path in found.items()}


@pytest.fixture
def on_host(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Standin:
    """Processes started by this one are on a host with a device of two cores, without faults."""
    return use(standin, monkeypatch)


@pytest.fixture(scope="session")
def standin_inf1(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    """As `standin`, for Inf1."""
    pytest.importorskip("torch")
    return install_standin(tmp_path_factory.mktemp("standin-inf1"), "inf1")


@pytest.fixture(scope="session")
def compiled_inf1(standin_inf1: Standin, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """`neuron.json` for Inf1 of each task's model as a pipeline over 4 cores, and of one with a copy for each core."""
    wanted = [("vectors", 1), *((kind, 4) for kind in dict.fromkeys(KIND_OF_TASK.values()))]
    return compile_kinds(standin_inf1, tmp_path_factory.mktemp("compiled-inf1") / "models", wanted)


@pytest.fixture
def on_inf1(standin_inf1: Standin, monkeypatch: pytest.MonkeyPatch) -> Standin:
    """As `on_host`, with two devices of Inf1: eight cores."""
    return use(standin_inf1, monkeypatch, chips=2)


def use(standin: Standin, monkeypatch: pytest.MonkeyPatch, **machine: Any) -> Standin:
    """Processes started by this one are on that host."""
    standin.describe(**machine)
    for name, value in standin.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    return standin
