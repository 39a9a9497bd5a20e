"""Two graphs in one candidate's process, as the plan search measures a route."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ArtefactError, UnsupportedModel
from penstock.manifest import Axes
from penstock.recipe import Batching, Plan, Recipe, ShortRoute
from penstock.resources.endpoint import Workload
from penstock.tasks import TaskName
from penstock_optimizer.candidate import encoder
from penstock_optimizer.candidate.encoder import Candidate, EngineCache, shapes
from penstock_optimizer.candidate.runner import CandidateContext
from penstock_optimizer.candidate.work_folder import GraphFile
from penstock_optimizer.guard.gate import judging_samples
from penstock_runtime.rows import collate
from tests.optimizer.end_to_end.small_model import write_small_bert
from tests.runtime.batching.echo import rows
from tests.runtime.minilm import OPENVINO_FP32, ORT_DYNAMIC, ORT_FP32, folder, graph

ROUTE = ShortRoute(longest_tokens=16, recipe=ORT_DYNAMIC)
PLAN = Plan(recipe=ORT_FP32, streams=1, threads_per_stream=1, batching=Batching.PADDED, max_batch_rows=8)
ROUTED = PLAN.model_copy(update={"short": ROUTE})


def file(recipe: Recipe) -> GraphFile:
    path, io = graph(recipe)
    return GraphFile(path=str(path), io=io)


@pytest.mark.parametrize("large", [False, True])
def test_a_plan_with_and_without_a_route_use_the_same_cached_engines(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(encoder, "LARGE_BYTES", 0)
    engines = EngineCache(ORT_FP32, file(ORT_FP32))
    engines.add_graph(ORT_DYNAMIC, file(ORT_DYNAMIC))
    own, short = shapes(ROUTED)
    first = engines.get(own), engines.get(short)

    for plan in (PLAN, ROUTED, PLAN, ROUTED):
        outputs = engines.of(plan).run(collate(rows([5])))["last_hidden_state"]
        expected = (first[1] if plan.short else first[0]).run(collate(rows([5])))["last_hidden_state"]
        assert np.array_equal(outputs, expected)
    assert (engines.get(own), engines.get(short)) == first
    engines.close()


@pytest.mark.parametrize(
    ("among_others", "alone", "wide"), [(64, None, True), (64, 8, True), (None, 8, True), (None, None, False)]
)
def test_an_engine_runs_wide_when_either_length_is_given(
    among_others: int | None, alone: int | None, wide: bool
) -> None:
    served = PLAN.model_copy(update={"wide_from_tokens": among_others, "wide_alone_from_tokens": alone})

    assert [shape[2] for shape in shapes(served)] == [wide]


def test_closing_either_engine_removes_the_warm_mark() -> None:
    engines = EngineCache(ORT_FP32, file(ORT_FP32))
    engines.add_graph(ORT_DYNAMIC, file(ORT_DYNAMIC))
    engines.of(ROUTED)
    engines.mark_warm(shapes(ROUTED))
    engines.mark_warm(PLAN)
    assert engines.is_warm(shapes(ROUTED))

    for streams in (2, 3, 4):
        engines.of(PLAN.model_copy(update={"streams": streams}))

    assert not engines.is_warm(shapes(ROUTED))
    assert not engines.is_warm(PLAN)
    engines.close()


def test_a_graph_with_other_outputs_may_not_serve_short_rows() -> None:
    engines = EngineCache(ORT_FP32, file(ORT_FP32))
    io = graph(ORT_DYNAMIC)[1].model_copy(update={"outputs": {"logits": Axes.ROW}})

    with pytest.raises(ArtefactError, match="short rows gives"):
        engines.add_graph(ORT_DYNAMIC, GraphFile(path=file(ORT_DYNAMIC).path, io=io))


def test_resident_bytes_is_the_memory_of_this_process() -> None:
    """In a separate process: here, engines of earlier tests may release memory at any moment."""
    program = (
        "from penstock_optimizer.candidate.measure import resident_bytes\n"
        "before = resident_bytes()\n"
        "block = b'1' * 50_000_000\n"
        "print(resident_bytes() - before)\n"
    )

    grown = int(subprocess.check_output([sys.executable, "-c", program], text=True))

    assert 40e6 < grown < 60e6


def context(max_tokens: int = 64, **changes: Any) -> dict[str, Any]:
    about = CandidateContext(
        model=str(folder().path),
        task=TaskName.FEATURE_EXTRACTION,
        max_tokens=max_tokens,
        cores=1,
        workload=Workload(**changes),
    )
    return about.model_dump(mode="json")


@pytest.mark.slow
def test_a_candidate_measures_and_judges_a_plan_with_the_graph_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A quarter of the texts: their number does not matter here.
    monkeypatch.setattr("penstock_optimizer.guard.gate.judging_samples", partial(judging_samples, at_most=60))
    candidate = Candidate()
    candidate.configure(context(), ORT_FP32.model_dump(mode="json"))
    candidate.use(file(ORT_FP32).model_dump(mode="json"))
    verdict_on_reference = candidate.observe_reference(str(tmp_path / "teacher.zip"))
    second_graph = file(OPENVINO_FP32).model_dump(mode="json")
    plan = PLAN.model_copy(update={"short": ROUTE.model_copy(update={"recipe": OPENVINO_FP32})}).model_dump(mode="json")

    without = candidate.sample(PLAN.model_dump(mode="json"))
    routed = candidate.sample(plan, short=second_graph)
    again = candidate.sample(plan, short=second_graph)
    verdict = candidate.judge_plan(str(tmp_path / "teacher.zip"), plan, short=second_graph)
    lone = candidate.lone([8, 16], wide=False)

    assert verdict_on_reference.passed
    assert without.second_graph_bytes is None
    assert routed.second_graph_bytes == again.second_graph_bytes
    assert (routed.second_graph_bytes or 0) > 20e6
    assert routed.short_milliseconds.keys() == without.short_milliseconds.keys() == {8, 16}
    assert verdict.passed, verdict.reason
    assert set(lone) == {"8", "16"}
    assert all(0 < milliseconds < 1000 for milliseconds in lone.values())


@pytest.mark.slow
def test_short_rows_are_not_measured_where_the_workload_has_none() -> None:
    candidate = Candidate()
    candidate.configure(context(sequence_lengths=(40, 64)), ORT_FP32.model_dump(mode="json"))
    candidate.use(file(ORT_FP32).model_dump(mode="json"))

    assert candidate.sample(PLAN.model_dump(mode="json")).short_milliseconds == {}


@pytest.mark.slow
def test_short_rows_are_measured_as_long_as_the_endpoint_takes_them() -> None:
    candidate = Candidate()
    candidate.configure(context(max_tokens=12), ORT_FP32.model_dump(mode="json"))
    candidate.use(file(ORT_FP32).model_dump(mode="json"))

    assert candidate.sample(PLAN.model_dump(mode="json")).short_milliseconds.keys() == {8}


def test_an_endpoint_too_short_for_any_judging_request_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    model = write_small_bert(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    labels = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "contradiction", "1": "entailment"},
    }
    (model / "config.json").write_text(json.dumps({**config, **labels}))
    candidate = Candidate()
    about = CandidateContext(model=str(model), task=TaskName.ZERO_SHOT_CLASSIFICATION, max_tokens=8, cores=1)
    candidate.configure(about.model_dump(mode="json"), ORT_FP32.model_dump(mode="json"))
    candidate.use(file(ORT_FP32).model_dump(mode="json"))

    with pytest.raises(UnsupportedModel, match=r"rows of 8 tokens .* zero-shot-classification .*maxInputTokens"):
        candidate.observe_reference(str(tmp_path / "teacher.zip"))
