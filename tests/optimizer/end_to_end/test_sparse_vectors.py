"""A SPLADE model without a tokenizer.json is optimised and served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.manifest import Manifest, Outcome
from penstock.tasks import Head
from penstock_runtime.host import read_host
from penstock_runtime.rows import run_rows
from penstock_runtime.serving.loaded_model import load_artefact
from tests.optimizer.end_to_end.optimising import Made, endpoint
from tests.optimizer.end_to_end.small_model import write_small_splade

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_points")]
SOME = {"precisions": ["fp32", "int8-rowwise"]}


def test_sparse_vectors_are_optimised_and_served(tmp_path: Path) -> None:
    made = Made(endpoint(write_small_splade(tmp_path / "model"), SOME), tmp_path / "store")

    manifest = Manifest.load(made.artefact)
    assert manifest.model.head is Head.SPARSE
    names = {path.name for path in made.artefact.iterdir()}
    assert "tokenizer.json" in names
    assert "vocab.txt" not in names
    assert Outcome.CHOSEN in {one.outcome for one in manifest.candidates}
    failed = [(one.recipe.name, one.reason) for one in manifest.candidates if one.outcome is Outcome.FAILED]
    assert [reason for name, reason in failed if not name.startswith("native")] == []
    loaded = load_artefact(made.artefact, "chosen", read_host())
    try:
        prepared = loaded.task.prepare(loaded.task.parse("the school of music", {"sparse_format": "tokens"}))
        (outputs,) = run_rows(loaded.engine.run, loaded.io, prepared.rows)
        (answer,) = loaded.task.assemble(prepared, [loaded.task.reduce(prepared.rows[0], outputs)])
    finally:
        loaded.close()
    assert len(answer) > 1
    assert "None" not in answer
    assert all(np.isfinite(value) and value > 0 for value in answer.values())
