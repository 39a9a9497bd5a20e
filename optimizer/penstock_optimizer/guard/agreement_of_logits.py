"""Compares the logits of a candidate and of the fp32 model along the same texts, and gives the verdict. Pure.

Both are forced along the fp32 model's own continuations: after a first other token, free
continuations would be compared with unrelated texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.manifest import Metric, Verdict
from penstock_optimizer.guard.agreement import bootstrap_lower, wilson_lower
from penstock_runtime.rows import Float


@dataclass(frozen=True)
class TextAgreement:
    """One text: the figures of each of its positions, float64 [positions]."""

    divergence: NDArray[np.float64]
    """Kullback-Leibler divergence of the candidate's distribution of the next token from the fp32 one's, nats."""
    same_best: NDArray[np.bool_]
    """Whether the most likely token is the same."""
    surprise: NDArray[np.float64]
    """Negative logarithm of the probability of the continuation's token by the candidate, nats."""
    reference_surprise: NDArray[np.float64]
    """The same by the fp32 model."""


@dataclass(frozen=True)
class GenerationBudget:
    """How far a candidate may differ from fp32 (docs/reference/accuracy-budgets.md#text-generation).

    Measured with SmolLM2-135M: 8-bit plans have 0.004 to 0.012, 0.03 to 0.07 and 0.95; plans with broken text have
    0.5, 3.6 and 0.65.
    """

    mean_divergence: float = 0.02
    """Nats."""
    p99_divergence: float = 0.15
    same_best: float = 0.93
    """Share of the positions."""
    perplexity: float = 1.05
    """Ratio to the perplexity of fp32."""


def compare(expected: Float, actual: Float, tokens: NDArray[np.int32]) -> TextAgreement:
    """`expected` and `actual`: logits [positions, vocabulary]; `tokens` [positions]: the token that followed."""
    before, after = _log_probabilities(expected), _log_probabilities(actual)
    rows = np.arange(len(tokens))
    return TextAgreement(
        divergence=np.maximum((np.exp(before) * (before - after)).sum(1), 0.0),
        same_best=expected.argmax(1) == actual.argmax(1),
        surprise=-after[rows, tokens],
        reference_surprise=-before[rows, tokens],
    )


def judge_texts(texts: Sequence[TextAgreement], same_in_company: float, budget: GenerationBudget) -> Verdict:
    """The verdict on a candidate. `same_in_company`: the share of greedy tokens that stay the same when other sequences
    share the steps; it is reported, and not judged."""
    divergence = np.concatenate([text.divergence for text in texts])
    same = np.concatenate([text.same_best for text in texts])
    means = [float(text.divergence.mean()) for text in texts]
    sizes = [float(text.divergence.size) for text in texts]
    surprise = sum(float(text.surprise.sum()) for text in texts) / same.size
    reference = sum(float(text.reference_surprise.sum()) for text in texts) / same.size
    # The upper end of the interval, as the lower one of the negative values.
    highest = -bootstrap_lower([-value for value in means], sizes)
    ratio = float(np.exp(surprise - reference))
    metrics = (
        _at_most("mean_divergence", float(divergence.mean()), budget.mean_divergence),
        _at_most("p99_divergence", float(np.quantile(divergence, 0.99)), budget.p99_divergence),
        _at_least("same_best_token", float(same.mean()), budget.same_best, wilson_lower(float(same.sum()), same.size)),
        _at_most("perplexity_ratio", ratio, budget.perplexity),
        _at_least("same_in_company", same_in_company, 0.0, same_in_company),
    )
    failed = [metric for metric in metrics if not metric.passed]
    if failed:
        first = failed[0]
        relation = "under" if first.higher_is_better else "over"
        reason = f"{first.name} {first.value:.3g} is {relation} the budget of {first.budget:g}"
    else:
        reason = (
            f"mean divergence {divergence.mean():.2g} (95 % interval up to {highest:.2g}), "
            f"the same best token at {same.mean():.1%} of the positions"
        )
    return Verdict(passed=not failed, reason=reason, metrics=metrics, texts=len(texts))


def _log_probabilities(logits: Float) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    return result


def _at_most(name: str, value: float, budget: float) -> Metric:
    return Metric(name=name, value=value, budget=budget, higher_is_better=False, passed=value <= budget)


def _at_least(name: str, value: float, budget: float, lower: float) -> Metric:
    return Metric(name=name, value=value, lower=lower, budget=budget, passed=value >= budget)
