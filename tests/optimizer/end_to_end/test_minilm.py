"""The real all-MiniLM-L6-v2, all candidates, within ten minutes on two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.manifest import Manifest, Outcome
from penstock.recipe import Precision
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock_optimizer.optimise import optimise
from penstock_runtime.host import read_host

EXAMPLE = Path(__file__).parents[3] / "examples" / "sentence-embedding.yaml"
SECONDS = 600


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_the_example_ends_within_ten_minutes_with_a_plan_that_is_faster_and_right(tmp_path: Path) -> None:
    endpoint = from_file(ModelEndpoint, EXAMPLE)
    cores = min(2, read_host().usable)
    artefact = optimise(endpoint, store=tmp_path, models=tmp_path, cores=cores, budget_seconds=SECONDS)
    manifest = Manifest.load(artefact)
    by_name = {one.recipe.name: one for one in manifest.candidates}
    chosen = by_name[manifest.chosen.plan.recipe.name]

    assert manifest.seconds < SECONDS
    assert chosen.outcome is Outcome.CHOSEN
    assert chosen.verdict is not None
    assert chosen.verdict.passed
    assert chosen.recipe.precision is not Precision.FP32
    # Over all lengths: single ones may be disturbed on a shared machine.
    assert sum(gain > 1.2 for gain in manifest.speed_up.values()) > len(manifest.speed_up) / 2
    # Naive int8 is fast and wrong, and never served.
    assert by_name["onnxruntime-int8-dynamic-plain"].outcome in {Outcome.REJECTED, Outcome.SKIPPED}
    assert manifest.capacity.requests_per_second is not None
    assert len(manifest.gemm) == len(chosen.latency)
    assert (manifest.serving_rss_bytes or 0) < 1e9
