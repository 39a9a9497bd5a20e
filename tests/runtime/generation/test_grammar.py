"""Texts in the form of a schema or an expression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_runtime.errors import InvalidInput
from penstock_runtime.generation.grammar import Grammars
from tests.runtime.generation.small_model import small_generation_model

END = 257


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return small_generation_model(tmp_path_factory.mktemp("model")).grammars


def test_only_tokens_that_lead_to_the_form_are_allowed(grammars: Grammars, tmp_path: Path) -> None:
    token = small_generation_model(tmp_path).tokenizer.backend.token_to_id
    state = grammars.of_regex("ab+", "x")
    assert np.flatnonzero(state.allowed()).tolist() == [token("a")]
    assert not state.accept(token("a"))
    assert np.flatnonzero(state.allowed()).tolist() == [token("b")]
    assert not state.accept(token("b"))
    other = state.copy()
    assert np.flatnonzero(state.allowed()).tolist() == sorted([token("b"), END])
    assert state.accept(END)
    assert other.allowed()[token("b")]


def test_a_text_that_can_only_end_has_ended(grammars: Grammars, tmp_path: Path) -> None:
    token = small_generation_model(tmp_path).tokenizer.backend.token_to_id
    state = grammars.of_json_schema({"const": 1}, "x")
    assert state.accept(token("1"))


@pytest.mark.parametrize("schema", [None, "text", {"type": "nonsense"}, {"a": "x" * 200_000}])
def test_a_schema_that_cannot_be_followed_is_refused(grammars: Grammars, schema: Any) -> None:
    with pytest.raises(InvalidInput) as error:
        grammars.of_json_schema(schema, "guided_json")
    assert error.value.field == "guided_json"


@pytest.mark.parametrize("expression", [None, "", "(", "a" * 200_000])
def test_an_expression_that_cannot_be_followed_is_refused(grammars: Grammars, expression: Any) -> None:
    with pytest.raises(InvalidInput):
        grammars.of_regex(expression, "guided_regex")
