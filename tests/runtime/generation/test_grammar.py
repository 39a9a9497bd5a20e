"""Texts in the form of a schema or an expression."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest

from penstock_runtime.errors import InvalidInput
from penstock_runtime.generation.grammar import Grammars
from penstock_runtime.generation.grammar_check import GrammarChecker
from penstock_runtime.generation.tool_calls import ToolForm, calls_grammar
from penstock_runtime.serving.generation_model import GenerationModel
from tests.runtime.generation.small_model import small_generation_model

END = 257


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GenerationModel:
    return small_generation_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grammars(model: GenerationModel) -> Grammars:
    return model.grammars


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


TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}, "required": ["city"]}},
    {"name": 'an "odd" näme\\'},
]
WEATHER = '{"name": "weather", "arguments": {"city": "Rome"}}'
ODD = '{"name": "an \\"odd\\" näme\\\\", "arguments": {}}'


@pytest.mark.parametrize(
    ("form", "several", "text", "is_right"),
    [
        (ToolForm.TAGGED, True, f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{ODD}\n</tool_call>", True),
        (ToolForm.TAGGED, False, f"<tool_call>\n{WEATHER}\n</tool_call>", True),
        (ToolForm.TAGGED, False, f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>", False),
        (ToolForm.WHOLE, True, WEATHER, True),
        (ToolForm.LIST, True, f"[{WEATHER}, {ODD}]", True),
        (ToolForm.LIST, False, f"[{WEATHER}, {ODD}]", False),
        (ToolForm.WHOLE, True, '{"name": "other"', False),
        (ToolForm.WHOLE, True, '{"name": "weather", "arguments": {"town"', False),
    ],
)
def test_calls_of_tools_have_their_form_and_the_schema_of_their_tool(
    model: GenerationModel, form: ToolForm, several: bool, text: str, is_right: bool
) -> None:
    state = model.grammars.of_lark(calls_grammar(form, TOOLS, field="arguments", several=several), "tools")
    tokens = model.encode_prompt(text, with_special_tokens=False)
    followed = []
    for token in tokens:
        followed.append(bool(state.allowed()[token]))
        if not followed[-1] or state.accept(token):
            break
    assert (all(followed) and len(followed) == len(tokens)) == is_right


def test_parameters_that_are_no_schema_are_refused(grammars: Grammars) -> None:
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "nonsense"}}}}]
    with pytest.raises(InvalidInput) as error:
        grammars.of_lark(calls_grammar(ToolForm.WHOLE, tools, field="arguments", several=False), "tools")
    assert error.value.field == "tools"


def test_a_schema_that_would_take_minutes_to_prepare_is_refused_and_the_next_one_is_prepared(
    grammars: Grammars,
) -> None:
    many = [{"type": "string", "pattern": f".*x{number}.*"} for number in range(40)]
    with pytest.raises(InvalidInput, match="too much time or memory"):
        grammars.of_json_schema({"allOf": many}, "guided_json")
    assert grammars.of_json_schema({"const": "a"}, "guided_json").allowed().any()


def test_the_process_that_checks_grammars_ends_with_its_model() -> None:
    checker = GrammarChecker()
    assert not checker.error(llguidance.LLMatcher.grammar_from_regex("a+"))
    process = checker._process
    assert process is not None
    assert process.poll() is None
    del checker
    gc.collect()
    assert process.returncode == 0
