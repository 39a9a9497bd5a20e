from __future__ import annotations

from pathlib import Path

import pytest

from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock_optimizer.optimise import prepare
from tests.cli.endpoints import write_endpoint, write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model. Read-only: copy it to change it."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def artefact(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its fp32 artefact, made in a second. Read-only: copy it to change it."""
    place = tmp_path_factory.mktemp("store")
    endpoint = from_file(ModelEndpoint, write_endpoint(place / "tiny.yaml", tiny))
    return prepare(endpoint, store=place / "artefacts", models=place / "models").artefact


@pytest.fixture
def file(tiny: Path, tmp_path: Path) -> Path:
    """A valid endpoint file."""
    return write_endpoint(tmp_path / "tiny.yaml", tiny)
