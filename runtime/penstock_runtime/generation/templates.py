"""Renders chat templates: the jinja2 templates of tokenizer_config.json, with what transformers offers them.

Templates come with models, so they run in jinja2's immutable sandbox: they reach neither attributes of Python objects
nor files, and cannot change what they are given. In a server they run in processes with limits of time and memory
(`template_process`). jinja2 is imported where it is needed: other tasks do without.
"""

from __future__ import annotations

import asyncio
import json
import socket
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import CorruptModel
from penstock_runtime.admission import FairLine
from penstock_runtime.errors import InvalidInput
from penstock_runtime.generation.tool_calls import ToolForm, tool_form
from penstock_runtime.host.forks import ForkServer, exchange
from penstock_runtime.models.files import read_text
from penstock_runtime.models.folder import TEMPLATE_FILE, TOOL_TEMPLATE_FILE
from penstock_runtime.settings import QueueSettings

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_RENDERED = 16 * 2**20
"""Characters. No context is longer; a template that loops would fill the memory."""


CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Follows the text of a message that is continued, while the template runs; the same as in transformers."""
RENDER_SECONDS = 10.0
"""Longest wait for a process, which may compute for `template_process.CPU_SECONDS`."""
MOST_WAITING = 256
"""Conversations that wait to be rendered: one is at a time."""

_PROGRAM = ForkServer("penstock_runtime.generation.template_process")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template makes a prompt of. All values are those of JSON."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None
    """Further ones, which a template may know (`enable_thinking`)."""
    opens_answer: bool = True
    """The prompt ends with the beginning of an answer (`add_generation_prompt`)."""
    continues: bool = False
    """The prompt ends with the text of the last message, which the answer continues (`continue_final_message`)."""


class ChatTemplate:
    """The template of a model, with its special tokens."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, for_tools: str | None = None
    ) -> None:
        """`special_tokens`: such as `bos_token`. `for_tools`: the template of conversations with tools; None: the same.
        CorruptModel if a template has a syntax error."""
        from jinja2 import TemplateSyntaxError

        self.source = source
        self.tool_source = source if for_tools is None else for_tools
        self._special_tokens = dict(special_tokens or {})
        self._slots = FairLine(1, QueueSettings(max_queue_rows=MOST_WAITING), "the chat template")
        self._links: list[socket.socket] = []
        """Of its process: one between two conversations, if it was started."""
        weakref.finalize(self, _close, self._links)
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._tool_template = self._template if for_tools is None else environment.from_string(for_tools)
        except TemplateSyntaxError as error:
            raise CorruptModel(
                f"the chat template has an error in line {error.lineno}: {error.message}",
                remedy="Correct chat_template in tokenizer_config.json",
            ) from error

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the model writes calls of tools; None if its template does not know tools."""
        return tool_form(self.tool_source)

    async def prompt(self, conversation: Conversation, client: str) -> str:
        """The prompt of a conversation, rendered in a process with limits. Clients take turns.

        InvalidInput if the template refuses the messages, or takes too much time or memory; Overloaded if too many
        conversations wait.
        """
        async with self._slots.slot(client):
            messages = [_json(asdict(conversation))]
            if not self._links:
                self._links.append(await asyncio.to_thread(_PROGRAM.fork))
                messages.insert(0, _json([self.source, self._special_tokens, self.tool_source]))
            link = self._links.pop()
            try:
                answer = json.loads(await exchange(link, *messages, seconds=RENDER_SECONDS))
            except OSError:
                raise InvalidInput(
                    "the model's chat template takes too much time or memory for these messages",
                    field="messages",
                    remedy="Send fewer or shorter messages",
                ) from None
            self._links.append(link)
        if "error" in answer:
            raise InvalidInput(answer["error"], field="messages", remedy=answer["remedy"])
        return str(answer["text"])

    def close(self) -> None:
        """End the process of this template, if there is one."""
        _close(self._links)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        opens_answer: bool = True,
        continues: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a `Conversation`, rendered without limits of time and memory.

        InvalidInput if the template refuses the messages: with its own words, if it has any.
        """
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError

        if continues:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": f"{last['content']}{CONTINUED}"}]
        context: dict[str, Any] = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": opens_answer and not continues,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in (self._template if tools is None else self._tool_template).generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > LONGEST_RENDERED:
                    raise InvalidInput(
                        f"the chat template makes more than {LONGEST_RENDERED} characters of the messages",
                        field="messages",
                        remedy="Send fewer or shorter messages",
                    )
        except SecurityError as error:
            raise InvalidInput(
                f"the model's chat template does what its sandbox forbids: {error}",
                field="messages",
                remedy="Report it to the endpoint's owner: the template is part of the model",
            ) from error
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(
                f"the model's chat template refuses the messages: {error}",
                field="messages",
                remedy="Send messages in the order and with the roles that this model was trained with",
            ) from error
        text = "".join(pieces)
        if continues:
            # As transformers: a template that removes white space around a message removes it here as well.
            text, mark, after = text.rpartition(CONTINUED.strip())
            if not mark:
                raise InvalidInput(
                    "the model's chat template leaves out the last message, so that it cannot be continued",
                    field="messages",
                    remedy="End with a message of the user",
                )
            text = text if after.startswith(" ") else text.rstrip()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # The escapes in the arguments of a call, which are a text with JSON in it, are read after the body.
            raise InvalidInput(
                "the messages have half a surrogate pair, which is no character",
                field="messages",
                remedy="Cut texts between characters, not inside a \\uD83D\\uDE00 pair",
            ) from error
        return text


def _close(links: list[socket.socket]) -> None:
    while links:
        links.pop().close()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import pass_context
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}`: marks the text of the assistant for training; its content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an attribute of instances

        def parse(self, parser: Parser) -> Node | list[Node]:
            """The nodes inside of the tag."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # Constant expressions would be computed where a template is opened, without limits: by the optimiser, and for
    # output unless `finalize` needs the context.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, loopcontrols],
        optimized=False,
        finalize=pass_context(lambda _, value: value),
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes characters for HTML, which models were not trained with."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    """Templates show the local date, as in transformers."""
    return datetime.now().strftime(form)  # noqa: DTZ005


def read_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template of a model folder; None if there is none. CorruptModel for one that cannot be read."""
    sources = _template_sources(folder, tokenizer_config)
    source = sources.get("default")
    return None if source is None else ChatTemplate(source, special_tokens(tokenizer_config), sources.get("tool_use"))


def _template_sources(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates `default` and `tool_use`, as transformers finds them: with files for templates, those of
    tokenizer_config.json do not count, where they are a text, or a list or an object of named ones."""
    files = {"default": folder / TEMPLATE_FILE, "tool_use": folder / TOOL_TEMPLATE_FILE}
    found = {name: file for name, file in files.items() if file.is_file()}
    if found:
        return {name: read_text(folder, file) for name, file in found.items()}
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):
        value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    named = value if isinstance(value, dict) else {"default": value}
    return {name: str(named[name]) for name in files if isinstance(named.get(name), str)}


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that templates may use, by name, such as `bos_token`."""
    found = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
