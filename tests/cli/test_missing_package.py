"""An installation that only serves says so when it is asked for more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.endpoints import invoke, write_endpoint


@pytest.mark.parametrize("command", [["optimize"], ["serve", "--port", "0"]])
def test_an_optimisation_without_its_packages_is_one_sentence_with_a_remedy(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    endpoint = write_endpoint(tmp_path / "endpoint.yaml", f"file://{tmp_path}/model")

    result = invoke(*command, endpoint)

    assert result.exit_code == 1
    assert "error: onnx not installed here: artefacts can be served" in result.stderr
    assert "penstock[optimizer]" in result.stderr
    assert "penstock-optimizer" in result.stderr
