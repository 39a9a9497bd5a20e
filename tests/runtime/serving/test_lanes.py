"""The bulk lane: which requests are in it, what their answers and metrics show, and when their rows run."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.recipe import Batching
from penstock.tasks import TaskName
from penstock_runtime.admission import BulkFloor
from penstock_runtime.batching.queue import BatchPolicy, RowQueue
from penstock_runtime.errors import Overloaded
from penstock_runtime.generation.scheduler import Scheduler, Sequence
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.settings import QueueSettings
from tests.examples import examples
from tests.runtime.batching.echo import EchoEngine, plan, row
from tests.runtime.generation.small_model import serving_generation, small_generation_model
from tests.runtime.http.serving import make_model, serving
from tests.runtime.serving.small import small_model

TEXT = {"input": "i like you"}


@pytest.mark.parametrize(
    ("body", "headers", "is_bulk", "tier"),
    [
        pytest.param({}, {}, False, None, id="no wish"),
        pytest.param({"service_tier": "flex"}, {}, True, "flex", id="OpenAI's flex"),
        pytest.param({"service_tier": "auto"}, {}, False, "default", id="OpenAI's other tiers"),
        pytest.param({"service_tier": "priority"}, {}, False, "default", id="a tier that is not sold here"),
        pytest.param({"priority": 1}, {}, True, None, id="vLLM's priority"),
        pytest.param({"priority": -1}, {}, False, None, id="a higher one than usual"),
        pytest.param({"priority": True}, {}, False, None, id="not a number"),
        pytest.param({}, {"priority": "u=7"}, True, None, id="RFC 9218"),
        pytest.param({}, {"priority": "i, u=7"}, True, None, id="with another parameter"),
        pytest.param({}, {"priority": "u=3"}, False, None, id="a browser's"),
        pytest.param({}, {"priority": "u=77"}, False, None, id="not an urgency"),
        pytest.param({"service_tier": "default"}, {"priority": "u=7"}, True, "flex", id="the lower one counts"),
    ],
)
def test_which_requests_are_bulk(
    body: Any, headers: dict[str, str], is_bulk: bool, tier: str | None, tmp_path: Path
) -> None:
    with serving(make_model(tmp_path, TaskName.FEATURE_EXTRACTION)) as endpoint:
        answer = httpx.post(f"{endpoint.url}/v1/embeddings", json=TEXT | body, headers=headers)
        assert answer.status_code == 200
        assert answer.json().get("service_tier") == tier
        text = httpx.get(f"{endpoint.url}/metrics").text
    assert ('penstock_bulk_requests_total{code="200"} 1' in text) is is_bulk
    assert ('penstock_requests_total{code="200",route="/v1/embeddings"} 1' in text) is not is_bulk
    assert "penstock_bulk_in_flight_requests 0" in text
    assert "penstock_in_flight_requests 1" in text, "the scrape itself"
    assert ("penstock_tokens_total 0" in text) is is_bulk


def test_a_token_may_be_bulk_only(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", TaskName.FEATURE_EXTRACTION)
    (tmp_path / "tokens").mkdir()
    for name in ("crawler", "web"):
        (tmp_path / "tokens" / name).write_text(f"{name}-token")
    with serving(model, auth_token_folder=str(tmp_path / "tokens"), bulk_tokens="crawler") as endpoint:
        for name in ("crawler", "web"):
            answer = httpx.post(
                f"{endpoint.url}/v1/embeddings",
                json=TEXT | {"service_tier": "priority"},
                headers={"authorization": f"Bearer {name}-token"},
            )
            assert answer.json()["service_tier"] == ("flex" if name == "crawler" else "default")


def test_generated_text_has_the_tier_and_is_not_counted_as_load(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "service_tier": "flex"}
    with serving_generation(small_generation_model(tmp_path)) as endpoint:
        answer = httpx.post(f"{endpoint.url}/v1/chat/completions", json=body)
        assert answer.json()["service_tier"] == "flex"
        streamed = httpx.post(f"{endpoint.url}/v1/chat/completions", json=body | {"stream": True})
        assert '"service_tier":"flex"' in streamed.text
        response = httpx.post(f"{endpoint.url}/v1/responses", json={"input": "abc", "service_tier": "flex"})
        assert response.json()["service_tier"] == "flex"
        text = httpx.get(f"{endpoint.url}/metrics").text
    assert 'penstock_bulk_requests_total{code="200"} 3' in text
    assert 'penstock_generation_tokens_total{kind="generated"} 0' in text
    assert "penstock_first_token_seconds_count 0" in text


def test_interactive_rows_run_first_and_bulk_requests_give_way() -> None:
    engine = EchoEngine(streams=1)
    engine.gate.clear()

    async def main() -> list[Any]:
        limits = QueueSettings(max_queue_rows=4)
        predictor = Predictor(small_model(engine, served=plan(Batching.SINGLE)), queue=limits)

        def ask(length: int, *, is_bulk: bool) -> asyncio.Task[Any]:
            return asyncio.create_task(predictor.predict([length], {}, is_bulk=is_bulk, client=f"c{length}"))

        running = [ask(1, is_bulk=False), ask(2, is_bulk=False)]  # one runs, one is made ahead
        await asyncio.to_thread(engine.began.acquire)
        await asyncio.sleep(0.01)
        bulk = [ask(length, is_bulk=True) for length in (10, 11, 12)]
        await asyncio.sleep(0.01)
        assert predictor.bulk_depth()[0] >= 2
        interactive = [ask(length, is_bulk=False) for length in (3, 4)]
        await asyncio.sleep(0.01)
        engine.gate.set()
        results = await asyncio.gather(*running, *bulk, *interactive, return_exceptions=True)
        await predictor.drain()
        return results

    results = asyncio.run(main())

    assert [type(one) for one in results].count(Overloaded) >= 1
    assert all(not isinstance(one, BaseException) for one in (results[0], results[1], *results[5:]))
    lengths = [length for batch in engine.batches for length in batch]
    assert max(lengths.index(3), lengths.index(4)) < min(lengths.index(length) for length in lengths if length >= 10)


POLICY = BatchPolicy(Batching.PADDED, 8, 512, 0.5)


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=60), st.integers(1, 3))
@settings(max_examples=examples(100))
def test_lanes_share_no_batch_and_all_rows_leave(rows: list[tuple[int, bool]], streams: int) -> None:
    queue = RowQueue(POLICY)
    for length, is_bulk in rows:
        queue.push([row(length)], None, arrived=0.0, deadline=math.inf, tokens_per_second=1.0, is_bulk=is_bulk)
    assert queue.bulk == (sum(bulk for _, bulk in rows), sum(length for length, bulk in rows if bulk))

    left = list(rows)
    while queue.rows:
        taken = queue.take(streams=streams, now=0.0, brief=32).rows
        assert len({entry.is_bulk for entry in taken}) == 1
        for entry in taken:
            left.remove((entry.row.length, entry.is_bulk))
    assert left == []
    assert queue.bulk == (0, 0)


def test_bulk_rows_get_their_floor_while_others_always_wait() -> None:
    queue = RowQueue(BatchPolicy(Batching.SINGLE, 1, 512, 0.0))

    def push(*, is_bulk: bool) -> None:
        queue.push([row(10)], None, arrived=0.0, deadline=math.inf, tokens_per_second=1.0, is_bulk=is_bulk)

    push(is_bulk=False)
    push(is_bulk=True)
    served = [0, 0]
    for _ in range(2000):
        (entry,) = queue.take(streams=1, now=0.0).rows
        served[entry.is_bulk] += 1
        push(is_bulk=entry.is_bulk)

    assert served[1] == pytest.approx(2000 * BulkFloor.SHARE, abs=2)


def test_bulk_sequences_of_text_start_after_others() -> None:
    scheduler = Scheduler(64, 16, max_sequences=1)
    for number, is_bulk in ((0, True), (1, True), (2, False)):
        scheduler.add(Sequence(number, [1, 2, 3], 10, is_bulk=is_bulk))

    step = scheduler.plan()

    assert [one.sequence.number for one in step.rows] == [2]
