"""The one exception tree of what a user or an operator can put right.

    PenstockError                 message, remedy
    ├── SpecError                 the endpoint file is wrong (field)
    ├── ModelError                the model cannot be used
    │   ├── ModelNotFound         no such folder, repository, revision or package
    │   ├── ModelAccessDenied     the source wants (other) credentials
    │   ├── ModelUnavailable      the source does not answer at the moment (temporary)
    │   ├── UnsafeModel           pickled weights, or a model that needs its own code run
    │   ├── CorruptModel          a file is missing, truncated or does not fit the others
    │   └── UnsupportedModel      an architecture or a task that no path here can take
    ├── SettingError              a setting of a process is wrong (field)
    ├── MissingPackage            an optional package is needed and not installed
    ├── ArtefactError             an artefact is incomplete or altered, or was made for another machine
    │   ├── ArtefactNotFound      the store has none of this digest
    │   └── OtherInstructionSet   it was measured and judged on processors of another kind
    ├── StoreError                the artefact store cannot be used as it is set
    │   ├── StoreAccessDenied     it wants (other) credentials or permissions
    │   └── StoreUnavailable      it does not answer at the moment (temporary)
    ├── HostError                 this machine cannot do it (memory, cores, instruction set)
    │   ├── OutOfDisk             a volume or the node's disk is full (temporary: another node may have room)
    │   └── OutOfMemory           the memory limit was hit
    ├── OptimizationError         no candidate may be served
    │   └── NoCandidateWithinBudget  `whenNoCandidate: Fail`, and none kept the accuracy budget
    └── Interrupted               it was told to end before it was through (temporary)

`temporary` tells what may pass by itself (try again later) from what somebody has to put right first.
Each carries a remedy: one sentence that says what to do next. The command line prints `error: message. remedy`.
Request errors of the HTTP server are another tree: `penstock_runtime.errors`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar


class PenstockError(Exception):
    """Something that the caller can put right: `message` says what and where, `remedy` what to do next."""

    temporary: ClassVar[bool] = False
    """True when the same call may well succeed later without anybody's doing."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message


class SpecError(PenstockError):
    """The endpoint file is wrong; `field` is the dotted path, such as `spec.scaling.minReplicas`.

    Several problems come as one error: `problems` has each of them, `field` is that of the first.
    """

    def __init__(self, message: str, *, field: str = "", remedy: str = "", problems: Sequence[SpecError] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.field = field
        self.problems: tuple[SpecError, ...] = tuple(problems) or (self,)


class SettingError(PenstockError):
    """A flag or environment variable is wrong; `field` names it, such as `PENSTOCK_PORT`."""

    def __init__(self, message: str, *, field: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.field = field


class ModelError(PenstockError):
    """The model cannot be used."""


class ModelNotFound(ModelError):
    """There is no such folder, repository, revision or package."""


class ModelAccessDenied(ModelError):
    """The source wants credentials, or other ones."""


class ModelUnavailable(ModelError):
    """The source does not answer, is overloaded, or broke off: trying again later may help.

    `retry_after_seconds` is what the source itself asked for; None when it did not say.
    """

    temporary = True

    def __init__(self, message: str, *, remedy: str = "", retry_after_seconds: float | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_seconds = retry_after_seconds


class UnsafeModel(ModelError):
    """The weights are pickled, or the model wants its own code to be run: both can run anything."""


class CorruptModel(ModelError):
    """A file is missing, truncated, or does not fit the others."""


class UnsupportedModel(ModelError):
    """An architecture, or a task of it, that no path here can take."""


class MissingPackage(PenstockError):
    """An optional package is needed for this and not installed; the remedy has the command that installs it."""


class ArtefactError(PenstockError):
    """An artefact is incomplete or altered, or was made for another machine."""


class ArtefactNotFound(ArtefactError):
    """The store has no artefact of this digest, or only a part of one."""


class OtherInstructionSet(ArtefactError):
    """The plan was measured and judged on processors of another kind: its answers and its speed may differ here."""


class StoreError(PenstockError):
    """The artefact store cannot be used as it is set: its address, its settings, what it allows."""


class StoreAccessDenied(StoreError):
    """The store wants credentials, or other ones; a volume has other permissions."""


class StoreUnavailable(StoreError):
    """The store does not answer, is overloaded, or broke off: trying again later may help."""

    temporary = True


class HostError(PenstockError):
    """This machine cannot do what is asked: memory, cores or instruction set."""


class OutOfDisk(HostError):
    """No space is left where something is written. Another node may have room, and this one may be cleared."""

    temporary = True


class OutOfMemory(HostError):
    """The memory limit was hit. The same limit would be hit again."""


class OptimizationError(PenstockError):
    """No candidate may be served."""


class NoCandidateWithinBudget(OptimizationError):
    """`whenNoCandidate: Fail` was asked for, and every candidate's answers moved too far or had no turn in time."""


class Interrupted(PenstockError):
    """The process was told to end (eviction, deletion, a node that is drained) before it was through."""

    temporary = True


def closest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The most similar of the choices, for "did you mean"; None when no similarity (0 to 1) reaches `cutoff`."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)), None)
