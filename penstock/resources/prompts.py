"""Prompts of an endpoint: texts that are put before inputs, for models that were trained with them."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from penstock.resources.base import Rule, Spec, TextRule
from penstock.tasks import TaskName

PROMPT_TASKS = (TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY, TaskName.TEXT_RANKING)
"""The tasks with requests that may have a prompt."""
PROMPT_ROUTES = (
    "/predict",
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/similarity",
    "/rerank",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/models/{name}:predict",
    "/v2/models/{name}/infer",
    "/invocations",
)
"""The routes that may have a separate default prompt. `/` is `/predict`; a version of a model is the model."""
_SHOWN = [route for route in PROMPT_ROUTES if "{" not in route]
"""Braces in the message of a rule are replaced by a field's value."""

PromptName = Annotated[
    str,
    Field(min_length=1, max_length=64),
    TextRule(
        r"[A-Za-z0-9][A-Za-z0-9_.-]*",
        "{self} is not the name of a prompt",
        "Begin with a letter or digit, and use letters, digits, '-', '_' and '.'",
    ),
]
"""The name of a prompt, as clients send it in `prompt_name`."""


class Prompts(Spec):
    """Texts that are put before inputs, by name. A request chooses one with `prompt_name`."""

    texts: dict[PromptName, Annotated[str, Field(max_length=1024)]] = Field(
        default_factory=dict,
        max_length=32,
        description="Prompts by name, such as `query: 'query: '`, in addition to those of the model's own files; for "
        "the same name this one is used. An empty text is no prompt.",
    )
    default: PromptName | None = Field(
        default=None,
        description="The prompt of requests that name none. None: the model's own default prompt, mostly none.",
    )
    routes: dict[str, PromptName] = Field(
        default_factory=dict,
        max_length=len(PROMPT_ROUTES),
        description="The prompt of requests to a route that name none, instead of `default`: "
        f"{', '.join(f'`{route}`' for route in PROMPT_ROUTES)}.",
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.routes) || self.routes.all(route, route in {list(PROMPT_ROUTES)})",
            lambda it: set(it.routes) <= set(PROMPT_ROUTES),
            f"routes has a route without prompts: write one of {', '.join(_SHOWN)}, or another of those that "
            "docs/reference/model-endpoint.md lists",
            field_path=".routes",
        ),
    )
