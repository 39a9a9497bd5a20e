"""Computes the verdict: compares the answers of a candidate and of the fp32 reference, by task. Pure.

No labels are needed: the reference is right by definition. docs/reference/accuracy-budgets.md gives the reason for each
metric and budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.manifest import Metric, Verdict
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import TaskName
from penstock_optimizer.guard import agreement
from penstock_optimizer.guard.agreement import bootstrap_lower, wilson_lower
from penstock_runtime.rows import Float
from penstock_runtime.tasks.embeddings.sparse_vectors import PAIR


@dataclass(frozen=True)
class SampleRequest:
    """A request of the calibration or judging set, in the HF shape."""

    inputs: Any
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ObservedAnswer:
    """The outcome of one request."""

    answer: Any
    """In the HF shape, as `Task.assemble` gives it."""
    reduced: tuple[Any, ...] = ()
    """The result of `Task.reduce` for each row."""


MEAN_COSINE = 0.985
"""Embeddings: the least mean over the texts; the lower end of its interval must reach it."""
P1_COSINE = 0.95
"""Embeddings: at most one text in a hundred may have a lower cosine."""
MIN_COSINE = 0.90
"""Embeddings: no text may have a lower one. Texts of few words set the minimum, since they average little rounding
error out."""
NEIGHBOURS = 10
MIN_NEIGHBOUR_OVERLAP = 0.80
"""Embeddings: the least mean share of the ten nearest texts that stay the same."""
MAX_SIMILARITY_CHANGE = 0.05
"""Similarity: the largest change of any value, on the scale from -1 to 1."""
MIN_AGREEMENT = {
    TaskName.SENTENCE_SIMILARITY: 0.95,
    TaskName.TEXT_RANKING: 0.95,
    TaskName.TEXT_CLASSIFICATION: 0.97,
    TaskName.TOKEN_CLASSIFICATION: 0.97,
    TaskName.QUESTION_ANSWERING: 0.90,
    TaskName.FILL_MASK: 0.90,
    TaskName.ZERO_SHOT_CLASSIFICATION: 0.95,
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: 0.97,
}
"""The least share of answers that stay the same, where the endpoint states none."""
COSINE_TASKS = frozenset({TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY})
"""The tasks that minCosine applies to; minAgreement applies to all but feature-extraction."""
TIE = 0.02
"""Two labels with reference scores this close tie: either is right."""
MAX_DIVERGENCE = 0.02
"""Classification: mean Kullback-Leibler divergence, nats."""
MAX_FLIPPED_MARGIN = 0.005
"""Classification: mean over all texts of the lead that the reference's label had where another label won."""
MIN_TAU = 0.90
"""Ranking: mean Kendall tau."""
MIN_ENTITY_F1 = 0.95
MIN_SPAN_F1 = 0.93
ENTITY_THRESHOLD = 0.5
"""Zero-shot entities: the score of a span that is an entity."""
NEAR_THRESHOLD = 0.1
"""Spans with lower scores by both models are not compared: nearly all are."""
MIN_TOP_K_OVERLAP = 0.85
"""Fill-mask: the least mean share of the best tokens that stay among the best."""
SCORE_CHANGE = 0.2
"""Regression: the largest change, as a share of the spread of the scores over the texts."""
SUM_TOLERANCE = 0.01
"""Scores of a text with a sum that differs from 1 by more than this are not a distribution."""
FEW_SAMPLES = 60
"""With fewer samples the verdict mentions the uncertainty."""


@dataclass(frozen=True)
class _Case:
    """The data that the metrics of a task are computed from."""

    reference: Sequence[ObservedAnswer]
    candidate: Sequence[ObservedAnswer]
    agreement: float
    stated_cosine: float | None
    """The endpoint's budget, for every text."""

    def answers(self) -> list[tuple[Any, Any]]:
        return [(a.answer, b.answer) for a, b in zip(self.reference, self.candidate, strict=True)]


def judge(
    task: TaskName, reference: Sequence[ObservedAnswer], candidate: Sequence[ObservedAnswer], budget: AccuracyBudget
) -> Verdict:
    """Compare a candidate's answers with the reference's, sample by sample.

    Fails closed: no samples, another number of answers, or a value that is not finite are rejected.
    """
    if not reference:
        return Verdict(passed=False, reason="there was nothing to judge with: no samples")
    if len(reference) != len(candidate):
        return Verdict(
            passed=False, reason=f"{len(candidate)} answers for {len(reference)} samples", texts=len(candidate)
        )
    broken = sum(not finite(observed.answer) for observed in candidate)
    if broken:
        return Verdict(passed=False, reason=f"{broken} answers hold NaN or infinity", texts=len(candidate))
    case = _Case(
        reference,
        candidate,
        agreement=budget.min_agreement if budget.min_agreement is not None else MIN_AGREEMENT.get(task, 0.0),
        stated_cosine=budget.min_cosine,
    )
    metrics = _METRICS[task](case)
    return Verdict(
        passed=all(metric.passed for metric in metrics),
        reason=explain(metrics, len(reference)),
        metrics=metrics,
        texts=len(reference),
    )


def unused_budgets(task: TaskName, budget: AccuracyBudget) -> tuple[str, ...]:
    """A sentence for each stated budget that does not apply to the task."""
    found = []
    if budget.min_cosine is not None and task not in COSINE_TASKS:
        found.append(f"{task.value} has no cosines: accuracy.minCosine decides nothing there. State minAgreement")
    if budget.min_agreement is not None and task is TaskName.FEATURE_EXTRACTION:
        found.append(f"{task.value} answers with vectors: accuracy.minAgreement decides nothing there. State minCosine")
    return tuple(found)


def explain(metrics: Sequence[Metric], texts: int) -> str:
    """One sentence: the metrics outside the budget, or the first metrics; and the uncertainty, if any."""
    failed = [metric for metric in metrics if not metric.passed]
    if failed:
        return " and ".join(_miss(metric) for metric in failed)
    doubtful = [m for m in metrics if m.lower is not None and m.higher_is_better and m.lower < m.budget]
    sentence = ", ".join(f"{metric.name} {_digits(metric)}" for metric in metrics[:2]) or "nothing measured"
    if texts < FEW_SAMPLES and doubtful:
        worst = min(doubtful, key=lambda metric: metric.budget - (metric.lower or 0.0))
        sentence += f"; on {texts} texts only: {worst.name} may be as low as {worst.lower:.3f}"
    return sentence


def _miss(metric: Metric) -> str:
    """Such as `min_cosine 0.844 is under the budget of 0.9`."""
    if metric.higher_is_better and metric.value >= metric.budget and metric.lower is not None:
        doubt = f"may be as low as {metric.lower:.4f}, under the budget of {metric.budget:g}"
        return f"{metric.name} {_digits(metric)} {doubt}"
    side = "under" if metric.higher_is_better else "over"
    return f"{metric.name} {_digits(metric)} is {side} the budget of {metric.budget:g}"


def _digits(metric: Metric) -> str:
    """Three decimals, or as many as it takes to differ from the budget."""
    for decimals in (3, 4, 5, 6):
        text = f"{metric.value:.{decimals}f}"
        if float(text) != metric.budget or metric.value == metric.budget:
            return text
    return f"{metric.value:g}"


def finite(answer: Any) -> bool:
    """True when no number anywhere in an answer is NaN or infinite."""
    match answer:
        case float():
            return math.isfinite(answer)
        case np.ndarray() | np.floating():
            return bool(np.all(np.isfinite(answer)))
        case dict():
            return all(finite(value) for value in answer.values())
        case list() | tuple():
            return all(finite(value) for value in answer)
        case _:
            return True


def _least(name: str, value: float, budget: float, lower: float | None = None) -> Metric:
    return Metric(name=name, value=value, lower=lower, budget=budget, passed=bool(value >= budget))


def _most(name: str, value: float, budget: float) -> Metric:
    return Metric(name=name, value=value, budget=budget, higher_is_better=False, passed=bool(value <= budget))


def _share(name: str, hits: Sequence[bool], budget: float) -> Metric:
    successes = sum(hits)
    return _least(name, successes / len(hits), budget, wilson_lower(successes, len(hits)))


def _mean(name: str, values: Sequence[float], budget: float) -> Metric:
    return _least(name, float(np.mean(values)), budget, bootstrap_lower(values))


def _embeddings(case: _Case) -> tuple[Metric, ...]:
    """For one vector a text, sparse or not, or the matrix of its token vectors; of a model with several of these, the
    least like one of each text counts."""
    kinds: dict[tuple[bool, int], tuple[list[Any], list[Any]]] = {}
    for side, observations in enumerate((case.reference, case.candidate)):
        for one in (np.asarray(array) for observed in observations for array in observed.reduced):
            kinds.setdefault((one.dtype == PAIR, one.ndim), ([], []))[side].append(one)
    if any(is_sparse for is_sparse, _ in kinds):
        before, after = kinds.pop((True, 1))
        tokens = np.unique(np.concatenate([one["index"] for one in (*before, *after)]))
        kinds[True, 1] = [_dense(one, tokens) for one in before], [_dense(one, tokens) for one in after]
    compared = [agreement.cosines(before, after) for before, after in kinds.values()]
    metrics = list(_cosines(case.stated_cosine, np.minimum.reduce(compared)))
    pooled = [pair for (_, axes), pair in kinds.items() if axes == 1]  # one vector a text
    if pooled:
        kept = np.minimum.reduce([agreement.neighbour_overlap(before, after, NEIGHBOURS) for before, after in pooled])
        metrics.append(_mean("neighbour_overlap", kept.tolist(), MIN_NEIGHBOUR_OVERLAP))
    return tuple(metrics)


def _dense(pairs: NDArray[Any], tokens: NDArray[np.int64]) -> Float:
    """The weights of `tokens`, which are sorted and all that any text has."""
    vector = np.zeros(len(tokens), np.float32)
    vector[np.searchsorted(tokens, pairs["index"])] = pairs["value"]
    return vector


def _cosines(stated: float | None, cosines: agreement.Vector) -> tuple[Metric, ...]:
    """The mean and how far single texts may be from it, the deciding one first; a budget that the endpoint states
    applies to each."""
    mean = _mean("mean_cosine", cosines.tolist(), MEAN_COSINE if stated is None else stated)
    # The lower end of the interval counts: a recipe must not be within the budget by chance.
    surely = mean.model_copy(update={"passed": bool(mean.lower is not None and mean.lower >= mean.budget)})
    p1 = _least("p1_cosine", float(np.percentile(cosines, 1)), P1_COSINE if stated is None else stated)
    least = _least("min_cosine", float(cosines.min()), MIN_COSINE if stated is None else stated)
    return (surely, p1, least) if stated is None else (least, p1, surely)


def _similarity(case: _Case) -> tuple[Metric, ...]:
    changes = [abs(a - b) for before, after in case.answers() for a, b in zip(before, after, strict=True)]
    top = [_same_top(before, after) for before, after in case.answers()]
    return (
        *_embeddings(case)[:3],
        _most("max_similarity_change", max(changes), MAX_SIMILARITY_CHANGE),
        _share("top1_agreement", top, case.agreement),
    )


def _same_top(before: Sequence[float], after: Sequence[float]) -> bool:
    """True when the candidate's best is the reference's best, or ties with it."""
    return before[int(np.argmax(after))] >= max(before) - TIE


def _classification(case: _Case) -> tuple[Metric, ...]:
    pairs = [
        (_by_label(one), _by_label(other))
        for before, after in case.answers()
        for one, other in zip(_nested(before), _nested(after), strict=True)
    ]
    values = [value for before, _ in pairs for value in before.values()]
    if all(len(before) == 1 for before, _ in pairs) or min(values) < 0 or max(values) > 1:
        return _scores(case, pairs)
    if any(abs(sum(before.values()) - 1) > SUM_TOLERANCE for before, _ in pairs):
        return _independent(pairs, case.agreement)
    return _distributions(pairs, case.agreement)


def _by_label(entries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The scores of a text's labels. Of labels with the same name, the best score goes by the name, the next ones by
    the name and a suffix: the answer does not tell them apart, and the best decides the order."""
    found: dict[str, float] = {}
    for entry in sorted(entries, key=lambda entry: -entry["score"]):
        name = entry["label"]
        while name in found:
            name += "\0"
        found[name] = entry["score"]
    return found


def _nested(answer: Any) -> list[Any]:
    """The list of labels for each text: the answer for one text may lack the outer list."""
    return [answer] if answer and isinstance(answer[0], dict) else list(answer)


def _distributions(pairs: Sequence[tuple[dict[str, float], dict[str, float]]], budget: float) -> tuple[Metric, ...]:
    hits, flipped, divergences = [], [], []
    for before, after in pairs:
        (label, _), (other, _) = agreement.best_and_margin(before), agreement.best_and_margin(after)
        lead = before[label] - before.get(other, 0.0)
        hits.append(lead <= TIE)
        flipped.append(lead)
        divergences.append(agreement.divergence(before, after))
    return (
        _share("argmax_agreement", hits, budget),
        _most("mean_divergence", float(np.mean(divergences)), MAX_DIVERGENCE),
        _most("flipped_margin", float(np.mean(flipped)), MAX_FLIPPED_MARGIN),
    )


def _independent(pairs: Sequence[tuple[dict[str, float], dict[str, float]]], budget: float) -> tuple[Metric, ...]:
    """For labels that are true or false independently."""
    hits = [
        (before[label] >= 0.5) == (after[label] >= 0.5) or abs(before[label] - 0.5) <= TIE / 2
        for before, after in pairs
        for label in before
    ]
    divergences = [
        agreement.divergence(
            {"yes": before[label], "no": 1 - before[label]}, {"yes": after[label], "no": 1 - after[label]}
        )
        for before, after in pairs
        for label in before
    ]
    return (
        _share("label_agreement", hits, budget),
        _most("mean_divergence", float(np.mean(divergences)), MAX_DIVERGENCE),
    )


def _scores(case: _Case, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> tuple[Metric, ...]:
    """For scores that are no distribution (regression, or a single yes or no): changes in units of the spread of a
    label's scores over the texts, and the order of the texts."""
    hits: list[bool] = []
    taus = []
    for label in pairs[0][0]:
        before, after = (np.array([both[side][label] for both in pairs]) for side in (0, 1))
        allowed = max(SCORE_CHANGE * float(before.std()), TIE)
        hits += (np.abs(after - before) <= allowed).tolist()
        taus.append(agreement.kendall_tau(before.tolist(), after.tolist()))
    return (_share("score_agreement", hits, case.agreement), _least("kendall_tau", min(taus), MIN_TAU))


def _tokens(case: _Case) -> tuple[Metric, ...]:
    hits: list[bool] = []
    found, total = [], []
    for before, after in case.answers():
        labels = [[str(entry["entity"]) for entry in answer] for answer in (before, after)]
        hits += [a == b for a, b in zip(*labels, strict=True)]
        twice, sizes = agreement.f1(agreement.entities(labels[0]), agreement.entities(labels[1]))
        found.append(float(twice))
        total.append(float(sizes))
    metrics = [_share("token_agreement", hits or [True], case.agreement)]
    if sum(total):
        shares = [a / b if b else 0.0 for a, b in zip(found, total, strict=True)]
        value = sum(found) / sum(total)
        metrics.append(_least("entity_f1", value, min(MIN_ENTITY_F1, case.agreement), bootstrap_lower(shares, total)))
    return tuple(metrics)


def _ranking(case: _Case) -> tuple[Metric, ...]:
    taus, top = [], []
    for before, after in case.answers():
        first, second = ({entry["index"]: entry["score"] for entry in answer} for answer in (before, after))
        order = sorted(first)
        taus.append(agreement.kendall_tau([first[i] for i in order], [second[i] for i in order]))
        top.append(_same_top([first[i] for i in order], [second[i] for i in order]))
    return (_share("top1_agreement", top, case.agreement), _mean("kendall_tau", taus, MIN_TAU))


def _spans(case: _Case) -> tuple[Metric, ...]:
    hits, overlaps = [], []
    for before, after in case.answers():
        one, other = (before["start"], before["end"]), (after["start"], after["end"])
        hits.append(one == other)
        overlaps.append(agreement.character_f1(one, other))
    return (_share("span_match", hits, case.agreement), _mean("span_f1", overlaps, MIN_SPAN_F1))


def _masks(case: _Case) -> tuple[Metric, ...]:
    hits, overlaps = [], []
    for before, after in case.answers():
        one, other = ([entry["token"] for entry in answer] for answer in (before, after))
        scores = {entry["token"]: entry["score"] for entry in before}
        hits.append(one[:1] == other[:1] or scores.get(other[0], 0.0) >= before[0]["score"] - TIE)
        overlaps.append(agreement.overlap(one, other))
    return (_share("top1_agreement", hits, case.agreement), _mean("top_k_overlap", overlaps, MIN_TOP_K_OVERLAP))


def _zero_shot(case: _Case) -> tuple[Metric, ...]:
    pairs = [
        tuple(dict(zip(answer["labels"], answer["scores"], strict=True)) for answer in both) for both in case.answers()
    ]
    return _distributions([(before, after) for before, after in pairs], case.agreement)


def _entities(case: _Case) -> tuple[Metric, ...]:
    """The entities over the threshold, and the decision about each span that is not far below it."""
    hits: list[bool] = []
    for before, after in zip(case.reference, case.candidate, strict=True):
        one, other = (np.concatenate([np.ravel(array) for array in side.reduced]) for side in (before, after))
        near = np.maximum(one, other) >= NEAR_THRESHOLD
        same = (one >= ENTITY_THRESHOLD) == (other >= ENTITY_THRESHOLD)
        hits += (same | (np.abs(one - ENTITY_THRESHOLD) <= TIE))[near].tolist()
    metrics = [_share("span_agreement", hits or [True], case.agreement)]
    found, total = [], []
    for answers in case.answers():
        sets = [{(one["start"], one["end"], one["entity_group"]) for one in answer} for answer in answers]
        twice, sizes = agreement.f1(sets[0], sets[1])
        found.append(float(twice))
        total.append(float(sizes))
    if sum(total):
        shares = [a / b if b else 0.0 for a, b in zip(found, total, strict=True)]
        value = sum(found) / sum(total)
        metrics.append(_least("entity_f1", value, min(MIN_ENTITY_F1, case.agreement), bootstrap_lower(shares, total)))
    return tuple(metrics)


_METRICS: dict[TaskName, Callable[[_Case], tuple[Metric, ...]]] = {
    TaskName.FEATURE_EXTRACTION: _embeddings,
    TaskName.SENTENCE_SIMILARITY: _similarity,
    TaskName.TEXT_RANKING: _ranking,
    TaskName.TEXT_CLASSIFICATION: _classification,
    TaskName.TOKEN_CLASSIFICATION: _tokens,
    TaskName.QUESTION_ANSWERING: _spans,
    TaskName.FILL_MASK: _masks,
    TaskName.ZERO_SHOT_CLASSIFICATION: _zero_shot,
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: _entities,
}
