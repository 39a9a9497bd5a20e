"""The server of an endpoint: limits of inputs, caches, gRPC, and prompts: texts that are put before inputs, for models
that were trained with them."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from penstock.resources.base import CLUSTER, NO_SCHEMA_DEFAULT, Spec
from penstock.resources.endpoint_parts.guard_policy import GuardPolicy
from penstock.resources.fields.rules import Rule, TextRule
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


class Caches(Spec):
    """Memory of a pod for what it computed before. It is added to the memory of the pods."""

    answers_mebibytes: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description="For answers, by the content of the request; MiB. Requests with the same content that are in "
        "progress at the same time are then computed once. 0: off. Texts stay in memory.",
    )
    tokens_mebibytes: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description="For tokenised requests; MiB. For long texts that come again with other parameters. 0: off.",
    )

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return (self.answers_mebibytes + self.tokens_mebibytes) * 2**20

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the runtime for the caches that are on."""
        sizes = {
            "PENSTOCK_ANSWER_CACHE_BYTES": self.answers_mebibytes,
            "PENSTOCK_TOKEN_CACHE_BYTES": self.tokens_mebibytes,
        }
        return {name: str(size * 2**20) for name, size in sizes.items() if size}


class ServingLimits(Spec):
    """Limits of inputs, which the optimisation depends on too."""

    max_input_tokens: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Longer inputs are cut or refused. None: the model's."
    )
    truncate: bool = Field(default=True, description="Cut over-long inputs; false answers them with 422.")


class Serving(ServingLimits):
    """Properties of the server that depend on the endpoint rather than on the process."""

    caches: Caches | None = Field(
        default=None,
        description="Memory for answers and tokens of earlier requests. None: nothing is kept. A change replaces the "
        "pods and does not optimise again.",
    )
    prompts: Prompts | None = Field(
        default=None,
        description="Prompts for feature-extraction, sentence-similarity and text-ranking (there, before the query).",
    )
    guard_policy: GuardPolicy | None = Field(
        default=None,
        description="What a classifier in front of a language model answers to gateways: for text-classification, "
        "token-classification and zero-shot-token-classification. None: it has no routes for them but `/classify`.",
    )
    grpc: bool = Field(
        default=False,
        description="Serve the Open Inference Protocol v2 over gRPC as well, on port 8082 of the Service. Not through "
        "a gateway.",
        json_schema_extra=CLUSTER | NO_SCHEMA_DEFAULT,
    )
