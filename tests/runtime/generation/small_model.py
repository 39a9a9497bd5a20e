"""A small text-generation model for the tests of the server: bytes as tokens, on the paged engine in numpy."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.tasks import TaskName
from penstock_runtime.app.server import Server, request_limits
from penstock_runtime.serving.generation_model import GenerationModel, read_generation_model
from penstock_runtime.serving.generator import Generator
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from tests.runtime.generation.paged_engine import PagedEngine
from tests.runtime.http.serving import Endpoint, running

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Write <tool_call>{% endif %}{% for message in messages %}{{ message.role }}: "
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
"""Knows tools, in the form of Qwen."""


def write_generation_folder(path: Path, *, template: str | None = TEMPLATE, **generation: Any) -> Path:
    """Tokenizer and settings; tokens 0 to 255 are bytes. `generation`: of generation_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken(END, special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 258}))
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def small_engine(**sizes: int) -> PagedEngine:
    """An engine with the vocabulary of the folder."""
    return PagedEngine(**{"vocabulary": 258, "context": 512, "block_size": 16, "blocks": 64, **sizes})


def small_generation_model(path: Path, engine: PagedEngine | None = None, **folder: Any) -> GenerationModel:
    """The model of a new folder."""
    return read_generation_model(write_generation_folder(path, **folder), engine or small_engine())


def generation_server(model: GenerationModel, settings: Settings, name: str) -> tuple[Server, Generator]:
    """A server for the model, to be started in this event loop."""
    server = Server(ServerStatus(name, TaskName.TEXT_GENERATION), settings)
    generator = Generator(
        model,
        server.metrics.generation,
        queue=settings.queue,
        settings=settings.generation,
        limits=request_limits(settings),
    )
    server.serve_with(generator)
    return server, generator


def serving_generation(model: GenerationModel, name: str = "smol", **flags: Any) -> AbstractContextManager[Endpoint]:
    """A server for the model, in a thread of its own."""
    return running(lambda settings: generation_server(model, settings, name), **{"drain_limit_seconds": 20.0, **flags})
