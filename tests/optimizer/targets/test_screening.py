"""Stage 1: the outcomes of candidates that are slow, wrong, broken, or too late."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import OutOfDisk
from penstock.manifest import Outcome, ReasonCode
from penstock.recipe import Batching, EngineName, Precision, Recipe
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed, death_reason
from penstock_optimizer.candidate.work_folder import WorkFolder
from penstock_optimizer.targets.screening import MAX_OPEN, ROUNDS, CandidateRun, Screening, max_open_processes
from penstock_optimizer.targets.target import Budget
from tests.optimizer.candidate.fake_runner import FakeRunner, Script, crash
from tests.optimizer.search.cost_model import FP32, INT8, STATIC

LENGTHS = (8, 32, 128, 512)


def stage(
    tmp_path: Path, scripts: dict[Recipe, Script], *, seconds: float = 600, expected: tuple[int, ...] = ()
) -> tuple[Screening, FakeRunner, list[CandidateRun]]:
    work = WorkFolder(tmp_path / "work")
    runner = FakeRunner(work, {FP32: Script(), **scripts})
    settled: list[CandidateRun] = []
    screening = Screening(
        runner, work, Budget(seconds, runner.clock), lengths=LENGTHS, expected=expected, on_settled=settled.append
    )
    return screening, runner, settled


def run(screening: Screening, scripts: dict[Recipe, Script]) -> dict[Recipe, CandidateRun]:
    screening.enter(FP32, reference=True)
    for recipe in scripts:
        screening.enter(recipe)
    screening.measure()
    screening.close()
    return {run.recipe: run for run in screening.runs}


@pytest.mark.parametrize(
    ("script", "outcome", "reason"),
    [
        (Script(speed=2), Outcome.SLOWER, "within the accuracy budget"),
        (Script(speed=0.5), Outcome.SLOWER, "at first sight at least 2.0 times as slow as onnxruntime-fp32"),
        (Script(cosine=0.944), Outcome.REJECTED, "min_cosine 0.944 is under the budget of 0.985"),
        (Script(fails={"build": crash()}), Outcome.FAILED, "killed by signal 11"),
        (Script(fails={"time": crash(9)}), Outcome.FAILED, "killed by signal 9"),
        (Script(fails={"judge": crash()}), Outcome.FAILED, "killed by signal 11"),
        (Script(fails={"time": crash()}, fails_after=1), Outcome.FAILED, "killed by signal 11 while it was measured"),
        (
            Script(fails={"build": WorkerFailed(CallFailure.RAISED, "RuntimeError: no kernel")}),
            Outcome.FAILED,
            "RuntimeError: no kernel",
        ),
    ],
)
def test_each_outcome_has_its_reason(tmp_path: Path, script: Script, outcome: Outcome, reason: str) -> None:
    screening, runner, settled = stage(tmp_path, {INT8: script})
    found = run(screening, {INT8: script})

    assert (found[INT8].facts.outcome, found[INT8].facts.reason) == (outcome, reason)
    assert found[FP32].facts.outcome is Outcome.REFERENCE
    assert runner.open_now == 0
    assert found[INT8] in settled


@pytest.mark.parametrize("kind", ["OutOfDisk", ""])
def test_a_full_disk_ends_the_stage_and_fails_no_candidate(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that cannot write raises any error; the free space of the disk shows the cause."""
    reason = WorkerFailed(CallFailure.RAISED, "No space left on device" if kind else "basic_ios::clear", kind=kind)
    script = Script(fails={"build": reason})
    monkeypatch.setattr("penstock_optimizer.targets.screening.is_full", lambda _: not kind)
    screening, _, _ = stage(tmp_path, {INT8: script})
    screening.enter(FP32, reference=True)

    with pytest.raises(OutOfDisk, match=f"the work folder {tmp_path / 'work'} cannot take more"):
        screening.enter(INT8)

    screening.close()
    assert WorkFolder(tmp_path / "work").load(INT8) is None


def test_open_candidates_are_measured_at_length_in_turns(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2), STATIC: Script(speed=1.8)}
    screening, runner, _ = stage(tmp_path, scripts)
    run(screening, scripts)

    order = [recipe for method, recipe in runner.calls if method == "time"][3:]
    assert order == [FP32, INT8, STATIC] * ROUNDS


def test_a_disturbed_quick_sample_does_not_exclude_a_candidate(tmp_path: Path) -> None:
    """INT8's first quick sample is disturbed: ten times too slow, once."""
    scripts = {INT8: Script(speed=2, slow_looks=1)}
    screening, _, _ = stage(tmp_path, scripts)
    found = run(screening, scripts)

    assert found[INT8].facts.reason_code is ReasonCode.WITHIN_BUDGET
    assert len(found[INT8].facts.latency) == len(LENGTHS)


def test_a_failure_of_the_best_in_a_second_sample_does_not_fail_the_other(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=3, fails={"time": crash()}, fails_after=1), STATIC: Script(speed=1.5)}
    screening, _, _ = stage(tmp_path, scripts)
    found = run(screening, scripts)

    assert found[INT8].facts.outcome is Outcome.FAILED
    assert found[STATIC].facts.reason_code is ReasonCode.WITHIN_BUDGET


def test_a_dominated_candidate_is_not_measured_at_length(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2), STATIC: Script(speed=0.7)}
    screening, runner, _ = stage(tmp_path, scripts)
    found = run(screening, scripts)

    assert runner.count("time", STATIC) == 3  # a quick sample, and two more in turns with the best one
    assert [point.tokens for point in found[STATIC].facts.latency] == [8, 32, 128]
    assert [point.tokens for point in found[INT8].facts.latency] == list(LENGTHS)


def test_only_candidates_that_may_serve_and_were_measured_go_on(tmp_path: Path) -> None:
    scripts = {INT8: Script(cosine=0.9, speed=5), STATIC: Script(speed=1.8)}
    screening, _, _ = stage(tmp_path, scripts)
    screening.enter(FP32, reference=True)
    for recipe in scripts:
        screening.enter(recipe)
    screening.measure()

    assert [timed.recipe for timed in screening.timed()] == [FP32, STATIC]
    screening.close()


def test_a_candidate_that_takes_too_long_is_ended_and_leaves_time_for_the_others(tmp_path: Path) -> None:
    scripts = {INT8: Script(build_seconds=1e6), STATIC: Script(speed=2)}
    screening, runner, _ = stage(tmp_path, scripts, seconds=60)
    found = run(screening, scripts)

    assert found[INT8].facts.outcome is Outcome.FAILED
    assert "did not end within" in found[INT8].facts.reason
    assert found[STATIC].facts.outcome is Outcome.SLOWER
    assert runner.clock.now < 60


def test_a_candidate_that_the_budget_cut_off_did_not_fail(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2, build_seconds=10)}
    screening, _, _ = stage(tmp_path, scripts, seconds=20)
    found = run(screening, scripts)

    assert (found[INT8].facts.outcome, found[INT8].facts.reason_code) == (Outcome.SKIPPED, ReasonCode.CUT_OFF)
    # With more time it continues.
    again, _, _ = stage(tmp_path, scripts)
    assert run(again, scripts)[INT8].facts.reason_code is ReasonCode.WITHIN_BUDGET


def test_candidates_without_time_are_skipped_with_the_reason(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2, build_seconds=10), STATIC: Script(speed=2)}
    screening, _, _ = stage(tmp_path, scripts, seconds=20)
    found = run(screening, scripts)

    assert (found[STATIC].facts.outcome, found[STATIC].facts.reason_code) == (Outcome.SKIPPED, ReasonCode.NO_TURN)
    assert found[FP32].facts.latency


def test_a_candidate_with_only_a_quick_sample_is_not_called_slower(tmp_path: Path) -> None:
    # Measuring the reference at length takes what is left.
    scripts = {FP32: Script(timing_seconds=20), INT8: Script(speed=2)}
    screening, runner, settled = stage(tmp_path, scripts, seconds=60)
    found = run(screening, {INT8: scripts[INT8]})

    assert (found[INT8].facts.outcome, found[INT8].facts.reason_code) == (Outcome.SKIPPED, ReasonCode.NOT_MEASURED)
    assert found[INT8].facts.verdict is not None
    assert settled[-1] is found[INT8]
    assert runner.open_now == 0
    # With more time it continues.
    again, _, _ = stage(tmp_path, scripts)
    assert run(again, {INT8: scripts[INT8]})[INT8].facts.reason_code is ReasonCode.WITHIN_BUDGET


@pytest.mark.parametrize(
    ("available", "graph", "expected"),
    [(24e9, 90e6, MAX_OPEN), (24e9, 1.3e9, 1 + 1), (4e9, 90e6, 3), (1e9, 1.3e9, 2), (0, 90e6, 2)],
)
def test_open_processes_fit_the_memory(available: float, graph: float, expected: int) -> None:
    assert max_open_processes(int(available), int(graph)) == expected


def test_the_reference_may_use_the_time_of_later_stages_on_a_slow_machine(tmp_path: Path) -> None:
    # One round of it takes longer than the candidates' stage has left, and less than the budget has.
    scripts = {FP32: Script(timing_seconds=13), INT8: Script(build_seconds=22)}
    screening, runner, _ = stage(tmp_path, scripts, seconds=60)
    found = run(screening, {INT8: scripts[INT8]})

    assert found[FP32].facts.outcome is Outcome.REFERENCE
    assert len(found[FP32].milliseconds[LENGTHS[0]]) == 2 * 3  # two passes of three rounds, three runs each
    assert runner.clock.now < 60


def test_a_failure_of_the_reference_is_raised(tmp_path: Path) -> None:
    screening, runner, _ = stage(tmp_path, {FP32: Script(fails={"build": crash()})})
    with pytest.raises(WorkerFailed, match="signal 11"):
        screening.enter(FP32, reference=True)

    assert runner.open_now == 0


def test_no_more_processes_are_open_than_fit_the_memory(tmp_path: Path) -> None:
    recipes = [
        Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC, options=(f"option{index}",))
        for index in range(10)
    ]
    scripts = {recipe: Script(speed=1 + index / 100) for index, recipe in enumerate(recipes)}
    screening, runner, _ = stage(tmp_path, scripts)
    found = run(screening, scripts)

    assert runner.max_open <= MAX_OPEN + 1
    assert runner.open_now == 0
    # The fastest ones stayed open.
    assert all(len(found[recipe].facts.latency) == len(LENGTHS) for recipe in recipes[-3:])
    assert found[recipes[0]].facts.reason == "slower at first sight than 5 others"


def test_the_fastest_at_most_lengths_stays_open_even_if_it_is_slow_at_the_longest(tmp_path: Path) -> None:
    """The sum over lengths is mostly the longest one's: by it the fastest engine for all usual rows was closed."""
    others = {
        Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC, options=(f"option{index}",)): Script(
            speed=1.5
        )
        for index in range(MAX_OPEN)
    }
    scripts = {INT8: Script(speed=1.4, short_speed=5.0), **others}
    screening, _, _ = stage(tmp_path, scripts, expected=(8, 8, 16, 32, 128))
    found = run(screening, scripts)

    assert found[INT8].facts.reason_code is ReasonCode.WITHIN_BUDGET
    assert len(found[INT8].facts.latency) == len(LENGTHS)


# Continuing after an interruption


def test_settled_candidates_are_not_built_or_judged_again(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2), STATIC: Script(cosine=0.9)}
    broken = Recipe(engine=EngineName.OPENVINO, precision=Precision.BF16)
    scripts[broken] = Script(fails={"build": crash()})
    first, _, _ = stage(tmp_path, scripts)
    before = run(first, scripts)
    second, runner, _ = stage(tmp_path, scripts)
    after = run(second, scripts)

    assert {recipe: one.facts.outcome for recipe, one in after.items()} == {
        recipe: one.facts.outcome for recipe, one in before.items()
    }
    assert runner.count("build") == runner.count("judge") == 0
    # Times are of this run: all are sampled, and measured together, again.
    assert runner.count("time", INT8) == 1 + ROUNDS
    assert after[INT8].built == before[INT8].built
    assert after[INT8].batching is Batching.PADDED


def test_a_quick_sample_of_an_interrupted_run_does_not_exclude_a_candidate(tmp_path: Path) -> None:
    busy = {INT8: Script(speed=2, slow_looks=1), STATIC: Script(speed=1.8)}
    first, _, _ = stage(tmp_path, busy)
    for recipe in (FP32, *busy):
        first.enter(recipe, reference=recipe == FP32)
    first.close()
    quiet = busy | {INT8: Script(speed=2)}
    second, _, _ = stage(tmp_path, quiet)
    second.max_open = 2
    found = run(second, quiet)

    assert found[INT8].facts.reason_code is ReasonCode.WITHIN_BUDGET
    assert "at first sight" in found[STATIC].facts.reason


def test_a_candidate_whose_files_changed_is_built_again(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2)}
    first, _, _ = stage(tmp_path, scripts)
    run(first, scripts)
    (WorkFolder(tmp_path / "work").candidate(INT8) / "model.onnx").write_text("damaged")
    second, runner, _ = stage(tmp_path, scripts)
    run(second, scripts)

    assert runner.count("build", INT8) == 1


@pytest.mark.parametrize("damage", ["change", "delete", "unrecorded", "neither"])
def test_a_reference_with_changed_outcomes_is_run_again(tmp_path: Path, damage: str) -> None:
    """Otherwise every candidate would fail without the outcomes, in every run."""
    scripts = {INT8: Script(speed=2)}
    first, _, _ = stage(tmp_path, scripts)
    first.enter(FP32, reference=True)
    first.close()
    work = WorkFolder(tmp_path / "work")
    match damage:
        case "change":
            work.reference.write_bytes(b"")
        case "delete":
            work.reference.unlink()
        case _:
            # As earlier versions wrote it.
            known = work.load(FP32)
            assert known is not None
            work.save(known.model_copy(update={"taught": ""}))
            if damage == "neither":
                work.reference.unlink()
    second, runner, _ = stage(tmp_path, scripts)
    found = run(second, scripts)

    assert runner.count("judge", FP32) == 1
    assert work.reference.read_text() == "outcomes"
    assert found[FP32].facts.outcome is Outcome.REFERENCE
    assert found[INT8].facts.reason_code is ReasonCode.WITHIN_BUDGET
    third, again, _ = stage(tmp_path, scripts)
    run(third, scripts)
    assert again.count("judge") == 0


def test_a_candidate_that_ran_out_of_time_is_tried_again_with_more_of_it(tmp_path: Path) -> None:
    scripts = {INT8: Script(speed=2, build_seconds=100)}
    first, _, _ = stage(tmp_path, scripts, seconds=60)
    assert run(first, scripts)[INT8].facts.outcome is Outcome.FAILED
    second, _, _ = stage(tmp_path, scripts, seconds=600)

    assert run(second, scripts)[INT8].facts.outcome is Outcome.SLOWER


@pytest.mark.parametrize(
    "failure",
    [
        WorkerFailed(CallFailure.DIED, death_reason(-9, "")),
        WorkerFailed(CallFailure.RAISED, "MemoryError: 90 MB"),
        WorkerFailed(CallFailure.RAISED, "RuntimeError: std::bad_alloc"),
    ],
)
def test_a_candidate_that_ran_out_of_memory_is_tried_again_when_the_search_continues(
    tmp_path: Path, failure: WorkerFailed
) -> None:
    first, _, _ = stage(tmp_path, {INT8: Script(fails={"judge": failure})})
    facts = run(first, {INT8: Script()})[INT8].facts
    second, runner, _ = stage(tmp_path, {INT8: Script(speed=2)})

    assert (facts.outcome, facts.reason) == (Outcome.FAILED, failure.reason)
    assert run(second, {INT8: Script()})[INT8].facts.reason_code is ReasonCode.WITHIN_BUDGET
    assert runner.count("judge", INT8) == 1
