"""Sampling: the distribution, the seeds, the penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_runtime.generation.sampling import (
    SamplingParameters,
    TokenHistory,
    _largest,
    _pick,
    distribution,
    sample,
    uniform,
)

LOGITS = np.array([0.0, 1.0, 3.0, 2.0, -1.0], dtype=np.float32)
NO_HISTORY = TokenHistory(())


def kept(**parameters: Any) -> list[int]:
    tokens, probabilities = distribution(LOGITS, SamplingParameters(**parameters))
    assert probabilities.sum() == pytest.approx(1)
    return sorted(tokens.tolist())


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [2, 3]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [2]),
        ({"top_p": 0.7}, [2, 3]),
        ({"top_p": 0.0}, [2]),
        ({"min_p": 0.3}, [2, 3]),
        ({"min_p": 1.0}, [2]),
        ({"top_k": 3, "top_p": 0.9}, [2, 3]),
        ({"temperature": 0.1, "top_p": 0.9}, [2]),
    ],
)
def test_the_most_probable_tokens_stay(parameters: dict[str, Any], expected: list[int]) -> None:
    assert kept(**parameters) == expected


def test_tokens_come_as_often_as_they_are_probable() -> None:
    parameters = [SamplingParameters(seed=seed) for seed in range(4000)]
    counts = np.bincount([sample(LOGITS, one, NO_HISTORY, 0).token for one in parameters], minlength=5)
    expected = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert np.abs(counts / 4000 - expected).max() < 0.03


def test_temperature_0_takes_the_most_probable_token() -> None:
    assert {sample(LOGITS, SamplingParameters(temperature=0, seed=seed), NO_HISTORY, 0).token for seed in range(9)} == {
        2
    }


def test_the_random_number_depends_on_seed_choice_and_position_alone() -> None:
    numbers = {uniform(*key) for key in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (2**64 - 1, 0, 0)]}
    assert len(numbers) == 5
    # The value is part of what a seed promises: the same tokens after an update.
    assert uniform(7, 0, 3) == 0.27019622095902107


def test_the_repetition_penalty_applies_to_prompt_and_continuation() -> None:
    history = TokenHistory([2])
    history.add(4)
    changed = history.penalise(LOGITS, SamplingParameters(repetition_penalty=2.0))
    assert changed.tolist() == [0, 1, 1.5, 2, -2]
    assert LOGITS.tolist() == [0, 1, 3, 2, -1]


def test_presence_and_frequency_penalties_apply_to_the_continuation_alone() -> None:
    history = TokenHistory([3])
    history.add(2)
    history.add(2)
    changed = history.penalise(LOGITS, SamplingParameters(presence_penalty=0.5, frequency_penalty=0.25))
    assert changed.tolist() == [0, 1, 2, 2, -1]


def test_a_bias_is_added_and_may_forbid_a_token() -> None:
    parameters = SamplingParameters(temperature=0, logit_bias={2: -100.0, 0: 10.0})
    assert sample(LOGITS, parameters, NO_HISTORY, 0).token == 0


def test_probabilities_are_those_of_the_model_before_penalties_and_temperature() -> None:
    parameters = SamplingParameters(temperature=0, logit_bias={2: -100.0}, top_logprobs=2)
    chosen = sample(LOGITS, parameters, NO_HISTORY, 0)
    logprobs = LOGITS - np.log(np.exp(LOGITS).sum())
    assert chosen.token == 3
    assert chosen.logprob == pytest.approx(float(logprobs[3]), abs=1e-6)
    assert [token for token, _ in chosen.top] == [2, 3]
    assert [value for _, value in chosen.top] == pytest.approx(logprobs[[2, 3]].tolist(), abs=1e-6)


@settings(deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=60),
    st.builds(
        SamplingParameters,
        temperature=st.floats(0.01, 4),
        top_k=st.integers(0, 70),
        top_p=st.floats(0, 1),
        min_p=st.floats(0, 1),
        seed=st.integers(0, 2**64 - 1),
    ),
)
def test_a_token_that_may_be_chosen_is_chosen(logits: list[float], parameters: SamplingParameters) -> None:
    row = np.array(logits, dtype=np.float32)
    tokens, probabilities = distribution(row, parameters)
    chosen = sample(row, parameters, NO_HISTORY, 5).token
    assert chosen in tokens or parameters.greedy
    assert row[chosen] >= row.max() - 1e-6 or len(tokens) > 1
    assert np.isfinite(probabilities).all()
    assert int(np.argmax(row)) in tokens or row[tokens].max() == row.max()


@pytest.mark.parity
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    ],
)
def test_the_distribution_is_that_of_transformers(parameters: dict[str, float]) -> None:
    import torch
    from transformers.generation import logits_process as theirs

    random = np.random.default_rng(3)
    prompt = random.integers(0, 500, size=20).tolist()
    logits = random.normal(scale=3, size=500).astype(np.float32)
    steps = theirs.LogitsProcessorList()
    if "repetition_penalty" in parameters:
        steps.append(theirs.RepetitionPenaltyLogitsProcessor(parameters["repetition_penalty"]))
    steps.append(theirs.TemperatureLogitsWarper(parameters.get("temperature", 1.0)))
    if "top_k" in parameters:
        steps.append(theirs.TopKLogitsWarper(int(parameters["top_k"])))
    if "top_p" in parameters:
        steps.append(theirs.TopPLogitsWarper(parameters["top_p"]))
    if "min_p" in parameters:
        steps.append(theirs.MinPLogitsWarper(parameters["min_p"]))
    expected = torch.softmax(steps(torch.tensor([prompt]), torch.tensor(logits)[None]), -1)[0].numpy()
    ours = SamplingParameters(**parameters)  # type: ignore[arg-type]
    tokens, probabilities = distribution(TokenHistory(prompt).penalise(logits, ours), ours)
    found = np.zeros(500)
    found[tokens] = probabilities
    assert np.abs(found - expected).max() < 1e-6


@settings(deadline=None)
@given(st.lists(st.floats(-9, 9, width=16), min_size=1, max_size=400), st.data())
def test_a_search_in_chunks_finds_what_a_plain_one_finds(values: list[float], data: st.DataObject) -> None:
    scores = np.array(values, dtype=np.float32)
    count = data.draw(st.integers(1, len(values)))
    least = np.sort(scores)[-count]
    assert _largest(scores, count).tolist() == np.flatnonzero(scores >= least).tolist()
    weights = np.exp(scores)
    number = data.draw(st.floats(0, 1, exclude_max=True))
    ends = np.cumsum(weights, dtype=np.float64)
    picked = _pick(weights, number)
    below = ends[picked - 1] if picked else 0.0
    assert below <= number * ends[-1] * (1 + 1e-9) + 1e-12
    assert number * ends[-1] <= ends[picked] * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.3, 1, 4])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.9, 0.999])
def test_top_p_keeps_what_sorting_all_tokens_keeps(scale: float, top_p: float) -> None:
    logits = (np.random.default_rng(1).normal(size=20_000) * scale).astype(np.float32)
    tokens, _ = distribution(logits, SamplingParameters(top_p=top_p))
    weights = np.exp(logits - logits.max())
    order = np.argsort(-weights, kind="stable")
    shares = np.cumsum(weights[order], dtype=np.float64)
    kept = max(1, int(np.count_nonzero(shares - weights[order] < top_p * weights.sum(dtype=np.float64))))
    assert tokens.tolist() == order[:kept].tolist()
