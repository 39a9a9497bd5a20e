"""Texts that are put before inputs: those of the model's own files, and those of the endpoint (`serving.prompts`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import SpecError
from penstock.resources.prompts import Prompts
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.multi_vector import DOCUMENT, QUERY
from penstock_runtime.tasks.base import DEFAULT_LIMITS, RequestLimits
from penstock_runtime.tasks.fields import FieldKind, Text, near
from penstock_runtime.tasks.fitting import Fitter

PROMPT: dict[str, tuple[FieldKind, Any]] = {"prompt_name": (Text("the name of a prompt"), None)}
PROMPT_NOTES = {
    "prompt_name": "The prompt to put before each text: one of the endpoint (serving.prompts), or of the model "
    "(config_sentence_transformers.json). Default: the endpoint's for this route, or its default; else the model's "
    "default prompt, mostly none."
}
ROUTE_ALIASES = {"/": "/predict", "/v2/models/{name}/versions/{version}/infer": "/v2/models/{name}/infer"}
"""Routes whose default prompt is that of another route."""


@dataclass(frozen=True)
class PromptTexts:
    """All prompts by name, and the text for requests that name none."""

    texts: Mapping[str, str]
    default: str
    default_name: str | None = None
    """The endpoint's; None: it names none."""

    @classmethod
    def of(cls, folder: ModelFolder, prompts: Prompts | None) -> PromptTexts:
        """The prompts of a model, changed by those of the endpoint.

        SpecError for a `default` or a route's prompt that neither has.
        """
        own = folder.prompts
        if folder.multi_vector is not None:
            # Queries and documents differ in more than their prompts.
            own = {QUERY: "", DOCUMENT: "", **own}
        if prompts is None:
            return cls(own, folder.default_prompt)
        texts = {**own, **prompts.texts}
        named = {"default": prompts.default, **{f"routes[{path}]": name for path, name in prompts.routes.items()}}
        for field, name in named.items():
            if name is not None and name not in texts:
                raise SpecError(
                    f"serving.prompts.{field} is {name!r}, and neither serving.prompts.texts nor the model has this "
                    "prompt",
                    field=f"spec.serving.prompts.{field}",
                    remedy=f"Add its text to serving.prompts.texts, or name one of {', '.join(sorted(texts))}"
                    if texts
                    else "Add its text to serving.prompts.texts",
                )
        default = folder.default_prompt if prompts.default is None else texts[prompts.default]
        return cls(texts, default, prompts.default)

    def text(self, name: str | None) -> str:
        """The text of a prompt, or the default; InvalidInput if there is none of this name."""
        if name is None:
            return self.default
        if name not in self.texts:
            raise InvalidInput(
                f"parameters.prompt_name: there is no prompt {name[:100]!r}",
                field="parameters.prompt_name",
                remedy=near(name, list(self.texts)) if self.texts else "Leave it out: this endpoint has no prompts",
            )
        return self.texts[name]


class PromptedTask:
    """What tasks with prompts are made of."""

    def __init__(
        self,
        fitter: Fitter,
        folder: ModelFolder,
        limits: RequestLimits = DEFAULT_LIMITS,
        prompts: Prompts | None = None,
    ) -> None:
        """`prompts`: those of the endpoint. Errors as `PromptTexts.of`."""
        self.tokenizer = fitter.tokenizer
        self._fitter = fitter
        self._rule = fitter.rule
        self._limits = limits
        self._prompts = PromptTexts.of(folder, prompts)


def of_routes(prompts: Prompts | None) -> dict[str, str]:
    """The default prompt of each route that has one of its own, by the path in the route table."""
    if prompts is None:
        return {}
    aliases = {alias: prompts.routes[path] for alias, path in ROUTE_ALIASES.items() if path in prompts.routes}
    return {**prompts.routes, **aliases}
