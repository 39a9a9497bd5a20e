"""The chosen plan is verified with the real server: a plan that breaks it is not served."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.manifest import Manifest, Outcome
from penstock.recipe import Batching, EngineName, Precision, Recipe
from penstock_optimizer.candidate.work_folder import digests
from penstock_optimizer.capacity.curve import CapacityFailed, ReplicaBroken
from penstock_optimizer.optimise import Optimisation
from penstock_optimizer.search.climb import SearchResult
from penstock_optimizer.search.recipes import REFERENCE
from penstock_optimizer.search.space import PlanLimits, first_plan, with_route
from penstock_optimizer.targets.plan_search import PlanSearch
from penstock_runtime.host import read_host
from penstock_runtime.rows import Row, run_rows
from penstock_runtime.serving.loaded_model import load_artefact
from tests.optimizer.end_to_end.optimising import Made, endpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_points")]


def test_a_plan_whose_server_breaks_is_not_served(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []

    def breaks(_: Optimisation, artefact: Path) -> object:
        recipe = Manifest.load(artefact).chosen.plan.recipe
        served.append(recipe.name)
        if recipe != REFERENCE:
            raise ReplicaBroken("the server did not start: killed by signal 4 (SIGILL)")
        raise CapacityFailed("the load process failed")

    monkeypatch.setattr(Optimisation, "_capacity", breaks)
    # fp32 may not be served where something else can be, so that something else is chosen first.
    quick = {"engines": ["onnxruntime"], "precisions": ["int8-dynamic"]}
    manifest = Made(endpoint(model, quick), tmp_path).manifest

    assert manifest.chosen.plan.recipe == REFERENCE
    assert served[-1] == REFERENCE.name
    assert "The capacity was not measured: the load process failed." in manifest.findings
    failed = [one for one in manifest.candidates if one.outcome is Outcome.FAILED]
    # Where fp32 was faster for short rows, it was tried with the other first, and then left out.
    tried = list(dict.fromkeys(served))
    assert [one.recipe.name for one in failed] == tried[:-1]
    assert all("SIGILL" in one.reason for one in failed)
    assert len(tried) == 2


def search_with_route(monkeypatch: pytest.MonkeyPatch) -> tuple[Recipe, Recipe]:
    """Let the search end with OpenVINO for most rows and ONNX Runtime for short ones, whichever is faster."""
    long = Recipe(engine=EngineName.OPENVINO, precision=Precision.FP32)

    def search(planner: PlanSearch, _: object) -> SearchResult:
        limits = PlanLimits(1, Batching.PADDED, tuple(planner.lengths))
        plan = with_route(first_plan(long, limits), REFERENCE, limits, longest_tokens=16)
        return SearchResult(plan, None, (), finished=True, noise=0.0, second_graph_bytes=1_000_000)

    monkeypatch.setattr(PlanSearch, "search", search)
    return long, REFERENCE


BOTH = {"engines": ["onnxruntime", "openvino"], "precisions": ["fp32"]}


def test_a_route_is_written_verified_by_the_real_server_and_loaded_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = search_with_route(monkeypatch)
    made = Made(endpoint(model, BOTH), tmp_path)
    manifest = made.manifest

    assert manifest.chosen.plan.recipes == (long, short)
    assert manifest.chosen.short is not None
    assert {one.path for one in manifest.chosen.graphs} <= manifest.files.keys()
    assert digests(made.artefact) == manifest.files
    assert any(f"({short.name}): 1 MB of memory" in finding for finding in manifest.findings)
    assert f"up to 16 tokens {short.name}" in (made.artefact / "report.html").read_text()
    loaded = load_artefact(made.artefact, "chosen", read_host())
    try:
        facts = loaded.engine.facts
        assert facts.short is not None
        assert (facts.engine, facts.short.engine) == ("openvino", "onnxruntime")
        assert [len(run_rows(loaded.engine.run, loaded.io, [Row([1] * n)])) for n in (16, 17)] == [1, 1]
    finally:
        loaded.close()


def test_a_server_that_breaks_with_a_route_is_tried_without_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = search_with_route(monkeypatch)
    served: list[tuple[Recipe, ...]] = []

    def breaks(_: Optimisation, artefact: Path) -> object:
        plan = Manifest.load(artefact).chosen.plan
        served.append(plan.recipes)
        if plan.short is not None:
            raise ReplicaBroken("the server did not start: killed by signal 9 (SIGKILL)")
        raise CapacityFailed("the load process failed")

    monkeypatch.setattr(Optimisation, "_capacity", breaks)
    manifest = Made(endpoint(model, BOTH), tmp_path).manifest

    assert served == [(long, short), (long,)]
    assert (manifest.chosen.plan.recipe, manifest.chosen.short) == (long, None)
    assert not any("graph of their own" in finding for finding in manifest.findings)
