"""Numbers in pages that are written by hand are those of the code."""

from dataclasses import fields
from pathlib import Path

import pytest

from penstock.tasks import TaskName
from penstock_gateway import config as gateway
from penstock_gateway.settings import GatewaySettings, variable
from penstock_operator.endpoint.objects.deployment import PROGRESS_DEADLINE_SECONDS
from penstock_operator.limits.waiting import LEADER_SECONDS, START_SECONDS
from penstock_optimizer.guard import judge
from penstock_optimizer.guard.agreement_of_logits import GenerationBudget
from penstock_runtime.batching import batcher
from penstock_runtime.http.transport import connection, fair_reads

DOCS = Path(__file__).parents[2] / "docs"

STATED = (
    ("decisions/accuracy-budget.md", f"mean cosine to fp32 is at least {judge.MEAN_COSINE}"),
    ("decisions/accuracy-budget.md", f"At most one text in a hundred is below {judge.P1_COSINE}"),
    ("decisions/accuracy-budget.md", f"No text is below {judge.MIN_COSINE:.2f}"),
    ("decisions/batching.md", f"within {batcher.MAX_INLINE_SECONDS * 1000:g} ms for a single client"),
    ("decisions/batching.md", f"within {batcher.BRIEF_SECONDS * 1000:g} ms for any client"),
    ("decisions/batching.md", f"if they take at most {batcher.ONE_CORE_SECONDS * 1000:g} ms together"),
    ("decisions/batching.md", f"Batches of fewer than {batcher.BRIEF_RUN_TOKENS} tokens"),
    ("decisions/turns.md", f"a running pod within {START_SECONDS:g} s"),
    ("decisions/turns.md", f"progress within {PROGRESS_DEADLINE_SECONDS} s"),
    ("decisions/turns.md", f"before it gives a slot, for {LEADER_SECONDS:g} s at most"),
    ("reference/gateway.md", f"{gateway.CONNECTION_RATE:,} a second, averaged over 10 s"),
    ("reference/gateway.md", f"requests over {gateway.BUFFER_BYTES // 1024} KiB in progress"),
    (
        "reference/gateway.md",
        f"{gateway.STATUS_CONNECTIONS_PER_CLIENT}, and {gateway.STATUS_CONNECTIONS} of all clients",
    ),
    ("reference/http.md", f"discarded for up to {connection.LINGER_SECONDS:g} s"),
    (
        "reference/http.md",
        f"below {fair_reads.TINY_BYTES} bytes are read at intervals of {fair_reads.READ_SECONDS * 1000:g} ms",
    ),
)
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
    """The page with each paragraph on one line."""
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "words"), STATED)
def test_the_page_states_the_number_of_the_code(page: str, words: str) -> None:
    assert words in text_of(page)


@pytest.mark.parametrize(("metric", "bound", "budget"), BUDGETS)
def test_the_table_of_budgets_has_the_budget_of_the_guard(metric: str, bound: str, budget: float) -> None:
    page = text_of("reference/accuracy-budgets.md")

    assert any(f"`{metric}` | {bound} {number} |" in page for number in (f"{budget:g}", f"{budget:.2f}"))


def test_the_table_of_the_environment_of_the_gateway_has_every_variable() -> None:
    table = text_of("reference/gateway.md").replace("`_", "`PENSTOCK_GATEWAY_")

    assert [variable(one.name) for one in fields(GatewaySettings) if f"`{variable(one.name)}`" not in table] == []
