"""The one exception tree of what a user or an operator can put right.

    PenstockError                 message, remedy
    ├── SpecError                 the endpoint file is wrong (field)
    ├── ModelError                the model cannot be used
    │   ├── ModelNotFound         no such folder, repository, revision or package
    │   ├── ModelAccessDenied     the source wants (other) credentials
    │   ├── UnsafeModel           pickled weights, or a model that needs its own code run
    │   ├── CorruptModel          a file is missing, truncated or does not fit the others
    │   └── UnsupportedModel      an architecture or a task that no path here can take
    ├── SettingError              a setting of a process is wrong (field)
    ├── ArtefactError             an artefact is incomplete or altered, or was made for another machine
    ├── HostError                 this machine cannot do it (memory, cores, instruction set)
    └── OptimizationError         no candidate may be served

Each carries a remedy: one sentence that says what to do next. The command line prints `error: message. remedy`.
Request errors of the HTTP server are another tree: `penstock_runtime.errors`.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Something that the caller can put right: `message` says what and where, `remedy` what to do next."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message


class SpecError(PenstockError):
    """The endpoint file is wrong; `field` is the dotted path, such as `spec.scaling.minReplicas`."""

    def __init__(self, message: str, *, field: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.field = field


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


class UnsafeModel(ModelError):
    """The weights are pickled, or the model wants its own code to be run: both can run anything."""


class CorruptModel(ModelError):
    """A file is missing, truncated, or does not fit the others."""


class UnsupportedModel(ModelError):
    """An architecture, or a task of it, that no path here can take."""


class ArtefactError(PenstockError):
    """An artefact is incomplete or altered, or was made for another machine."""


class HostError(PenstockError):
    """This machine cannot do what is asked: memory, cores or instruction set."""


class OptimizationError(PenstockError):
    """No candidate may be served."""
