"""The forward pass alone, from a real artefact; and which engine was the fastest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.manifest import CandidateFacts, LatencyPoint, Outcome, ServedGraph
from penstock.recipe import Batching, ShortRoute
from penstock_bench.cell import CellSpec, MeasurementFailed
from penstock_bench.floor import Floor, fastest_ratio
from penstock_bench.subject import everyday_tokenizer
from penstock_optimizer.candidate.isolation import Worker
from penstock_optimizer.load.client import RequestBody
from tests.bench.conftest import ends
from tests.optimizer.report.sample import FP32, INT8, sample_manifest


def candidate(outcome: Outcome, milliseconds: dict[int, float], *, chosen: bool = False) -> CandidateFacts:
    return CandidateFacts(
        recipe=INT8 if chosen else FP32,
        outcome=outcome,
        reason="",
        latency=tuple(
            LatencyPoint(tokens=tokens, p50_milliseconds=value, minimum_milliseconds=value)
            for tokens, value in milliseconds.items()
        ),
    )


@pytest.mark.parametrize(
    ("other", "outcome", "ratio"),
    [
        ({8: 2.0, 512: 20.0}, Outcome.SLOWER, {8: 1.0, 512: 0.8}),
        # A recipe with wrong answers has no speed.
        ({8: 0.1, 512: 0.1}, Outcome.REJECTED, {8: 1.0, 512: 1.0}),
        ({8: 0.5}, Outcome.REFERENCE, {8: 0.5, 512: 1.0}),
    ],
)
def test_the_fastest_engine_with_right_answers_is_the_floor(
    other: dict[int, float], outcome: Outcome, ratio: dict[int, float]
) -> None:
    candidates = (candidate(Outcome.CHOSEN, {8: 1.0, 512: 25.0}, chosen=True), candidate(outcome, other))
    manifest = sample_manifest().model_copy(update={"candidates": candidates})

    assert fastest_ratio(manifest) == ratio


def test_short_rows_with_a_separate_graph_are_compared_with_that_graph() -> None:
    short = candidate(Outcome.SLOWER, {8: 0.5, 512: 50.0})
    manifest = sample_manifest()
    route = ShortRoute(longest_tokens=32, recipe=short.recipe, batching=Batching.SINGLE, max_batch_rows=1)
    chosen = manifest.chosen.model_copy(
        update={
            "plan": manifest.chosen.plan.model_copy(update={"short": route}),
            "short": ServedGraph(path=manifest.baseline.path, io=manifest.baseline.io),
        }
    )
    candidates = (candidate(Outcome.CHOSEN, {8: 1.0, 512: 25.0}, chosen=True), short)

    assert fastest_ratio(manifest.model_copy(update={"chosen": chosen, "candidates": candidates})) == {8: 1.0, 512: 1.0}


def test_an_artefact_that_does_not_load_is_an_error_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(MeasurementFailed, match=r"forward pass alone cannot be measured: .*manifest\.json"):
        Floor(tmp_path, everyday_tokenizer(), ())


@pytest.mark.slow
def test_a_tokenizer_that_pads_and_cuts_changes_nothing(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As the tokenizer of all-MiniLM-L6-v2 does: every text would be as long as 128 tokens.
    tokenizer = everyday_tokenizer()
    tokenizer.enable_padding(length=24)
    tokenizer.enable_truncation(24)
    floor = Floor(artefact, tokenizer, ())
    asked: list[int] = []

    def call(self: Worker, method: str, *, timeout_seconds: float, **values: Any) -> Any:
        asked.append(len(values["ids"]))
        return {"milliseconds": (1.0,), "processor_milliseconds": 1.0}

    monkeypatch.setattr(Worker, "call", call)
    try:
        for tokens in (8, 32):
            floor.measure(CellSpec(url="http://floor", bodies=(RequestBody(body="", group=tokens),), seconds=0.1))
    finally:
        floor.stop()

    assert asked == [8, 32]


@pytest.mark.slow
def test_the_forward_pass_of_an_artefact_is_timed(artefact: Path) -> None:
    floor = Floor(artefact, everyday_tokenizer(), ())
    try:
        spec = CellSpec(url="http://floor", bodies=(RequestBody(body="", group=8),), seconds=0.1)
        floor.pause()
        floor.resume()
        cell = floor.measure(spec)
    finally:
        floor.stop()

    assert len(cell.latencies_milliseconds) >= 3
    assert set(cell.groups) == {8}
    assert cell.completed_per_second == pytest.approx(
        1e3 * len(cell.latencies_milliseconds) / sum(cell.latencies_milliseconds)
    )
    assert cell.server_cpu_milliseconds is not None
    assert cell.server_cpu_milliseconds > 0


LEAVES = """
import sys, time
from pathlib import Path
from penstock_bench.floor import Floor
from penstock_bench.subject import everyday_tokenizer
floor = Floor(Path(sys.argv[1]), everyday_tokenizer(), ())
floor.pause()
print(*floor.pids, flush=True)
time.sleep(600)
"""


def test_the_floor_process_ends_with_its_parent(artefact: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVES, str(artefact)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.kill()

    assert ends(pid)
