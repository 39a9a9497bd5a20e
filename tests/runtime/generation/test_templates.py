"""Chat templates, compared with transformers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CorruptModel
from penstock_runtime.errors import InvalidInput
from penstock_runtime.generation.templates import ChatTemplate, Conversation, read_template, special_tokens

USER = [{"role": "user", "content": "Hello <b>&amp;</b> \n there"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": " 4 "},
    {"role": "user", "content": "Why? ä 中"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a <city>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "name": "weather", "content": "rain"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "chatml with a default system message (SmolLM2)": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "headers with a date (Llama 3)": (
        "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
        "        {%- set date_string = strftime_now('%d %b %Y') %}\n    {%- else %}\n"
        "        {%- set date_string = '26 Jul 2024' %}\n    {%- endif %}\n{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}\n"
        "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
        "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}\n{{- 'Today Date: ' + date_string + '\n\n' }}\n"
        "{{- system_message }}\n{{- '<|eot_id|>' }}\n{%- for message in messages %}\n"
        "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim "
        "+ '<|eot_id|>' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
    ),
    "tools and calls (Qwen 2.5)": (
        "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages[0]['role'] == 'system' %}\n"
        "        {{- messages[0]['content'] }}\n    {%- endif %}\n    {{- '\\n\\n# Tools\\n\\n<tools>' }}\n"
        "    {%- for tool in tools %}\n        {{- '\\n' }}\n        {{- tool | tojson }}\n    {%- endfor %}\n"
        "    {{- '\\n</tools><|im_end|>\\n' }}\n{%- endif %}\n{%- for message in messages %}\n"
        "    {%- if message.role == 'assistant' and message.tool_calls %}\n"
        "        {{- '<|im_start|>' + message.role }}\n        {%- for tool_call in message.tool_calls %}\n"
        "            {%- if tool_call.function is defined %}\n"
        "                {%- set tool_call = tool_call.function %}\n            {%- endif %}\n"
        '            {{- \'\\n<tool_call>\\n{"name": "\' }}\n            {{- tool_call.name }}\n'
        '            {{- \'", "arguments": \' }}\n            {{- tool_call.arguments | tojson }}\n'
        "            {{- '}\\n</tool_call>' }}\n        {%- endfor %}\n        {{- '<|im_end|>\\n' }}\n"
        "    {%- elif message.role == 'tool' %}\n        {{- '<|im_start|>user\\n<tool_response>\\n' }}\n"
        "        {{- message.content }}\n        {{- '\\n</tool_response><|im_end|>\\n' }}\n    {%- else %}\n"
        "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        "    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is defined and enable_thinking is false %}\n"
        "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}\n"
    ),
    "turns that must alternate (Gemma)": (
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first = messages[0]['content'] + '\n\n' -%}"
        "{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
        "{%- for message in rest -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
        "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
        "{%- set role = message['role'] -%}{%- endif -%}{{ '<start_of_turn>' + role + '\n' + (first if loop.first "
        "else '') }}{%- if message['content'] is string -%}{{ message['content'] | trim }}"
        "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
        "{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"
    ),
    "instructions (Mistral)": (
        "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
        "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
        "{%- set ns = namespace(index=0) %}{{- bos_token }}{%- for message in loop_messages %}"
        "{%- if message['role'] == 'user' %}{%- if loop.last and system_message is defined %}"
        "{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
        "{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}{%- set ns.index = ns.index + 1 %}"
        "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content']|trim + eos_token}}{%- else %}"
        "{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}{%- endfor %}"
    ),
    "markers (Phi)": (
        "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
        "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
        "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
        "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "blocks, a generation tag and loop controls": (
        "{% for message in messages %}\n    {% if message['role'] == 'system' %}\n        {% continue %}\n"
        "    {% endif %}\n    {% if message['role'] == 'assistant' %}\n    {% generation %}\n"
        "<a>{{ message['content'] }}</a>\n    {% endgeneration %}\n    {% else %}\n<u>{{ message['content'] }}</u>\n"
        "    {% endif %}\n{% endfor %}\n{{ messages | tojson(indent=2) }}"
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("generates", [True, False])
def test_a_conversation_is_rendered_as_by_transformers(name: str, generates: bool) -> None:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    cases: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]] = [
        (USER, None, {}),
        (CHAT, None, {}),
        (CALLS, TOOLS, {"enable_thinking": False}),
        ([{"role": "user", "content": [{"type": "text", "text": " in parts "}]}], None, {}),
        ([{"role": "assistant", "content": "first"}, *USER], None, {}),
    ]
    source = TEMPLATES[name]
    ours = ChatTemplate(source, SPECIAL)
    compared = 0
    for messages, tools, variables in cases:
        try:
            (theirs,), _ = render_jinja_template(
                [messages], tools, None, source, add_generation_prompt=generates, **SPECIAL, **variables
            )
        except (TemplateError, TypeError):
            with pytest.raises(InvalidInput):
                ours.render(messages, tools=tools, opens_answer=generates, variables=variables)
            continue
        assert ours.render(messages, tools=tools, opens_answer=generates, variables=variables) == theirs
        compared += 1
    assert compared >= 2


def test_a_template_that_refuses_gives_its_reason() -> None:
    template = ChatTemplate(TEMPLATES["turns that must alternate (Gemma)"], SPECIAL)
    with pytest.raises(InvalidInput, match="roles must alternate") as error:
        template.render([{"role": "assistant", "content": "x"}])
    assert error.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ raise_exception('no') }}",
        "{{ 'a' + 1 }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_reaches_nothing_outside_of_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidInput, match="chat template"):
        ChatTemplate(source).render(USER)


def test_a_template_that_renders_without_end_is_stopped() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endfor %}"
    with pytest.raises(InvalidInput, match="more than"):
        ChatTemplate(source).render(USER)


def test_a_syntax_error_is_an_error_of_the_model() -> None:
    with pytest.raises(CorruptModel, match="error in line 2"):
        ChatTemplate("{{ 1 }}\n{% endfor %}")


FILE, FOR_TOOLS = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
NAMED = [{"name": "x", "template": "c"}, {"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


@pytest.mark.parametrize(
    ("found", "files", "expected"),
    [
        ("a", {}, ("a", "a")),
        ("a", {FILE: "b"}, ("b", "b")),
        (NAMED, {}, ("d", "t")),
        (NAMED[:2], {}, ("d", "d")),
        ({"default": "d", "tool_use": "t"}, {}, ("d", "t")),
        (NAMED, {FILE: "b"}, ("b", "b")),
        (None, {FILE: "b", FOR_TOOLS: "u"}, ("b", "u")),
        (NAMED[:1], {}, None),
        (5, {}, None),
        (None, {}, None),
    ],
)
def test_templates_are_found_where_transformers_finds_them(
    found: Any, files: dict[str, str], expected: tuple[str, str] | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)

    template = read_template(tmp_path, {"chat_template": found})

    assert (None if template is None else (template.source, template.tool_source)) == expected
    if template is not None and expected is not None:
        assert (template.render(USER), template.render(USER, tools=TOOLS)) == expected


def test_a_template_that_is_no_text_is_an_error_of_the_model(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff")

    with pytest.raises(CorruptModel, match="is not text in UTF-8"):
        read_template(tmp_path, {})


@pytest.mark.parity
@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("text", ["The answer", " The answer ", "a\n"])
def test_a_message_is_continued_as_by_transformers(name: str, text: str) -> None:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    messages = [*USER, {"role": "assistant", "content": text}]
    try:
        (theirs,), _ = render_jinja_template([messages], None, None, source, continue_final_message=True, **SPECIAL)
    except (TemplateError, ValueError):
        with pytest.raises(InvalidInput):
            ChatTemplate(source, SPECIAL).render(messages, continues=True)
        return
    assert ChatTemplate(source, SPECIAL).render(messages, continues=True) == theirs


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(InvalidInput, match="leaves out the last message"):
        ChatTemplate("{{ messages[0].content }}").render([*USER, {"role": "assistant", "content": "x"}], continues=True)


def test_special_tokens_are_texts_or_objects() -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True}
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}


BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10**9 }}",
    "a wide number": "{{ '%1000000000d' % 1 }}",
    "wide JSON": "{{ messages | tojson(indent=500000000) }}",
    "many words": "{{ lipsum(n=1000000) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% for a in messages %}{% for b in messages %}{% if a == b %}{% endif %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_takes_too_much_is_ended_while_the_event_loop_goes_on(name: str) -> None:
    async def attack() -> float:
        template = ChatTemplate(BOMBS[name])
        asked = asyncio.create_task(template.prompt(Conversation([*USER] * 5000), "a"))
        longest, before = 0.0, time.thread_time()
        while not asked.done():
            await asyncio.sleep(0.005)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        with pytest.raises(InvalidInput) as error:
            await asked
        assert error.value.field == "messages"
        template.close()
        return longest

    assert asyncio.run(attack()) < 0.2


def test_the_next_conversation_is_rendered_after_one_that_took_too_much() -> None:
    source = "{{ messages[0].content }}{% for a in range(messages[0].content | length) %}{% for b in range(99999) %}"
    source += "{% endfor %}{% endfor %}"

    async def ask() -> str:
        template = ChatTemplate(source)
        with pytest.raises(InvalidInput, match="too much time"):
            await template.prompt(Conversation([{"role": "user", "content": "a" * 99_999}]), "a")
        text = await template.prompt(Conversation([{"role": "user", "content": "a"}]), "a")
        template.close()
        return text

    assert asyncio.run(ask()) == "a"


def test_a_rendered_prompt_is_the_same_with_and_without_limits() -> None:
    async def ask(template: ChatTemplate, conversation: Conversation) -> str:
        try:
            return await template.prompt(conversation, "a")
        finally:
            template.close()

    template = ChatTemplate(TEMPLATES["turns that must alternate (Gemma)"], SPECIAL)
    messages = [{"role": "user", "content": "a \u00e9 \U0001f600 \n"}]
    assert asyncio.run(ask(template, Conversation(messages))) == template.render(messages)
    with pytest.raises(InvalidInput, match="alternate"):
        asyncio.run(ask(template, Conversation([{"role": "assistant", "content": "x"}] * 2)))
