"""The requests of the soak of chats, against a real server around a small model."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.soak_chat import asked, in_use, send
from tests.runtime.generation.small_model import serving_generation, small_engine, small_generation_model
from tests.runtime.http.serving import until

REQUESTS = 40


def test_every_request_of_the_soak_is_answered_or_cancelled_and_leaves_nothing_behind(tmp_path: Path) -> None:
    chance = random.Random(3)
    requests = [one for one in (asked(chance) for _ in range(4 * REQUESTS)) if len(str(one.body)) < 500][:REQUESTS]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses"} < {one.path for one in requests}
    model = small_generation_model(tmp_path, small_engine(context=1024, blocks=256))
    with serving_generation(model) as endpoint, httpx.Client(base_url=endpoint.url, timeout=60, verify=False) as http:
        found = Counter(send(http, one) for one in requests)
        assert found.keys() == {"answered", "cancelled"}, found
        until(lambda: in_use(endpoint.url) == (0, 0, 0))
