"""Calls of tools in generated text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_runtime.generation.tool_calls import (
    CallPart,
    ToolCall,
    ToolCallFinder,
    ToolForm,
    arguments_name,
    joined,
    tool_form,
)

RAIN = ToolCall("weather", '{"city": "Köln"}')
SUN = ToolCall("time", "{}")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def found(form: ToolForm, text: str, size: int) -> tuple[str, list[ToolCall]]:
    finder = ToolCallFinder(form)
    content = ""
    parts: list[CallPart] = []
    for at in range(0, len(text), size):
        piece, new = finder.push(text[at : at + size])
        content += piece
        parts += new
    rest, last = finder.finish()
    calls = joined(parts + last)
    assert finder.found == len(calls)
    return content + rest, calls


@pytest.mark.parametrize("size", [1, 3, 7, 500])
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (ToolForm.TAGGED, CALL, "", [RAIN]),
        (ToolForm.TAGGED, f"Let me look.{CALL}", "Let me look.", [RAIN]),
        (ToolForm.TAGGED, f"{CALL}\n{OTHER}", "", [RAIN, SUN]),
        (ToolForm.TAGGED, CALL.removesuffix("</tool_call>"), "", [RAIN]),
        (ToolForm.TAGGED, "a < b and <tool", "a < b and <tool", []),
        (ToolForm.TAGGED, "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        (ToolForm.TAGGED, "Well.<tool_call>half", "Well.", []),
        (ToolForm.TAGGED, 'Well.<tool_call>{"name": "weather", "argum', "Well.", []),
        (ToolForm.WHOLE, '{"name": "weather", "param', "", []),
        (ToolForm.LIST, '[{"name": "wea', "", []),
        (
            ToolForm.TAGGED,
            '<tool_call>{"arguments": {}, "name": "time"}</tool_call><tool_call>[{"name": "a", "arguments": "{}"}]',
            "",
            [SUN, ToolCall("a", "{}")],
        ),
        (
            ToolForm.TAGGED,
            '<tool_call>{"name": "a", "arguments": {"x": "</tool_call>\\"}"}}</tool_call>',
            "",
            [ToolCall("a", '{"x": "</tool_call>\\"}"}')],
        ),
        (ToolForm.LIST, f'[{{"name": "weather", "arguments": {RAIN.arguments}}}]', "", [RAIN]),
        (ToolForm.WHOLE, '{"name": "weather", "parameters": {"city": "Köln"}}', "", [RAIN]),
        (ToolForm.WHOLE, ' [{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "time"}]', "", [RAIN, SUN]),
        (ToolForm.WHOLE, "Hello {you}", "Hello {you}", []),
        (ToolForm.WHOLE, "{not JSON", "{not JSON", []),
        (ToolForm.WHOLE, '{"a": 1}', '{"a": 1}', []),
    ],
)
def test_text_and_calls_are_separated(
    form: ToolForm, text: str, content: str, calls: list[ToolCall], size: int
) -> None:
    assert found(form, text, size) == (content, calls)


FULL = {
    ToolForm.TAGGED: f"Well.{CALL}",
    ToolForm.WHOLE: '{"name": "weather", "parameters": {"city": "Köln"}}',
    ToolForm.LIST: '[{"name": "weather", "arguments": {"city": "Köln"}}]',
}


@pytest.mark.parametrize("form", ToolForm)
def test_of_a_call_that_was_cut_anywhere_nothing_is_text(form: ToolForm) -> None:
    text = FULL[form]
    for end in range(len(text)):
        finder = ToolCallFinder(form)
        content, parts = finder.push(text[:end])
        rest, last = finder.finish(is_cut=True)
        assert "Well.".startswith(content + rest), text[:end]
        for call in joined(parts + last):
            assert '{"city": "Köln"}'.startswith(call.arguments), text[:end]


@settings(deadline=None)
@given(st.text(st.sampled_from('ab<>{}"tool_call/ \n')), st.integers(1, 9), st.sampled_from(ToolForm))
def test_text_without_a_call_is_given_as_it_is(text: str, size: int, form: ToolForm) -> None:
    content, calls = found(form, text, size)
    assert calls or content == text or (form is ToolForm.TAGGED and content.strip() == text.strip())


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=4), st.integers(), max_size=3), st.text("ab ", max_size=9), st.integers(1, 9))
def test_a_call_has_its_arguments_whatever_the_pieces(arguments: dict[str, int], before: str, size: int) -> None:
    text = f"{before}<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    _, (call,) = found(ToolForm.TAGGED, text, size)
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("form", ToolForm)
def test_arguments_are_given_while_they_are_written(form: ToolForm) -> None:
    finder = ToolCallFinder(form)
    begin = "<tool_call>" if form is ToolForm.TAGGED else ""
    assert finder.push(begin + '{"name": "wea') == ("", [])
    assert finder.push('ther", "arguments": {"ci') == ("", [CallPart(0, "weather", '{"ci')])
    assert finder.push('ty": "Ro') == ("", [CallPart(0, None, 'ty": "Ro')])
    assert (finder.is_open, finder.found) == (True, 1)
    assert finder.push('me"}}') == ("", [CallPart(0, None, 'me"}')])
    assert (finder.is_open, finder.found) == (False, 1)
    assert finder.finish() == ("", [])
    assert not finder.is_cut


def test_an_answer_that_ends_inside_of_arguments_is_a_cut_call() -> None:
    finder = ToolCallFinder(ToolForm.WHOLE)
    assert finder.push('{"name": "f", "arguments": {"a": ') == ("", [CallPart(0, "f", '{"a": ')])
    assert finder.finish() == ("", [])
    assert finder.is_cut


def test_the_field_of_the_arguments_comes_from_the_template() -> None:
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert arguments_name(llama, ToolForm.WHOLE) == "parameters"
    assert arguments_name(llama, ToolForm.TAGGED) == "arguments"
    assert arguments_name("{{ tools }}", ToolForm.WHOLE) == "arguments"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", None),
        ("{{ tools }} <tool_call>", ToolForm.TAGGED),
        ("{{ tools }}", ToolForm.WHOLE),
        ("{{ tools }} [TOOL_CALLS]", ToolForm.LIST),
    ],
)
def test_the_form_comes_from_the_template(template: str, form: ToolForm | None) -> None:
    assert tool_form(template) is form
