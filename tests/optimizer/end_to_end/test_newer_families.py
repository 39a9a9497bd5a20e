"""The optimisation from end to end on models whose parts BERT does not have, with all engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.manifest import Outcome
from penstock.recipe import EngineName
from penstock_runtime.engines.native import library_path
from penstock_runtime.host import read_host
from penstock_runtime.rows import run_rows
from penstock_runtime.serving.loaded_model import load_artefact
from tests.optimizer.end_to_end.optimising import Made, endpoint
from tests.optimizer.end_to_end.small_model import HIDDEN, write_small_modernbert

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_points")]
SOME = {"precisions": ["fp32", "int8-rowwise"]}


def test_a_modernbert_is_optimised_and_served(tmp_path: Path) -> None:
    made = Made(endpoint(write_small_modernbert(tmp_path / "model"), SOME), tmp_path / "store")

    by_engine = {
        engine: {one.outcome for one in made.manifest.candidates if one.recipe.engine is engine}
        for engine in EngineName
    }
    assert Outcome.CHOSEN in set().union(*by_engine.values())
    for engine, outcomes in by_engine.items():
        assert Outcome.FAILED not in outcomes or (engine is EngineName.NATIVE and not library_path().is_file())
    loaded = load_artefact(made.artefact, "chosen", read_host())
    try:
        prepared = loaded.task.prepare(loaded.task.parse("the school of music", {}))
        (outputs,) = run_rows(loaded.engine.run, loaded.io, prepared.rows)
        answer = loaded.task.assemble(prepared, [loaded.task.reduce(prepared.rows[0], outputs)])
    finally:
        loaded.close()
    assert np.asarray(answer).reshape(-1).shape == (HIDDEN,)
    assert np.isfinite(np.asarray(answer)).all()
