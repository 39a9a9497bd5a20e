"""Concludes an optimisation: the outcome of each candidate, the findings, and the artefact folder.

Conclusions are pure functions. A folder is written as a whole or not at all.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from penstock.capacity import CapacityCurve
from penstock.manifest import MANIFEST_NAME, CandidateFacts, Manifest, Outcome, PlanTrial, ReasonCode, served_latency
from penstock.recipe import Plan, Recipe
from penstock_optimizer.candidate.work_folder import REPORT_NAME, digests
from penstock_optimizer.report.view import render_report, why_fp32
from penstock_optimizer.search.climb import SearchStep
from penstock_optimizer.search.space import expected_milliseconds
from penstock_runtime.models.files import copy_within
from penstock_runtime.models.folder import TOKENIZER, ModelFolder
from penstock_runtime.tokens.convert import convert

MODEL_FOLDER = "model"


def graph_path(recipe: Recipe, graph: Path) -> str:
    """Path of a recipe's graph in the artefact, such as `model/onnxruntime-fp32/model.onnx`."""
    return f"{MODEL_FOLDER}/{recipe.slug}/{graph.name}"


def write_artefact(
    target: Path,
    manifest: Manifest,
    *,
    folder: ModelFolder,
    graphs: Mapping[Recipe, Path],
) -> Manifest:
    """Write the artefact folder `target` atomically: an older one is replaced only by a complete one.

    The caller holds a lock, so that one process writes at a time; drafts of killed writers are deleted. `manifest`:
    without its files, whose digests are added. `graphs`: the graphs to serve; other files in a graph's folder (external
    weights) are copied too.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(target)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        # mkdtemp makes a folder for its owner only; the server may run as another user.
        draft.chmod(0o755)
        for path in folder.settings:
            copy_within(folder.path, path, draft / path.relative_to(folder.path))
        if folder.tokenizer.name != TOKENIZER:
            (draft / TOKENIZER).write_bytes(convert(folder.path, folder.config))
        for name, contents in folder.artefact_files.items():
            (draft / name).write_bytes(contents)
        for recipe, graph in graphs.items():
            for path in sorted(graph.parent.iterdir()):
                if path.is_file():
                    _copy(path, draft / MODEL_FOLDER / recipe.slug / path.name)
        manifest = manifest.model_copy(update={"files": digests(draft)})
        (draft / REPORT_NAME).write_text(render_report(manifest), encoding="utf-8")
        (draft / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        _replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return manifest


def remove_drafts(target: Path) -> None:
    """Delete the drafts of killed writers of `target`; each is as large as the artefact. The caller holds the lock."""
    for path in _drafts(target):
        shutil.rmtree(path, ignore_errors=True)


def has_drafts(target: Path) -> bool:
    """True while a process writes `target`, and after a writer was killed."""
    return bool(_drafts(target))


def _drafts(target: Path) -> list[Path]:
    """Drafts of `target`, and the artefact that one replaced."""
    return [path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}-")]


def _copy(source: Path, target: Path) -> None:
    """Copy contents, not links or modes: an artefact must not depend on its sources. No hard link either: a source
    rewritten in place would change the artefact."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _replace(draft: Path, target: Path) -> None:
    """Move the draft into place. A server with open files of the old one keeps them until it closes them."""
    if not target.exists():
        draft.replace(target)
        return
    old = draft.with_name(f"{draft.name}-old")
    target.replace(old)
    draft.replace(target)
    shutil.rmtree(old, ignore_errors=True)


NEAR = 1.05
"""Within this factor of the chosen recipe's latency, the plan search decided."""
NOISY = 0.15
"""Above this scatter of repeated measurements, small differences mean nothing."""


def conclude(
    candidates: Sequence[CandidateFacts],
    *,
    chosen: Plan,
    reference: Recipe,
    expected: Sequence[int],
    steps: Sequence[SearchStep],
    search_finished: bool = True,
) -> tuple[CandidateFacts, ...]:
    """The candidates with their final outcomes and reasons. `expected`: lengths to weigh the latency over."""
    if not search_finished:
        candidates = _without_turn(candidates, chosen=chosen, expected=expected, steps=steps)
    by_recipe = {one.recipe: one for one in candidates}
    return tuple(
        _concluded(one, by_recipe, chosen=chosen, reference=reference, expected=expected, steps=steps)
        for one in candidates
    )


def _is_open(facts: CandidateFacts) -> bool:
    """True for a candidate that passed the guard and was not ruled out before the plan search."""
    return facts.outcome is Outcome.SLOWER and facts.reason_code is ReasonCode.WITHIN_BUDGET


def _without_turn(
    candidates: Sequence[CandidateFacts], *, chosen: Plan, expected: Sequence[int], steps: Sequence[SearchStep]
) -> list[CandidateFacts]:
    """Mark as skipped the candidates that are faster than the chosen one as measured, but of which the plan search had
    no time to try a plan."""
    tried = {plan.recipe for step in steps for plan in (step.challenger, step.incumbent)}.union(chosen.recipes)
    served = next((one for one in candidates if one.recipe == chosen.recipe), None)

    def is_left(one: CandidateFacts) -> bool:
        if one.recipe in tried or not _is_open(one):
            return False
        faster = _ratio(served, one, expected)
        return faster is not None and faster > NEAR

    return [one.settled(Outcome.SKIPPED, ReasonCode.NO_PLAN_TRIED) if is_left(one) else one for one in candidates]


def _concluded(
    facts: CandidateFacts,
    by_recipe: Mapping[Recipe, CandidateFacts],
    *,
    chosen: Plan,
    reference: Recipe,
    expected: Sequence[int],
    steps: Sequence[SearchStep],
) -> CandidateFacts:
    if facts.recipe == chosen.recipe:
        gain = _ratio(by_recipe.get(reference), facts, expected)
        if facts.recipe == reference:
            reason = why_fp32([one for one in by_recipe.values() if one.recipe != reference])
        elif gain is None:
            reason = "best for the objective within the accuracy budget"
        else:
            reason = (
                f"best for the objective within the accuracy budget: {gain:.1f} times as fast as fp32 over the workload"
            )
        return facts.settled(Outcome.CHOSEN, reason)
    if chosen.short is not None and facts.recipe == chosen.short.recipe:
        reason = f"serves rows of up to {chosen.short.longest_tokens} tokens next to {chosen.recipe.name}"
        return facts.settled(facts.outcome, f"{reason}, which it is faster than there")
    if not _is_open(facts):
        return facts
    slower = _ratio(facts, by_recipe.get(chosen.recipe), expected)
    lost = next(
        (step for step in reversed(steps) if step.challenger.recipe == facts.recipe and not step.promoted), None
    )
    won = (step for step in reversed(steps) if step.promoted and step.challenger.recipe != facts.recipe)
    beaten = next((step for step in won if step.incumbent.recipe == facts.recipe), None)
    if lost is not None and (slower is None or slower <= NEAR):
        reason = f"{lost.reason}, against {lost.incumbent.recipe.name}"
    elif beaten is not None and (slower is None or slower <= NEAR):
        reason = f"{beaten.challenger.recipe.name} was {beaten.reason}"
    elif slower is not None and slower > 1.0:
        reason = f"{slower:.2f} times the latency of the chosen recipe over the workload"
    else:
        times = f"{1 / slower:.2f} times " if slower is not None and slower < 1 / NEAR else ""
        reason = f"{times}as fast as the chosen recipe over the workload; no plan of it was tried"
    return facts.settled(facts.outcome, reason)


def _ratio(slow: CandidateFacts | None, fast: CandidateFacts | None, expected: Sequence[int]) -> float | None:
    """Expected latency of the one over that of the other; None when either was not measured."""
    if slow is None or fast is None or not slow.latency or not fast.latency:
        return None
    return expected_milliseconds(slow.milliseconds, expected) / expected_milliseconds(fast.milliseconds, expected)


def speed_up(reference: CandidateFacts, plan: Plan, by_recipe: Mapping[Recipe, CandidateFacts]) -> dict[int, float]:
    """fp32 time over that of the chosen plan, by tokens."""
    slow = reference.milliseconds
    fast = {point.tokens: point.p50_milliseconds for point in served_latency(plan, by_recipe.values())}
    return {tokens: slow[tokens] / fast[tokens] for tokens in sorted(slow.keys() & fast.keys()) if fast[tokens] > 0}


def plan_trials(steps: Sequence[SearchStep]) -> tuple[PlanTrial, ...]:
    """The plan search as the manifest stores it."""
    return tuple(
        PlanTrial(plan=step.challenger, against=step.incumbent, promoted=step.promoted, reason=step.reason)
        for step in steps
    )


def findings(
    *,
    candidates: Sequence[CandidateFacts],
    reference: Recipe,
    plan: Plan,
    second_graph_bytes: int | None = None,
    noise: float,
    skipped_for_time: int,
    search_finished: bool,
    shared_cpus: bool,
    capacity: CapacityCurve,
    asked_requests_per_second: float | None = None,
    texts: Sequence[str] = (),
    host: Sequence[str],
) -> tuple[str, ...]:
    """What a reader should know, the most important first.

    `asked_requests_per_second`: the rate for one replica within the endpoint's p95; None when the endpoint does not ask
    for both, or the curve is incomplete. `texts`: those of the endpoint's workload.
    """
    found = []
    if (missed := _missed(capacity, asked_requests_per_second)) is not None:
        found.append(missed)
    if skipped_for_time:
        found.append(
            f"The time budget ended before {skipped_for_time} candidate{'s' if skipped_for_time > 1 else ''} "
            "had a turn: a larger one goes on from here."
        )
    if not search_finished:
        found.append("The time budget ended the plan search before all neighbours of the plan were tried.")
    if noise > NOISY:
        found.append(
            f"Repeated measurements differed by {noise:.0%}: something else ran on this machine, or its clock moved. "
            "Differences below that are not to be trusted."
        )
    first = next((one for one in candidates if one.recipe == reference), None)
    if first is not None and not first.fused_nodes:
        found.append("Nothing was fused in the fp32 graph: this architecture runs node by node, slower than it could.")
    if plan.recipe == reference and any(one.outcome is Outcome.REJECTED for one in candidates):
        found.append(
            "Faster candidates were rejected for their answers: see the accuracy budget "
            "(docs/reference/accuracy-budgets.md)."
        )
    if plan.short is not None:
        size = next((one.size_bytes for one in candidates if one.recipe == plan.short.recipe), 0)
        memory = f"{second_graph_bytes / 1e6:.0f} MB of memory" if second_graph_bytes else "its memory was not measured"
        found.append(
            f"Rows of up to {plan.short.longest_tokens} tokens have a graph of their own ({plan.short.recipe.name}): "
            f"{memory}, {size / 1e6:.0f} MB of the artefact."
        )
    if shared_cpus:
        found.append(
            "The load generator shared the cores with the server, since there were no others: "
            "its own work is in the latencies of the capacity curve."
        )
    if (repeated := repeated_share(texts)) >= WORTH_CACHING:
        found.append(
            f"{repeated:.0%} of the workload's texts repeat an earlier one: serving.caches.answersMebibytes answers "
            "such requests from memory."
        )
    return (*found, *(f"{one[:1].upper()}{one[1:].rstrip('.')}." for one in host))


WORTH_CACHING = 0.1
"""From this share of repeated texts on, the cache of answers is recommended."""


def repeated_share(texts: Sequence[str]) -> float:
    """The share of texts that repeat an earlier one; 0 without texts."""
    return 1 - len(set(texts)) / len(texts) if texts else 0.0


def _missed(capacity: CapacityCurve, asked: float | None) -> str | None:
    """A sentence when the rate that the endpoint asks for is not reached within its p95."""
    limit, rate = capacity.p95_objective_milliseconds, capacity.requests_per_second
    if asked is None or limit is None or (rate or 0.0) >= asked:
        return None
    reached = f"takes {rate:,.4g} of them" if rate is not None else "is over that p95 at any rate that was measured"
    return (
        f"The {asked:,.4g} requests/s within a p95 of {limit:,.4g} ms are not reached: one replica {reached}. "
        "Give it more cores, or ask for less."
    )


def measured_noise(search: float, candidates: Sequence[CandidateFacts]) -> float:
    """Relative scatter of repeated measurements: the larger one of the plan search and of the single runs."""
    spreads = [point.spread for one in candidates for point in one.latency]
    return max(search, median(spreads) if spreads else 0.0)
