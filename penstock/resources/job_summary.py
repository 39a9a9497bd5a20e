"""The report of an optimisation job, as a termination message: the result, or the failure with its reason.

Kubernetes keeps at most 4,096 bytes. `Summary.to_message` leaves out the least important parts first, and marks that.
The artefact has all measurements.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator
from pydantic_core import from_json

from penstock import errors
from penstock.errors import ArtefactError
from penstock.manifest import Manifest
from penstock.resources.base import Facts
from penstock.resources.result import (
    ArtefactReference,
    CapacityFacts,
    RateFacts,
    Result,
    TokenCapacityFacts,
    TokenRateFacts,
    cut,
)

LIMIT_BYTES = 4096
"""Bytes of a termination message that a kubelet reads."""
REASONS: dict[type[errors.PenstockError], str] = {
    errors.PenstockError: "OptimizationFailed",
    errors.SpecError: "InvalidSpec",
    errors.SettingError: "InvalidSetting",
    errors.ModelError: "ModelUnusable",
    errors.ArtefactError: "ArtefactDamaged",
    errors.StoreError: "StoreMisconfigured",
    errors.HostError: "HostUnsuitable",
    errors.OptimizationError: "OptimizationFailed",
}
"""Reasons of errors that are not named like their class."""
INTERNAL = "InternalError"
"""Reason of an unexpected error."""


class Failure(Facts):
    """Why a job failed."""

    reason: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z]*$")] = Field(
        description="Reason as one word, such as ModelAccessDenied."
    )
    message: Annotated[str, Field(max_length=2048)] = Field(description="What is wrong, and where.")
    remedy: Annotated[str, Field(max_length=1024)] = Field(default="", description="What to do next.")
    retryable: bool = Field(default=False, description="Whether the same job may succeed later.")

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The failure for an exception. One that is no PenstockError is retryable, and its type is in the message."""
        if isinstance(error, errors.PenstockError):
            reason = REASONS.get(type(error), type(error).__name__)
            return cls(
                reason=reason,
                message=cut(error.message, 2048),
                remedy=cut(error.remedy, 1024),
                retryable=error.temporary,
            )
        if isinstance(error, MemoryError):
            return cls.of(
                errors.OutOfMemory("the optimisation ran out of memory", remedy="Raise spec.pod.memory of the endpoint")
            )
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            place = f" ({error.filename})" if error.filename else ""
            return cls.of(errors.OutOfDisk(f"a disk is full{place}", remedy="Make room on it, or use a larger volume"))
        text = errors.printable(str(error).strip())
        return cls(
            reason=INTERNAL,
            message=cut(f"{type(error).__name__}: {text}" if text else type(error).__name__, 2048),
            remedy="Look into the log of the job's pod, and file an issue with it",
            retryable=True,
        )


class Summary(Facts):
    """The outcome of a job: an artefact and its result, or a failure."""

    succeeded: bool
    artefact: ArtefactReference | None = None
    baseline: ArtefactReference | None = None
    """The fp32 artefact, which may have been published before a failure."""
    result: Result | None = None
    failure: Failure | None = None

    WORDS: ClassVar[str] = "a summary has artefact and result when it succeeded, and failure when it did not"

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> Self:
        whole = self.artefact is not None and self.result is not None
        if whole != self.succeeded or (self.failure is None) != self.succeeded:
            raise ValueError(self.WORDS)
        return self

    @classmethod
    def failed(cls, error: BaseException, *, baseline: ArtefactReference | None = None) -> Self:
        """The report of a job that ended with this exception."""
        return cls(succeeded=False, failure=Failure.of(error), baseline=baseline)

    def to_message(self, *, limit: int = LIMIT_BYTES) -> str:
        """JSON of at most `limit` bytes (UTF-8; 4,096 always suffice), with as many details as fit."""
        message = self._json()
        for smaller in self._smaller():
            if len(message.encode()) <= limit:
                break
            message = smaller._json()  # noqa: SLF001 - of the same class
        return message

    @classmethod
    def from_message(cls, message: str, *, read: Callable[[str], Any] = from_json) -> Self:
        """Read a termination message; ArtefactError when it is another text, such as the last lines of a crash.

        `read` parses JSON; ValueError for other texts.
        """
        try:
            return cls.model_validate(read(message))
        except ValueError as error:
            last = message.strip().splitlines()[-1:] or ["nothing"]
            raise ArtefactError(
                f"the job left no summary but: {cut(last[0], 300)}", remedy="Look into the log of the job's pod"
            ) from error

    def _json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)

    def _smaller(self) -> Iterator[Self]:
        """Smaller and smaller reports, without the least important parts first."""
        if self.result is not None:
            for result in _smaller_results(self.result):
                yield self.model_copy(update={"result": result})
        if self.failure is not None:
            for message, remedy in ((1000, 500), (400, 200), (150, 60)):
                shorter = {"message": cut(self.failure.message, message), "remedy": cut(self.failure.remedy, remedy)}
                yield self.model_copy(update={"failure": self.failure.model_copy(update=shorter)})


def summary_of(
    manifest: Manifest, *, digest: str, uri: str, size_bytes: int, baseline: ArtefactReference | None = None
) -> Summary:
    """The report of a job that published this artefact of `size_bytes` at `uri`."""
    return Summary(
        succeeded=True,
        artefact=ArtefactReference(digest=digest, uri=uri, bytes=size_bytes),
        baseline=baseline,
        result=Result.of(manifest),
    )


def _smaller_results(result: Result) -> Iterator[Result]:
    now = result.model_copy(update={"left_out": True})
    for update in _steps(now):
        now = now.model_copy(update=update)
        yield now


def _steps(result: Result) -> Iterator[dict[str, object]]:
    """Updates that make the result smaller, in order."""
    for length in (120, 60):
        yield {
            "rejected": tuple(
                one.model_copy(update={"recipe": cut(one.recipe, length), "reason": cut(one.reason, length)})
                for one in result.rejected
            )
        }
    yield {"findings": tuple(cut(one, 100) for one in result.findings)}
    short = tuple(
        one.model_copy(update={"recipe": cut(one.recipe, 60), "reason": cut(one.reason, 60)}) for one in result.rejected
    )
    for count in (12, 8, 4, 0):
        yield {"rejected": short[:count]}
    yield {"findings": tuple(cut(one, 100) for one in result.findings[:3])}
    for count in (8, 5):
        yield {"capacity": _thinned(result.capacity, count)}
    if (tokens := result.token_capacity) is not None:
        kept = [index for index, point in enumerate(tokens.points) if index % 2 == 0 or _is_best(point, tokens)]
        yield {"token_capacity": tokens.model_copy(update={"points": tuple(tokens.points[index] for index in kept)})}
    for count in (8, 4):
        yield {"accuracy": result.accuracy.model_copy(update={"metrics": result.accuracy.metrics[:count]})}
    yield {"latency": result.latency[:: max(1, -(-len(result.latency) // 4))]}
    yield {"findings": ()}
    yield {"workload": "", "objective": cut(result.objective, 60), "model_resolved": ""}
    yield {"accuracy": result.accuracy.model_copy(update={"metrics": (), "reason": cut(result.accuracy.reason, 60)})}
    yield {"capacity": _thinned(result.capacity, 2), "latency": ()}
    yield {
        "objective": "",
        "model_digest": "",
        "plan": result.plan.model_copy(update={"options": (), "summary": cut(result.plan.summary, 60)}),
        "cpu": result.cpu.model_copy(update={"model_name": cut(result.cpu.model_name, 40)}),
        "capacity": result.capacity.model_copy(update={"points": ()}),
        "token_capacity": result.token_capacity and result.token_capacity.model_copy(update={"points": ()}),
    }


def _is_best(point: TokenRateFacts, capacity: TokenCapacityFacts) -> bool:
    return point.tokens_per_second == capacity.tokens_per_second


def _thinned(capacity: CapacityFacts, count: int) -> CapacityFacts:
    """At most `count` points (two or more): the last one within the objective, the next one, and further ones
    at even distances."""
    points = capacity.points
    if len(points) <= count:
        return capacity
    limit = capacity.p95_objective_milliseconds or float("inf")
    missed = next((index for index, point in enumerate(points) if not _keeps(point, limit)), len(points) - 1)
    kept = {max(missed - 1, 0), missed}
    step = (len(points) - 1) / max(count - 1, 1)
    for index in range(count):
        if len(kept) >= count:
            break
        kept.add(round(index * step))
    return capacity.model_copy(update={"points": tuple(points[index] for index in sorted(kept))})


def _keeps(point: RateFacts, p95_milliseconds: float) -> bool:
    return point.p95_milliseconds <= p95_milliseconds and point.refused_share == 0
