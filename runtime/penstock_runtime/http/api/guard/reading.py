"""Asks the model about the texts of a gateway's request: verdicts by the endpoint's policy, within the deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from penstock.resources.endpoint_parts.guard_policy import GuardPolicy
from penstock.tasks import TaskName
from penstock_runtime.coverage import Coverage
from penstock_runtime.errors import (
    DeadlineExceeded,
    UnsupportedRoute,
)
from penstock_runtime.http.api.core.bodies import json_response, timing_headers
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.guard.verdicts import (
    RequestVerdict,
    Span,
    TextReading,
    VerdictOutcome,
    judge,
    windows_of,
    worst,
)
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.serving.predictor import Answer

ENVOY_TIMEOUT = b"x-envoy-expected-rq-timeout-ms"
"""Envoy's own limit for a request, which it adds to it."""


class RequestGuard:
    """What all routes of gateways share."""

    def __init__(self, service: ModelService) -> None:
        self.service = service

    @property
    def policy(self) -> GuardPolicy:
        """The endpoint's; UnsupportedRoute without one."""
        policy = self.service.status.guard_policy
        if policy is None:
            raise UnsupportedRoute(
                "this endpoint has no policy for gateways",
                remedy="Write serving.guardPolicy into the ModelEndpoint: the labels that block, and above which score",
            )
        return policy

    async def verdicts(self, request: Request, texts: Sequence[str], *, unread: bool = False) -> Verdicts:
        """The verdict about each text. `unread`: the request has parts that are not among the texts.

        The error of the model if it did not answer.
        """
        policy = self.policy
        # A text without any word has nothing that could be classified.
        places = [index for index, text in enumerate(texts) if text.strip()]
        read = [TextReading(complete=not unread)] * len(texts)
        answer: Answer | None = None
        if places:
            seconds = self._deadline_seconds(request, policy)
            answer = await self.service.predict(
                request,
                [texts[index] for index in places],
                self._parameters(policy),
                deadline_seconds=seconds,
            )
            if perf_counter() - request.received > seconds:
                raise DeadlineExceeded(
                    "the texts were classified after the deadline",
                    remedy="Allow more time (serving.guardPolicy.deadlineMilliseconds, or the gateway's), send less "
                    "text, or give the endpoint more cores",
                )
            for index, found, cut in zip(places, answer.value, answer.cut_at or [None] * len(places), strict=True):
                read[index] = _reading(policy, found, complete=cut is None and not unread)
        found_all = [judge(policy, text, one) for text, one in zip(texts, read, strict=True)]
        if unread and not texts:
            found_all = [judge(policy, "", TextReading(complete=False))]
        return Verdicts(request, self.service, found_all, answer)

    def _deadline_seconds(self, request: Request, policy: GuardPolicy) -> float:
        seconds = min(self.service.deadline_seconds(request), policy.deadline_milliseconds / 1000)
        try:
            envoy = float(request.headers.get(ENVOY_TIMEOUT, b"0")) / 1000
        except ValueError:
            envoy = 0.0
        return min(seconds, envoy) if envoy > 0 else seconds

    def _parameters(self, policy: GuardPolicy) -> Mapping[str, Any]:
        task = self.service.status.task
        if task is TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION:
            lowest = min(one.above if one.unsure_above is None else one.unsure_above for one in policy.labels.values())
            return {"candidate_labels": list(policy.labels), "threshold": lowest, "multi_label": True, "truncate": True}
        windows = windows_of(policy, self.service.status.limits.get("max_input_tokens", 0))
        return windows if task is TaskName.TEXT_CLASSIFICATION else {**windows, "aggregation_strategy": "simple"}


class Verdicts:
    """Of the texts of one request, and the answer to the gateway."""

    def __init__(
        self, request: Request, service: ModelService, verdicts: Sequence[RequestVerdict], answer: Answer | None
    ) -> None:
        self.texts = verdicts
        self._request = request
        self._service = service
        self._answer = answer

    def response(self, value: Any, verdict: RequestVerdict | None = None) -> Response:
        """The response with this body; counts the request. `verdict`: about all of it, if not the most severe."""
        verdict = verdict or worst(self.texts)
        if not all(one.reading.complete for one in self.texts):
            self._request.coverage = Coverage.PARTIAL
        elif any(one.outcome is VerdictOutcome.ABSTAIN for one in self.texts):
            self._request.coverage = Coverage.ABSTAINED
        self._service.metrics.guard.verdict(verdict.outcome)
        timings = b"" if self._answer is None else timing_headers(self._answer)
        return json_response(value, headers=b"x-penstock-verdict: %b\r\n%b" % (verdict.outcome.encode(), timings))


def _reading(policy: GuardPolicy, found: Sequence[Mapping[str, Any]], *, complete: bool) -> TextReading:
    """Of the answer of a task for one text: labels with scores, or entities."""
    scores: dict[str, float] = {}
    spans = []
    for one in found:
        label = str(one["entity_group"] if "entity_group" in one else one["label"])
        if label not in policy.labels:
            continue
        # A mean of float32 scores may be above 1 by rounding.
        score = min(float(one["score"]), 1.0)
        scores[label] = max(score, scores.get(label, 0.0))
        if "start" in one:
            spans.append(Span(label, score, one["start"], one["end"]))
    return TextReading(scores, spans, complete)
