"""From what a classifier found in a text, and a policy, to a verdict. Pure.

The gateway decides what follows from a request that was not classified: `UNAVAILABLE` is an error with the status 503
or 504 (`errors.for_gateway`), and never becomes `PASS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.errors import SpecError
from penstock.resources.endpoint_parts.guard_policy import GuardPolicy, LabelAction, LabelRule, Otherwise, Role
from penstock.tasks import TaskName
from penstock_runtime.tasks.fields import near

NOT_READ = "a part of the request was not read"
OVERLAP_SHARE = 8
"""Of a window, by default: one token in eight is in the next window too."""


class VerdictOutcome(StrEnum):
    """What a gateway should do with a request, by rising severity."""

    PASS = "pass"  # noqa: S105 - no password
    ABSTAIN = "abstain"
    MASK = "mask"
    UNAVAILABLE = "unavailable"
    BLOCK = "block"


_SEVERITY = {outcome: place for place, outcome in enumerate(VerdictOutcome)}


@dataclass(frozen=True, slots=True)
class Span:
    """A label between two characters of a text."""

    label: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TextReading:
    """What the model found in one text."""

    scores: Mapping[str, float] = field(default_factory=dict)
    """The highest score of each label of the policy."""
    spans: Sequence[Span] = ()
    complete: bool = True
    """All of the text was read."""


@dataclass(frozen=True, slots=True)
class RequestVerdict:
    """About one text, or about a request."""

    outcome: VerdictOutcome
    reason: str = ""
    """For the client of the gateway."""
    text: str | None = None
    """The masked text, of `MASK`."""
    reading: TextReading = TextReading()


def judge(policy: GuardPolicy, text: str, reading: TextReading) -> RequestVerdict:
    """The verdict about one text."""
    found = {label: rule for label, rule in policy.labels.items() if reading.scores.get(label, 0.0) > rule.above}
    for label, rule in found.items():
        if rule.action is LabelAction.BLOCK:
            return RequestVerdict(VerdictOutcome.BLOCK, rule.reason or label, reading=reading)
    if not reading.complete and policy.incomplete is Otherwise.BLOCK:
        return RequestVerdict(VerdictOutcome.BLOCK, NOT_READ, reading=reading)
    unsure = [label for label, rule in policy.labels.items() if label not in found and _is_unsure(rule, label, reading)]
    if unsure and policy.abstain is Otherwise.BLOCK:
        return RequestVerdict(VerdictOutcome.BLOCK, policy.labels[unsure[0]].reason or unsure[0], reading=reading)
    masked = mask(text, reading.spans, {name: one for name, one in found.items() if one.action is LabelAction.MASK})
    if masked != text:
        return RequestVerdict(VerdictOutcome.MASK, text=masked, reading=reading)
    return RequestVerdict(VerdictOutcome.ABSTAIN if unsure else VerdictOutcome.PASS, reading=reading)


def _is_unsure(rule: LabelRule, label: str, reading: TextReading) -> bool:
    return rule.unsure_above is not None and reading.scores.get(label, 0.0) > rule.unsure_above


def mask(text: str, spans: Iterable[Span], rules: Mapping[str, LabelRule]) -> str:
    """The text with the spans of these labels replaced. Of spans that overlap, the characters of all are, by the
    replacement of the first."""
    parts, end = [], 0
    counted = (span for span in spans if span.label in rules and span.score > rules[span.label].above)
    for span in sorted(counted, key=lambda one: (one.start, -one.end)):
        if span.start >= end:
            parts += [text[end : span.start], rules[span.label].replacement.replace("{label}", span.label)]
        end = max(end, span.end)
    return "".join([*parts, text[end:]])


def worst(verdicts: Sequence[RequestVerdict]) -> RequestVerdict:
    """The verdict about a request with several texts: the most severe, the first of equal ones. PASS without any."""
    return max(verdicts, key=lambda one: _SEVERITY[one.outcome], default=RequestVerdict(VerdictOutcome.PASS))


def windows_of(policy: GuardPolicy, max_tokens: int) -> dict[str, Any]:
    """The parameters by which a task reads long texts wholly. `max_tokens`: of the model."""
    overlap = policy.overlap_tokens
    return {"stride": max_tokens // OVERLAP_SHARE if overlap is None else overlap, "max_windows": policy.max_windows}


def is_skipped(policy: GuardPolicy, role: str) -> bool:
    """Whether the policy leaves out messages of this role. A role that it cannot name is read."""
    return bool(policy.roles) and role in set(Role) and role not in policy.roles


def check_policy(
    policy: GuardPolicy, task: TaskName, labels: Sequence[str], *, room: int, gives_shares: bool = True
) -> None:
    """SpecError if a model with these labels cannot follow the policy. `room`: tokens of a window; `gives_shares`: its
    scores are from 0 to 1."""
    if policy.overlap_tokens is not None and policy.overlap_tokens >= room:
        raise SpecError(
            f"serving.guardPolicy.overlapTokens is {policy.overlap_tokens}, and windows of this model have {room} "
            "tokens",
            field="spec.serving.guardPolicy.overlapTokens",
            remedy=f"Write less than {room}, or leave it out",
        )
    if task is TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION:
        return
    of_spans = task is TaskName.TOKEN_CLASSIFICATION
    known = list(dict.fromkeys(label[2:] if label[:2] in {"B-", "I-"} else label for label in labels))
    known = known if of_spans else list(labels)
    for label, rule in policy.labels.items():
        where = f"serving.guardPolicy.labels.{label}"
        if label not in known:
            raise SpecError(
                f"serving.guardPolicy.labels has {label!r}, and the model has no such label",
                field=f"spec.{where}",
                remedy=near(label, known),
            )
        if rule.action is LabelAction.MASK and not of_spans:
            raise SpecError(
                f"{where}.action is Mask, and a model for {task.value} finds no spans",
                field=f"spec.{where}.action",
                remedy="Write Block or Report, or serve a model for token-classification",
            )
    if not gives_shares:
        raise SpecError(
            "serving.guardPolicy compares scores from 0 to 1, and this model gives other numbers (regression)",
            field="spec.serving.guardPolicy",
            remedy="Remove it, or serve a model with problem_type single_label_classification or "
            "multi_label_classification",
        )
