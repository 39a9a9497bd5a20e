"""Errors as a job reports them: a reason for machines, words for people, and whether to try again."""

from __future__ import annotations

import errno
from typing import Annotated, Self

from pydantic import Field

from penstock import errors
from penstock.resources.base import Facts

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
"""Reasons of errors whose own name is not one; the others have their class's name."""
INTERNAL = "InternalError"
"""Something that nobody foresaw."""


class Failure(Facts):
    """Why a job failed."""

    reason: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z]*$")] = Field(
        description="In one word for machines, such as ModelAccessDenied."
    )
    message: Annotated[str, Field(max_length=2048)] = Field(description="What is wrong, and where.")
    remedy: Annotated[str, Field(max_length=1024)] = Field(default="", description="What to do next.")
    retryable: bool = Field(default=False, description="Whether the same job may succeed later.")

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The failure that an exception means. One that is not ours may pass: it is retryable, and says its type."""
        if isinstance(error, errors.PenstockError):
            reason = REASONS.get(type(error), type(error).__name__)
            return cls(
                reason=reason,
                message=_within(error.message, 2048),
                remedy=_within(error.remedy, 1024),
                retryable=error.temporary,
            )
        if isinstance(error, MemoryError):
            return cls.of(
                errors.OutOfMemory("the optimisation ran out of memory", remedy="Raise spec.pod.memory of the endpoint")
            )
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            place = f" ({error.filename})" if error.filename else ""
            return cls.of(errors.OutOfDisk(f"a disk is full{place}", remedy="Make room on it, or use a larger volume"))
        told = str(error).strip()
        return cls(
            reason=INTERNAL,
            message=_within(f"{type(error).__name__}: {told}" if told else type(error).__name__, 2048),
            remedy="Look into the log of the job's pod, and file an issue with it",
            retryable=True,
        )


def _within(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"
