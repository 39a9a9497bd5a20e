"""The compiled models, once for all tests of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.engines.neuron.small import Standin, compile_kinds, install_standin


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    """The packages of the stand-in, and a machine with one device of two cores."""
    pytest.importorskip("torch")
    return install_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def compiled(standin: Standin, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`neuron.json` of a small model of each kind."""
    return compile_kinds(standin, tmp_path_factory.mktemp("compiled") / "models")


@pytest.fixture
def on_host(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Standin:
    """Processes started by this one are on a host with a device of two cores, without faults."""
    standin.describe()
    for name, value in standin.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    return standin
