"""Numbers that hand-written pages repeat are those of the code."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from penstock.prices.pod_costs import PROCESS
from penstock.resources.endpoint import BUDGET_SECONDS
from penstock.resources.endpoint_parts.rollout import Rollout
from penstock.tasks import TaskName
from penstock_gateway import config as gateway
from penstock_gateway.settings import GatewaySettings, variable
from penstock_operator.endpoint.objects import scalers
from penstock_operator.endpoint.objects.deployment import (
    MARGIN_SECONDS,
    PROGRESS_DEADLINE_SECONDS,
    RELEASE_SECONDS,
    STREAM_SECONDS,
)
from penstock_operator.endpoint.objects.gateway import TLS_BYTES
from penstock_operator.endpoint.pods.template import NEURON_PROCESS
from penstock_operator.facts import names, pod_data, pods
from penstock_operator.limits import concurrency, quotas, waiting
from penstock_operator.scaling.read import scrape
from penstock_optimizer.candidate.decoder import COMPARED
from penstock_optimizer.capacity import curve
from penstock_optimizer.guard import batch_invariance, gate, judge
from penstock_optimizer.guard.agreement_of_logits import GenerationBudget
from penstock_optimizer.neuron.choice import USABLE_SHARE
from penstock_optimizer.search import climb, goal, space
from penstock_optimizer.targets import neuron, target
from penstock_runtime.batching import batcher
from penstock_runtime.generation import scheduler
from penstock_runtime.http.transport import connection, fair_reads
from penstock_runtime.serving import tokenizing
from penstock_runtime.settings import LimitSettings

PAGES = Path(__file__).parents[2] / "docs"


def percent(share: float) -> str:
    return f"{share * 100:.2g} %"


CORPUS = gate.own_corpus()
TEXTS = len(CORPUS.texts) + sum(len(theme.sentences) for theme in CORPUS.themes)
SHORT, MIDDLE, LONG, LONGEST = (percent(share) for _, share in gate.STRATA)
STATED = {
    "explanation/operator.md": (
        f"`/info` and `/metrics` {pod_data.INFO_MAX_BYTES // 1024} KiB",
        f"waiting requests {pod_data.DEMAND_MAX_BYTES} bytes",
        f"progress of a job {pod_data.PROGRESS_MAX_BYTES // 1024} KiB",
        f"termination message {pod_data.MESSAGE_MAX_BYTES // 1024} KiB",
        f"at most {pod_data.MAX_DEPTH} levels",
        f"{pods.MAX_CPUS:,} CPUs and {scrape.MAX_BUCKETS} histogram buckets",
    ),
    "explanation/guard.md": (
        f"some {round(TEXTS, -1)} texts",
        {18: "eighteen themes"}[len(CORPUS.themes)],
        f"At most {gate.JUDGING_SAMPLES} requests judge, {SHORT} of them of up to 8 tokens, {MIDDLE} up to 32",
        f"{LONG} up to 128 and {LONGEST} longer",
        f"within {percent(gate.TOLERANCE)} (relative",
        f"it is {percent(gate.BF16_TOLERANCE)},",
    ),
    "explanation/optimiser.md": (
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
    "explanation/batching.md": (
        f"at most {batcher.MIN_SHARED_TOKENS} tokens together",
        f"in about {batcher.MIN_SHARED_SECONDS * 1000:g} ms",
        f"longer than about {batcher.BRIEF_RUN_SECONDS * 1000:g} ms",
        f"of {batcher.BRIEF_RUN_TOKENS} tokens at least",
        f"over {tokenizing.LONG_CHARACTERS:,} characters",
    ),
    "explanation/generation.md": (f"chunks have {scheduler.DEFAULT_BUDGET} tokens",),
    "decisions/accuracy-budget.md": (
        f"mean cosine to fp32 is at least {judge.MEAN_COSINE}",
        f"At most one text in a hundred is below {judge.P1_COSINE}",
        f"No text is below {judge.MIN_COSINE:.2f}",
    ),
    "decisions/batching.md": (
        f"within {batcher.MAX_INLINE_SECONDS * 1000:g} ms for a single client",
        f"within {batcher.BRIEF_SECONDS * 1000:g} ms for any client",
        f"if they take at most {batcher.ONE_CORE_SECONDS * 1000:g} ms together",
        f"Batches of fewer than {batcher.BRIEF_RUN_TOKENS} tokens",
    ),
    "decisions/concurrency-limits.md": (
        f"a running pod within {concurrency.START_SECONDS:g} s",
        f"progress within {PROGRESS_DEADLINE_SECONDS} s",
        f"before it gives a slot, for {waiting.LEADER_SECONDS:g} s at most",
    ),
    "how-to/answer-an-alert.md": (
        f"port {names.INTERNAL_PORT} of the pods and port {names.GATEWAY_STATUS_PORT} of gateways",
    ),
    "how-to/expose-an-endpoint.md": (f"grows by {TLS_BYTES // 1024} KiB for each",),
    "how-to/generate-text.md": (
        f"at most {LimitSettings().max_rows:,} answers",
        f"up to {COMPARED} requests",
        f"{batch_invariance.AT_ONCE} at a time",
        f"{Rollout().drain_seconds + STREAM_SECONDS} s by default",
    ),
    "how-to/inferentia.md": (
        f"a time limit of {neuron.BUCKET_SECONDS / 60:g} minutes",
        f"{percent(USABLE_SHARE)} of a NeuronCore's memory",
        f"{(NEURON_PROCESS + PROCESS) / 2**30:g} GiB more",
        f"{RELEASE_SECONDS - MARGIN_SECONDS} s more than on CPUs",
    ),
    "how-to/limit-what-endpoints-may-ask-for.md": (f"within {quotas.WAITING_SECONDS:g} seconds",),
    "how-to/scale-to-zero.md": (f"polling interval ({scalers.POLLING_SECONDS} s)",),
    "how-to/scale-with-hpa-or-keda.md": (f"from {scalers.SMALLEST_PREVENTED} replicas on",),
    "tutorial/one-machine.md": (f"time budget ({BUDGET_SECONDS:g} s)",),
    "reference/gateway.md": (
        f"{gateway.CONNECTION_RATE:,} a second, averaged over 10 s",
        f"requests over {gateway.BUFFER_BYTES // 1024} KiB in progress",
        f"{gateway.STATUS_CONNECTIONS_PER_CLIENT}, and {gateway.STATUS_CONNECTIONS} of all clients",
    ),
    "reference/http.md": (
        f"discarded for up to {connection.LINGER_SECONDS:g} s",
        f"below {fair_reads.TINY_BYTES} bytes are read at intervals of {fair_reads.READ_SECONDS * 1000:g} ms",
    ),
}
GENERATION = GenerationBudget()
BUDGETS = (
    ("mean_cosine", "at least", judge.MEAN_COSINE),
    ("neighbour_overlap", "at least", judge.MIN_NEIGHBOUR_OVERLAP),
    ("max_similarity_change", "at most", judge.MAX_SIMILARITY_CHANGE),
    ("argmax_agreement", "at least", judge.MIN_AGREEMENT[TaskName.TEXT_CLASSIFICATION]),
    ("flipped_margin", "at most", judge.MAX_FLIPPED_MARGIN),
    ("kendall_tau", "at least", judge.MIN_TAU),
    ("entity_f1", "at least", judge.MIN_ENTITY_F1),
    ("span_match", "at least", judge.MIN_AGREEMENT[TaskName.QUESTION_ANSWERING]),
    ("span_f1", "at least", judge.MIN_SPAN_F1),
    ("top_k_overlap", "at least", judge.MIN_TOP_K_OVERLAP),
    ("p99_divergence", "at most", GENERATION.p99_divergence),
    ("same_best_token", "at least", GENERATION.same_best),
    ("perplexity_ratio", "at most", GENERATION.perplexity),
)


def text_of(page: str) -> str:
    """The page on one line."""
    return " ".join((PAGES / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "text"), [(page, text) for page, texts in STATED.items() for text in texts])
def test_a_page_states_a_number_of_the_code(page: str, text: str) -> None:
    assert text in text_of(page)


@pytest.mark.parametrize(("metric", "bound", "budget"), BUDGETS)
def test_the_table_of_budgets_has_the_budget_of_the_guard(metric: str, bound: str, budget: float) -> None:
    page = text_of("reference/accuracy-budgets.md")

    assert any(f"`{metric}` | {bound} {number} |" in page for number in (f"{budget:g}", f"{budget:.2f}"))


def test_the_table_of_the_gateway_has_every_variable_of_its_environment() -> None:
    table = text_of("reference/gateway.md").replace("`_", "`PENSTOCK_GATEWAY_")

    assert [name for one in fields(GatewaySettings) if f"`{(name := variable(one.name))}`" not in table] == []
