"""Numbers that hand-written pages repeat are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_operator.facts import pod_data, pods
from penstock_operator.scaling.read import scrape
from penstock_optimizer.capacity import curve
from penstock_optimizer.guard import calibration, gate
from penstock_optimizer.search import climb, goal, space
from penstock_optimizer.targets import target
from penstock_runtime.batching import batcher
from penstock_runtime.generation import scheduler
from penstock_runtime.serving import tokenizing

PAGES = Path(__file__).parents[2] / "docs" / "explanation"


def percent(share: float) -> str:
    return f"{share * 100:.2g} %"


CORPUS = calibration.own_corpus()
TEXTS = len(CORPUS.texts) + sum(len(theme.sentences) for theme in CORPUS.themes)
SHORT, MIDDLE, LONG, LONGEST = (percent(share) for _, share in calibration.STRATA)
STATED = {
    "operator.md": (
        f"`/info` and `/metrics` {pod_data.INFO_MAX_BYTES // 1024} KiB",
        f"waiting requests {pod_data.DEMAND_MAX_BYTES} bytes",
        f"progress of a job {pod_data.PROGRESS_MAX_BYTES // 1024} KiB",
        f"termination message {pod_data.MESSAGE_MAX_BYTES // 1024} KiB",
        f"at most {pod_data.MAX_DEPTH} levels",
        f"{pods.MAX_CPUS:,} CPUs and {scrape.MAX_BUCKETS} histogram buckets",
    ),
    "guard.md": (
        f"some {round(TEXTS, -1)} texts",
        {18: "eighteen themes"}[len(CORPUS.themes)],
        f"At most {calibration.JUDGING_SAMPLES} requests judge, {SHORT} of them of up to 8 tokens, {MIDDLE} up to 32",
        f"{LONG} up to 128 and {LONGEST} longer",
        f"within {percent(gate.TOLERANCE)} (relative",
        f"it is {percent(gate.BF16_TOLERANCE)},",
    ),
    "optimiser.md": (
        f"{percent(target.CAPACITY_SHARE)} for the capacity curve ({target.MOST_CAPACITY_SECONDS:g} s at most)",
        f"{percent(target.PLANS_SHARE)} for the plans ({target.MOST_PLANS_SECONDS:g} s at most)",
        f"{percent(target.FINISH_SHARE)} for the report ({target.MOST_FINISH_SECONDS:g} s at most)",
        f"at most {percent(target.MAX_REMAINING_SHARE)} of what is left",
        f"Latencies within {percent(goal.NEAR_LATENCY)} of each other",
        f"{space.BATCH_ROWS[1]} to {space.BATCH_ROWS[-1]} rows",
        f"{space.BATCH_TOKENS[0]} to {space.BATCH_TOKENS[-1]:,} tokens",
        f"more than {percent(space.LEAST_GAIN)} and the noise",
        {5: "up to five times in turn"}[climb.MOST_PAIRS],
        f"rise by a factor of {curve.GROWTH}",
        {4: "halved at most four times"}[curve.REFINEMENTS],
    ),
    "batching.md": (
        f"at most {batcher.MIN_SHARED_TOKENS} tokens together",
        f"in about {batcher.MIN_SHARED_SECONDS * 1000:g} ms",
        f"longer than about {batcher.BRIEF_RUN_SECONDS * 1000:g} ms",
        f"of {batcher.BRIEF_RUN_TOKENS} tokens at least",
        f"over {tokenizing.LONG_CHARACTERS:,} characters",
    ),
    "generation.md": (f"chunks have {scheduler.DEFAULT_BUDGET} tokens",),
}


@pytest.mark.parametrize(("page", "text"), [(page, text) for page, texts in STATED.items() for text in texts])
def test_a_page_states_a_number_of_the_code(page: str, text: str) -> None:
    assert text in " ".join((PAGES / page).read_text(encoding="utf-8").split())
