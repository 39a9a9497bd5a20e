"""ModelEndpoint (`penstock.dev/v1alpha1`): what a user applies, and what `penstock serve` takes from a file.

Field names are camelCase on the outside and snake_case here. Unknown fields are errors: a typo must not be a default.
"""

from __future__ import annotations

import difflib
import re
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from penstock.errors import SpecError
from penstock.recipe import EngineName, Precision
from penstock.source import ModelSource
from penstock.tasks import TaskName

API_VERSION = "penstock.dev/v1alpha1"
NAME_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Spec(BaseModel):
    """A part of a resource: frozen, camelCase outside, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Latency(Spec):
    """Answer within this time."""

    p95_milliseconds: float = Field(gt=0, description="95 % of the requests are answered within this, milliseconds.")


class Throughput(Spec):
    """Answer this many."""

    requests_per_second: float = Field(gt=0, description="Requests a second that one replica is to take.")


class Objective(Spec):
    """What to optimise for. Both: the highest rate within the latency. None: best latency first, then throughput."""

    latency: Latency | None = None
    throughput: Throughput | None = None

    @property
    def summary(self) -> str:
        """One line for tables and the manifest."""
        parts = []
        if self.latency is not None:
            parts.append(f"p95 within {self.latency.p95_milliseconds:g} ms")
        if self.throughput is not None:
            parts.append(f"{self.throughput.requests_per_second:g} requests/s")
        return " and ".join(parts) or "best of latency and throughput"


class Scaling(Spec):
    """How many replicas."""

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"minReplicas {self.min_replicas} is over maxReplicas {self.max_replicas}: "
                "raise maxReplicas or lower minReplicas"
            )
        return self


class Workload(Spec):
    """What the requests look like: decides what the search measures and what the capacity curve means."""

    sequence_lengths: tuple[int, ...] = Field(
        default=(),
        description="Typical lengths in tokens, each as likely as it is listed. Empty: log-normal, median 44, p95 186.",
    )
    texts: tuple[str, ...] = Field(
        default=(),
        description="Typical inputs: the guard calibrates and judges with them as well as with its own.",
    )


class OptimizationMode(StrEnum):
    """Whether to search."""

    AUTO = "Auto"
    OFF = "Off"


class NoCandidate(StrEnum):
    """What to do when no candidate is within the accuracy budget."""

    SERVE_FP32 = "ServeFP32"
    FAIL = "Fail"


class AccuracyBudget(Spec):
    """How far answers may move from those of the fp32 model. Each has a default by task (docs/guard.md)."""

    min_cosine: float | None = Field(default=None, gt=0, le=1, description="Embeddings: lowest cosine of any text.")
    min_agreement: float | None = Field(
        default=None, gt=0, le=1, description="Other tasks: lowest share of answers that stay the same."
    )


class Optimization(Spec):
    """The search and its limits."""

    mode: OptimizationMode = OptimizationMode.AUTO
    engines: tuple[EngineName, ...] = Field(default=tuple(EngineName), min_length=1)
    precisions: tuple[Precision, ...] = Field(default=tuple(Precision), min_length=1)
    accuracy: AccuracyBudget = AccuracyBudget()
    when_no_candidate: NoCandidate = NoCandidate.SERVE_FP32
    budget_seconds: float = Field(default=600, gt=0, description="The whole optimisation ends within this time.")


class Serving(Spec):
    """Limits of the server that belong to the endpoint rather than to the process."""

    max_input_tokens: int | None = Field(
        default=None, ge=1, description="Longer inputs are cut or refused. None: the model's."
    )
    truncate: bool = Field(default=True, description="Cut over-long inputs; false answers them with 422.")


class ModelEndpointSpec(Spec):
    """What to serve, on what, how well."""

    model: str = Field(
        description="hf://repo@revision, s3://, gs://, az://, pvc://claim/path, file:///path, pkg://import_name/folder"
    )
    task: TaskName
    hardware_class: str = Field(default="any", min_length=1)
    cores: int = Field(default=1, ge=1, le=256, description="Physical cores of one replica.")
    objective: Objective = Objective()
    workload: Workload = Workload()
    optimization: Optimization = Optimization()
    serving: Serving = Serving()
    scaling: Scaling = Scaling()

    @property
    def source(self) -> ModelSource:
        """The model field, parsed; SpecError when it names no source that we know."""
        return ModelSource.parse(self.model)


class Metadata(BaseModel):
    """The part of Kubernetes' object metadata that a file needs."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(min_length=1, max_length=63)
    namespace: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class ModelEndpoint(BaseModel):
    """The resource."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    api_version: Literal["penstock.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["ModelEndpoint"]
    metadata: Metadata
    spec: ModelEndpointSpec
    status: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_yaml(cls, text: str, *, origin: str = "the file") -> ModelEndpoint:
        """Read one ModelEndpoint; SpecError names the field, the value and what to write instead."""
        try:
            documents = [document for document in yaml.safe_load_all(text) if document is not None]
        except yaml.YAMLError as error:
            raise SpecError(f"{origin} is not YAML: {error}") from error
        endpoints = [d for d in documents if isinstance(d, dict) and d.get("kind") == "ModelEndpoint"]
        if len(endpoints) != 1:
            kinds = (
                ", ".join(str(d.get("kind")) if isinstance(d, dict) else type(d).__name__ for d in documents)
                or "nothing"
            )
            raise SpecError(
                f"{origin} holds {kinds}, not one ModelEndpoint",
                remedy=f"Start it with `apiVersion: {API_VERSION}` and `kind: ModelEndpoint`",
            )
        return cls.from_object(endpoints[0])

    @classmethod
    def from_object(cls, value: dict[str, Any]) -> ModelEndpoint:
        """Read one ModelEndpoint from parsed YAML or JSON; SpecError as `from_yaml`."""
        try:
            endpoint = cls.model_validate(value)
        except ValidationError as error:
            raise _spec_error(error) from error
        if not NAME_PATTERN.fullmatch(endpoint.metadata.name):
            raise SpecError(
                f"metadata.name {endpoint.metadata.name!r} is not a DNS label",
                field="metadata.name",
                remedy="Use lower-case letters, digits and '-', starting and ending with a letter or digit",
            )
        _ = endpoint.spec.source
        return endpoint

    @classmethod
    def from_file(cls, path: Path) -> ModelEndpoint:
        """Read one ModelEndpoint from a YAML file."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SpecError(f"{path}: {error.strerror}", remedy="Give the path of a ModelEndpoint YAML file") from error
        except UnicodeDecodeError as error:
            raise SpecError(f"{path} is not UTF-8 text", remedy="Give the path of a ModelEndpoint YAML file") from error
        return cls.from_yaml(text, origin=str(path))


def _spec_error(error: ValidationError) -> SpecError:
    """The first problem in the user's own words: dotted path, value, near misses of a mistyped field."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _field_names(tuple(str(part) for part in first["loc"][:-1]))
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]}?" if close else f"Fields here: {', '.join(known)}"
        return SpecError(f"{path}: there is no such field", field=path, remedy=hint)
    if first["type"] == "missing":
        return SpecError(f"{path} is missing", field=path, remedy="Add it (docs/model-endpoint.md lists the fields)")
    message = first["msg"].removeprefix("Value error, ")
    given = "" if isinstance(first["input"], dict) else f" (given: {first['input']!r})"
    return SpecError(f"{path}: {message}{given}", field=path)


def _field_names(path: tuple[str, ...]) -> list[str]:
    """The camelCase field names of the model at a dotted path of the resource."""
    model: type[BaseModel] = ModelEndpoint
    for part in path:
        for name, field in model.model_fields.items():
            if part in {name, field.alias}:
                candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
                nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
                if nested:
                    model = nested[0]
                break
    return [field.alias or name for name, field in model.model_fields.items()]
