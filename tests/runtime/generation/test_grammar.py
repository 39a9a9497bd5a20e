"""Texts in the form of a schema or an expression."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_runtime.errors import InvalidInput, Overloaded
from penstock_runtime.generation.grammar import (
    MOST_PER_CLIENT,
    Grammar,
    Grammars,
    GrammarText,
    json_schema,
    lark,
    regular_expression,
)
from penstock_runtime.generation.tool_calls import ToolForm, calls_grammar
from penstock_runtime.serving.generation_model import GenerationModel
from tests.memory import growth_kilobytes
from tests.runtime.generation.small_model import small_generation_model

END = 257


def prepared(grammars: Grammars, text: GrammarText, client: str = "a") -> Grammar:
    return asyncio.run(grammars.prepare(text, client))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(grammars: Grammars) -> list[int]:
    """Processes of grammars in use."""
    process = grammars._parent.process
    if process is None:
        return []
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in found.split()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GenerationModel:
    return small_generation_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grammars(model: GenerationModel) -> Grammars:
    return model.grammars


def test_only_tokens_that_lead_to_the_form_are_allowed(grammars: Grammars, tmp_path: Path) -> None:
    token = small_generation_model(tmp_path).tokenizer.backend.token_to_id
    grammar = prepared(grammars, regular_expression("ab+", "x"))
    state, other = grammar.start(), grammar.start()
    assert np.flatnonzero(state.allowed()).tolist() == [token("a")]
    assert not state.accept(token("a"))
    assert np.flatnonzero(state.allowed()).tolist() == [token("b")]
    assert not state.accept(token("b"))
    assert np.flatnonzero(state.allowed()).tolist() == sorted([token("b"), END])
    assert state.accept(END)
    # Another text in the same grammar.
    assert np.flatnonzero(other.allowed()).tolist() == [token("a")]


@pytest.mark.parametrize("vocabulary", [258, 300, 1024])
def test_logits_without_a_token_are_never_allowed(model: GenerationModel, vocabulary: int) -> None:
    grammars = Grammars(model.tokenizer.backend.to_str(), vocabulary, {END})
    allowed = prepared(grammars, regular_expression("a|b", "x")).start().allowed()
    token = model.tokenizer.backend.token_to_id

    assert len(allowed) == vocabulary
    assert np.flatnonzero(allowed).tolist() == sorted([token("a"), token("b")])


def test_a_text_that_can_only_end_has_ended(grammars: Grammars, tmp_path: Path) -> None:
    token = small_generation_model(tmp_path).tokenizer.backend.token_to_id
    state = prepared(grammars, json_schema({"const": 1}, "x")).start()
    assert state.accept(token("1"))


@pytest.mark.parametrize("schema", [None, "text", {"type": "nonsense"}, {"a": "x" * 200_000}])
def test_a_schema_that_cannot_be_followed_is_refused(grammars: Grammars, schema: Any) -> None:
    with pytest.raises(InvalidInput) as error:
        prepared(grammars, json_schema(schema, "guided_json"))
    assert error.value.field == "guided_json"


@pytest.mark.parametrize("expression", [None, "", "(", "a" * 200_000])
def test_an_expression_that_cannot_be_followed_is_refused(grammars: Grammars, expression: Any) -> None:
    with pytest.raises(InvalidInput):
        prepared(grammars, regular_expression(expression, "guided_regex"))


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
    state = prepared(
        model.grammars, lark(calls_grammar(form, TOOLS, field="arguments", several=several), "tools")
    ).start()
    tokens = model.encode_prompt(text, with_special_tokens=False, most=10**6)
    followed = []
    for token in tokens:
        followed.append(bool(state.allowed()[token]))
        if not followed[-1] or state.accept(token):
            break
    assert (all(followed) and len(followed) == len(tokens)) == is_right


def test_parameters_that_are_no_schema_are_refused(grammars: Grammars) -> None:
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "nonsense"}}}}]
    with pytest.raises(InvalidInput) as error:
        prepared(grammars, lark(calls_grammar(ToolForm.WHOLE, tools, field="arguments", several=False), "tools"))
    assert error.value.field == "tools"


COMPLEX: list[dict[str, Any]] = [
    {"allOf": [{"type": "string", "pattern": f".*x{number}.*"} for number in range(count)]} for count in (30, 40)
]
"""Schemas that took the library minutes, or gigabytes."""


@pytest.mark.parametrize("schema", COMPLEX)
def test_a_schema_that_takes_too_much_is_refused_and_the_next_one_is_prepared(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    with growth_kilobytes() as growth:
        with pytest.raises(InvalidInput, match="too much time or memory"):
            prepared(grammars, json_schema(schema, "guided_json"))
        grown = growth()
    after = resource.getrusage(resource.RUSAGE_SELF)

    assert prepared(grammars, json_schema({"const": "a"}, "guided_json")).start().allowed().any()
    # This process has computed nothing, and has no more memory.
    assert after.ru_utime - before.ru_utime < 1
    assert grown < 50_000


def test_a_client_that_leaves_ends_the_preparation(grammars: Grammars) -> None:
    async def leave() -> None:
        preparing = asyncio.create_task(grammars.prepare(json_schema(COMPLEX[0], "guided_json"), "hostile"))
        await asyncio.to_thread(until, lambda: bool(children(grammars)))
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing

    prepared(grammars, json_schema({}, "x"))
    gc.collect()
    until(lambda: not children(grammars))
    asyncio.run(leave())
    until(lambda: not children(grammars))


def test_waiting_clients_take_turns(grammars: Grammars) -> None:
    order: list[str] = []

    async def one(client: str) -> None:
        await grammars.prepare(json_schema({"const": client}, "x"), client)
        order.append(client)

    async def all_of_them() -> None:
        first = [asyncio.create_task(one("busy")) for _ in range(6)]
        await asyncio.sleep(0)
        await asyncio.gather(*first, one("other"))

    asyncio.run(all_of_them())
    assert order.index("other") <= 2


def test_a_client_has_a_limited_number_of_grammars(grammars: Grammars) -> None:
    held = [prepared(grammars, json_schema({"const": number}, "x"), "busy") for number in range(MOST_PER_CLIENT)]
    with pytest.raises(Overloaded):
        prepared(grammars, json_schema({"const": "a"}, "x"), "busy")
    assert prepared(grammars, json_schema({"const": "a"}, "x"), "other").start().allowed().any()

    held.clear()
    gc.collect()
    assert prepared(grammars, json_schema({"const": "a"}, "x"), "busy").start().allowed().any()


def test_a_grammar_whose_process_has_ended_fails_its_request_only(grammars: Grammars) -> None:
    state = prepared(grammars, regular_expression("a+", "x")).start()
    for pid in children(grammars):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(InvalidInput, match="too much time or memory"):
        state.allowed()
    assert prepared(grammars, regular_expression("a+", "x")).start().allowed().any()


def test_the_processes_end_with_their_model(tmp_path: Path) -> None:
    grammars = small_generation_model(tmp_path).grammars
    grammar = prepared(grammars, regular_expression("a+", "x"))
    process = grammars._parent.process
    assert process is not None
    (pid,) = children(grammars)
    del grammar, grammars
    gc.collect()
    assert process.returncode == 0
    until(lambda: not Path(f"/proc/{pid}").exists())
