"""Bodies that take long to read or to write: refused by their number of values, written in pieces."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_runtime.errors import MalformedBody
from penstock_runtime.http.api.core import bodies
from penstock_runtime.http.api.core.bodies import LARGE_FLOATS, LargeResponse, answer_response, parse_json
from penstock_runtime.serving.predictor import Answer, Timings

ARRAYS = st.builds(
    lambda shape: np.arange(np.prod(shape), dtype=np.float32).reshape(shape), st.lists(st.integers(0, 3), max_size=3)
)
VALUES = st.recursive(
    ARRAYS | st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.text(st.sampled_from(',"\\[]{}:a\n'), max_size=12)


def written(value: Any) -> bytes:
    response = LargeResponse(value, b"")
    asyncio.run(response.write())
    return response.body


@given(VALUES)
def test_a_body_in_pieces_is_the_same(value: Any) -> None:
    assert written(value) == bodies.dumps(value)


def test_other_work_runs_between_the_pieces_of_a_large_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PIECE_SECONDS", 0.0)
    value = [{"embedding": np.zeros(LARGE_FLOATS // 8, np.float32)} for _ in range(9)]
    response = answer_response(Answer(value, Timings(), 1, 0), value)
    assert isinstance(response, LargeResponse)
    steps = 0

    async def run() -> None:
        nonlocal steps
        writing = asyncio.ensure_future(response.write())
        while not writing.done():
            steps += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    assert steps >= 9
    assert json.loads(response.body) == [{"embedding": [0.0] * (LARGE_FLOATS // 8)}] * 9


@given(st.lists(TEXTS | st.integers(0, 9), max_size=30))
def test_the_values_of_a_body_are_counted_outside_of_its_texts(values: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for most, refused in ((max(len(values), 1), False), (len(values) - 1, True)):
            patch.setattr(bodies, "MOST_VALUES", most)
            if most > 0:
                assert bodies._has_more_values(orjson.dumps(values)) is refused


def test_a_body_with_too_many_values_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(MalformedBody, match="more than 200,000 values"):
        parse_json(b'{"parameters": {"x": [' + b"0," * 200_000 + b"0]}}")
    texts = {"inputs": [", ".join(["a"] * 100)] * 5000}
    assert parse_json(json.dumps(texts).encode()) == texts
