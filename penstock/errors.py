"""The exception tree for problems that a user or an administrator can solve.

    PenstockError                 message, remedy
    ├── SpecError                 the endpoint file is wrong (field)
    ├── ModelError                the model cannot be used
    │   ├── ModelNotFound         no such folder, repository, revision or package
    │   ├── ModelAccessDenied     the source requires (other) credentials
    │   ├── ModelUnavailable      the source does not answer at the moment (temporary)
    │   ├── UnsafeModel           pickled weights, or a model that needs its own code run
    │   ├── CorruptModel          a file is missing, truncated or does not fit the rest
    │   └── UnsupportedModel      an architecture or a task that Penstock does not support
    ├── SettingError              a setting of a process is wrong (field)
    ├── MissingPackage            an optional package is needed and not installed
    ├── ArtefactError             an artefact is incomplete or altered, or was made for another machine
    │   ├── ArtefactNotFound      the store has none of this digest
    │   └── OtherInstructionSet   it was measured and judged on another instruction set
    ├── StoreError                the artefact store cannot be used as it is set
    │   ├── StoreAccessDenied     it requires (other) credentials or permissions
    │   └── StoreUnavailable      it does not answer at the moment (temporary)
    ├── HostError                 this machine cannot do it (memory, cores, instruction set)
    │   ├── OutOfDisk             a volume or the node's disk is full (temporary: another node may have room)
    │   ├── OutOfMemory           the memory limit was hit
    │   └── DeviceUnavailable     the cores of an accelerator are taken, or have failed (temporary)
    ├── OptimizationError         no candidate may be served
    │   └── NoCandidateWithinBudget  `whenNoCandidate: Fail`, and none kept the accuracy budget
    ├── IndexSampleUnusable       a sample of an index cannot be read, or is too small
    ├── Interrupted               a signal ended the process before it had finished (temporary)
    └── TextsChanged              the texts of a ConfigMap differ from the optimised ones (temporary)

`temporary` is true for problems that may disappear without a change (try again later).
Each has a remedy: one sentence with what to do next. The command line prints `error: message. remedy`.
Request errors of the HTTP server are another tree: `penstock_runtime.errors`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, characters that change the direction of text, and halves of characters."""


def printable(text: str, *, keep_newlines: bool = False) -> str:
    r"""The text with control characters as escapes, such as `\n` and `\x1b`.

    Texts of models, files and servers go through it before they are logged or shown: a line break in them would begin a
    log line that looks like one of ours, and an escape sequence would control the terminal.
    """

    def escape(found: re.Match[str]) -> str:
        character = found[0]
        return character if keep_newlines and character == "\n" else character.encode("unicode_escape").decode()

    return _UNPRINTABLE.sub(escape, text)


class PenstockError(Exception):
    """A problem that the user can solve. `message`: the problem and its location; `remedy`: the next step.

    Both are `printable`.
    """

    temporary: ClassVar[bool] = False
    """True when the same call may succeed later without any change."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = printable(message)
        self.remedy = printable(remedy)

    def __str__(self) -> str:
        end = "" if self.message.endswith((".", "?", "!")) else "."
        return f"{self.message}{end} {self.remedy}" if self.remedy else self.message


class SpecError(PenstockError):
    """The endpoint file is wrong; `field` is the dotted path, such as `spec.scaling.minReplicas`.

    Several problems come as one error: `problems` has each of them, `field` is of the first.
    """

    def __init__(self, message: str, *, field: str = "", remedy: str = "", problems: Sequence[SpecError] = ()) -> None:
        super().__init__(message, remedy=remedy)
        if problems:
            # One line for each problem. The texts are escaped already.
            self.message = printable(message, keep_newlines=True)
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
    """The source requires credentials, or different ones."""


class ModelUnavailable(ModelError):
    """The source does not answer, is overloaded, or closed the connection: trying again later may help.

    `retry_after_seconds` is the delay that the source wants; None when it gave none.
    """

    temporary = True

    def __init__(self, message: str, *, remedy: str = "", retry_after_seconds: float | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_seconds = retry_after_seconds


class UnsafeModel(ModelError):
    """The weights are pickled, or the model needs code of its repository: both can execute any code."""


class CorruptModel(ModelError):
    """A file is missing, truncated, or does not fit the rest."""


class UnsupportedModel(ModelError):
    """An architecture or a task that Penstock does not support."""


class MissingPackage(PenstockError):
    """An optional package is needed for this and not installed; the remedy has the command that installs it."""


class IndexSampleUnusable(PenstockError):
    """A sample of an index cannot be read, or is too small."""


class ArtefactError(PenstockError):
    """An artefact is incomplete or altered, or was made for another machine."""


class ArtefactNotFound(ArtefactError):
    """The store has no artefact of this digest, or only a part of one."""


class OtherInstructionSet(ArtefactError):
    """The plan was measured and judged on another instruction set: answers and speed may differ on this one."""


class StoreError(PenstockError):
    """The artefact store cannot be used as configured: its address, its settings or its permissions."""


class StoreAccessDenied(StoreError):
    """The store requires credentials, or different ones; or the permissions of a volume forbid it."""


class StoreUnavailable(StoreError):
    """The store does not answer, is overloaded, or closed the connection: trying again later may help."""

    temporary = True


class HostError(PenstockError):
    """This machine lacks memory, cores or an instruction set."""


class OutOfDisk(HostError):
    """The disk or volume is full. Another node may have space, and this one may be cleaned."""

    temporary = True


class OutOfMemory(HostError):
    """The memory limit was exceeded, and would be exceeded again."""


class DeviceUnavailable(HostError):
    """The cores of an accelerator are taken, or all have failed. A later start, or another node, may have working
    ones."""

    temporary = True


class OptimizationError(PenstockError):
    """No candidate may be served."""


class NoCandidateWithinBudget(OptimizationError):
    """`whenNoCandidate: Fail`, and no candidate was found to be within the accuracy budget in the given time."""


class Interrupted(PenstockError):
    """A signal ended the process before it had finished: eviction, deletion, a node that is drained."""

    temporary = True


class TextsChanged(PenstockError):
    """The ConfigMap of `workload.textsFrom` has other texts than those that the optimisation is for, or is gone."""

    temporary = True


def closest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The most similar of the choices, for "did you mean"; None when no similarity (0 to 1) reaches `cutoff`."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)), None)
