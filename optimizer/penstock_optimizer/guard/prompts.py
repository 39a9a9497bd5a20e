"""The prompts of the guard: Penstock's own texts and the endpoint's, as questions in the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_optimizer.guard.gate import own_corpus, split
from penstock_runtime.generation.templates import ChatTemplate, special_tokens, template_source
from penstock_runtime.models.files import read_optional
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tokens import Tokenizer

REQUESTS = (
    "{}",
    "Explain this in two sentences: {}",
    "Continue this text: {}",
    "Translate into French: {}",
    "List three facts about this: {}",
)
TEMPLATE_FILE = "chat_template.jinja"


def judging_prompts(folder: ModelFolder, own_texts: Sequence[str], count: int) -> list[list[int]]:
    """Token ids of `count` prompts, none empty: the endpoint's texts first. Without a chat template the texts
    themselves are the prompts."""
    _, judging = split(own_corpus())
    questions = [question for theme in judging.themes for question in theme.questions]
    texts = [*own_texts, *_mixed(questions, judging.singles())]
    tokenizer = Tokenizer.load(folder).backend
    settings = read_optional(folder.path, "tokenizer_config.json")
    separate = folder.path / TEMPLATE_FILE
    source = template_source(settings, separate.read_text(encoding="utf-8") if separate.is_file() else None)
    template = None if source is None else ChatTemplate(source, special_tokens(settings))
    prompts = []
    for index, text in enumerate(texts):
        if template is None:
            ids = tokenizer.encode(text).ids
        else:
            message = {"role": "user", "content": REQUESTS[index % len(REQUESTS)].format(text)}
            ids = tokenizer.encode(template.render([message]), add_special_tokens=False).ids
        if ids:
            prompts.append(list(ids))
        if len(prompts) == count:
            break
    return prompts


def _mixed(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The texts of both lists, alternating, each list spread over the whole."""
    step = max(len(second) // max(len(first), 1), 1)
    spread = [*second[::step], *(text for index, text in enumerate(second) if index % step)]
    mixed = [text for pair in zip(first, spread, strict=False) for text in pair]
    return [*mixed, *spread[len(first) :]]
