from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.endpoints import write_endpoint, write_tiny

FEW = {"engines": ["onnxruntime"], "precisions": ["int8-dynamic"]}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model. Not to be changed."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def endless(tiny: Path, tmp_path: Path) -> Path:
    """An endpoint whose optimisation runs during the whole test: every candidate is measured."""
    return write_endpoint(tmp_path / "tiny.yaml", tiny, optimization={"budgetSeconds": 600})
