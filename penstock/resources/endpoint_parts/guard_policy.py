"""The policy of a classifier in front of a language model: what follows from which label, above which score."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from penstock.resources.base import Spec
from penstock.resources.fields.rules import Rule
from penstock.tasks import TaskName

GUARD_TASKS = (
    TaskName.TEXT_CLASSIFICATION,
    TaskName.TOKEN_CLASSIFICATION,
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION,
)
"""The tasks of endpoints that may have a policy."""


class Category(StrEnum):
    """The categories of OpenAI's moderations, in its order."""

    HARASSMENT = "harassment"
    HARASSMENT_THREATENING = "harassment/threatening"
    HATE = "hate"
    HATE_THREATENING = "hate/threatening"
    ILLICIT = "illicit"
    ILLICIT_VIOLENT = "illicit/violent"
    SELF_HARM = "self-harm"
    SELF_HARM_INTENT = "self-harm/intent"
    SELF_HARM_INSTRUCTIONS = "self-harm/instructions"
    SEXUAL = "sexual"
    SEXUAL_MINORS = "sexual/minors"
    VIOLENCE = "violence"
    VIOLENCE_GRAPHIC = "violence/graphic"


class LabelAction(StrEnum):
    """What follows from a label above its score."""

    BLOCK = "Block"
    MASK = "Mask"
    REPORT = "Report"


class Otherwise(StrEnum):
    """What follows where the model gives no clear answer."""

    BLOCK = "Block"
    PASS = "Pass"  # noqa: S105 - no password


class Role(StrEnum):
    """Who wrote a message of a conversation."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class LabelRule(Spec):
    """What follows from one label of the model."""

    above: float = Field(default=0.5, ge=0, le=1, description="The score that the label must exceed.")
    unsure_above: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="A score between this and `above` is an abstention (`abstain`). None: there are none.",
    )
    action: LabelAction = Field(
        default=LabelAction.BLOCK,
        description="`Block` the request; `Mask` the label's spans, which only models of tokens have; `Report`: the "
        "request passes, and `/v1/moderations` shows the label.",
    )
    replacement: str = Field(
        default="<{label}>",
        max_length=200,
        description="The text in place of a masked span; `{label}` is its label.",
    )
    reason: str = Field(
        default="", max_length=500, description="Shown to the client of a blocked request. Empty: the label."
    )
    category: Category | None = Field(
        default=None,
        description="Its category in `/v1/moderations`, which has OpenAI's. None: the label is a further category.",
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.unsureAbove) || self.unsureAbove < self.above",
            lambda it: it.unsure_above is None or it.unsure_above < it.above,
            "unsureAbove is {unsureAbove}, and above is {above}, so that no score is between them: lower unsureAbove, "
            "or remove it",
            field_path=".unsureAbove",
        ),
    )


class GuardPolicy(Spec):
    """The policy of a classifier in front of a language model."""

    labels: dict[str, LabelRule] = Field(
        min_length=1,
        max_length=100,
        description="The labels of the model that count, such as `INJECTION`; of token-classification without `B-` and "
        "`I-`. Of zero-shot-token-classification the labels that are searched for.",
    )
    roles: tuple[Role, ...] = Field(
        default=(),
        max_length=len(Role),
        description="Whose messages are read, where a gateway states roles. Empty: all.",
    )
    incomplete: Otherwise = Field(
        default=Otherwise.BLOCK,
        description="What follows if a part of a request was not read, such as an image, or the end of a text with "
        "more than `maxWindows` windows.",
    )
    abstain: Otherwise = Field(
        default=Otherwise.PASS, description="What follows from a score between `unsureAbove` and `above`."
    )
    deadline_milliseconds: float = Field(
        default=1000,
        gt=0,
        le=60_000,
        description="A request is answered by then, or with 504. A shorter time in a header of the request counts.",
    )
    overlap_tokens: int | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="Tokens that neighbouring windows of a long text share. None: an eighth of the model's limit.",
    )
    max_windows: int = Field(
        default=128,
        ge=1,
        le=1024,
        description="Windows of a text that are read; of a longer one the end is not (`incomplete`).",
    )
