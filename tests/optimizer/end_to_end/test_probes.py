"""Vectors of probe texts are recorded with a plan, and a replica with other vectors does not serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from penstock.manifest import MANIFEST_NAME, PROBES_FILE
from penstock_optimizer.candidate.work_folder import digests
from penstock_optimizer.capacity.curve import ReplicaBroken, serve_replica
from penstock_runtime.host import read_host
from penstock_runtime.serving.loaded_model import load_artefact
from penstock_runtime.serving.probes import LEAST_DIFFERENCE, PROBES, allowed_difference, check_probes, probe_vectors
from tests.optimizer.end_to_end.optimising import QUICK, Made, endpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_points")]


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(endpoint(model, QUICK), tmp_path_factory.mktemp("store"))


def changed(made: Made, to: Path) -> Path:
    return Path(shutil.copytree(made.artefact, to))


def sign(artefact: Path) -> Path:
    """State the digests of the files as they are now: the damage is none that a digest shows."""
    file = artefact / MANIFEST_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "files": digests(artefact)}))
    return artefact


def refusal(artefact: Path, log: Path) -> str:
    with pytest.raises(ReplicaBroken) as refused, serve_replica(artefact, cores=1, cpus=(), log=log, start_seconds=120):
        pass
    return f"{refused.value.message} {log.read_text()}"


def test_the_vectors_of_the_chosen_plan_are_recorded_and_both_plans_have_them(made: Made) -> None:
    recorded = np.load(made.artefact / PROBES_FILE)
    for which in ("chosen", "baseline"):
        loaded = load_artefact(made.artefact, which, read_host())
        try:
            vectors = probe_vectors(loaded)
            check_probes(loaded)
        finally:
            loaded.close()

        assert vectors is not None
        assert vectors.shape == recorded.shape
        assert (np.isnan(vectors).any(axis=1)).sum() < len(PROBES) // 2
    assert made.manifest.probes is not None
    assert LEAST_DIFFERENCE <= made.manifest.probes.largest_difference < 0.1


def test_the_limits_of_live_answers_are_recorded_unless_fp32_was_chosen(made: Made) -> None:
    live = made.manifest.live

    assert (live is None) == made.manifest.serves_fp32
    if live is not None:
        assert live.texts >= 60
        assert 0 < live.divergence < 0.5
        assert 0 < live.severe < 0.5


def test_a_replica_with_damaged_weights_does_not_serve_and_names_the_reason(made: Made, tmp_path: Path) -> None:
    artefact = changed(made, tmp_path / "damaged")
    graph = artefact / made.manifest.chosen.path
    content = bytearray(graph.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4096] = np.full(1024, 0.7, "<f4").tobytes()
    graph.write_bytes(content)

    assert "vectors are not those of the artefact" in refusal(sign(artefact), tmp_path / "log")


def test_a_replica_with_another_pooling_does_not_serve(made: Made, tmp_path: Path) -> None:
    artefact = changed(made, tmp_path / "pooled")
    (artefact / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))

    assert "probe texts differ" in refusal(sign(artefact), tmp_path / "log")


def test_a_replica_with_another_tokenizer_does_not_serve(made: Made, tmp_path: Path) -> None:
    artefact = changed(made, tmp_path / "tokenizer")
    file = artefact / "tokenizer.json"
    whole = json.loads(file.read_text())
    words = [word for word in whole["model"]["vocab"] if not word.startswith("[")]
    ids = [whole["model"]["vocab"][word] for word in words]
    whole["model"]["vocab"] |= dict(zip(words, ids[1:] + ids[:1], strict=True))
    file.write_text(json.dumps(whole))

    assert "probe texts differ" in refusal(sign(artefact), tmp_path / "log")


def test_an_artefact_without_recorded_vectors_is_served(made: Made, tmp_path: Path) -> None:
    artefact = changed(made, tmp_path / "old")
    (artefact / PROBES_FILE).unlink()
    file = artefact / MANIFEST_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "probes": None}))

    with serve_replica(sign(artefact), cores=1, cpus=(), log=tmp_path / "log", start_seconds=120) as server:
        assert server.url


@pytest.mark.parametrize(("cosine", "most"), [(None, 1e-3), (1.0, 1e-3), (0.998, 3e-3), (0.9, 0.15)])
def test_the_allowed_difference_follows_from_what_the_guard_saw(cosine: float | None, most: float) -> None:
    assert allowed_difference(cosine) == pytest.approx(most)
