"""ModelEndpoint (`penstock.dev/v1alpha1`): what a user applies, and what `penstock serve` takes from a file.

Field names are camelCase on the outside and snake_case here. Unknown fields are errors: a typo must not be a default.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from penstock.documents import plain, read_documents
from penstock.errors import SpecError
from penstock.problems import closest, spec_error
from penstock.recipe import EngineName, Precision
from penstock.source import ModelSource
from penstock.tasks import TaskName

API_VERSION = "penstock.dev/v1alpha1"
NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS label as RFC 1035 has it: Services must begin with a letter."""


class Spec(BaseModel):
    """A part of a resource: frozen, camelCase outside, no unknown fields, no numbers that JSON lacks."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )


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

    min_replicas: int = Field(default=1, ge=0, description="Never fewer; 0 lets an idle endpoint end all its pods.")
    max_replicas: int = Field(default=4, ge=1, description="Never more.")

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

    sequence_lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="Typical lengths in tokens, each as likely as it is listed. Empty: log-normal, median 44, p95 186.",
    )
    texts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description="Typical inputs: the guard calibrates and judges with them as well as with its own.",
    )


class OptimizationMode(StrEnum):
    """Whether to search."""

    AUTO = "Auto"
    OFF = "Disabled"
    """Not `Off`: YAML reads that as false, unless it is quoted."""


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

    mode: OptimizationMode = Field(
        default=OptimizationMode.AUTO, description="`Auto` searches; `Disabled` serves the fp32 graph as it is."
    )
    engines: tuple[EngineName, ...] = Field(
        default=tuple(EngineName), min_length=1, description="The engines that candidates may use."
    )
    precisions: tuple[Precision, ...] = Field(
        default=tuple(Precision), min_length=1, description="The arithmetic that candidates may use."
    )
    accuracy: AccuracyBudget = AccuracyBudget()
    when_no_candidate: NoCandidate = Field(
        default=NoCandidate.SERVE_FP32, description="What to do when no candidate is within the accuracy budget."
    )
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
        description="Where the model comes from: `hf://organisation/name@revision`, `s3://bucket/path`, `gs://`, "
        "`az://`, `pvc://claim/path`, `file:///path`, `pkg://import_name/folder` (docs/models.md)."
    )
    task: TaskName = Field(description="What the endpoint does with a text (the words of the Hugging Face tasks).")
    hardware_class: str = Field(
        default="any", min_length=1, description="What kind of node; `any` takes the machine as it is."
    )
    cores: int = Field(default=1, ge=1, le=256, description="Physical cores of one replica.")
    objective: Objective = Objective()
    workload: Workload = Workload()
    optimization: Optimization = Optimization()
    serving: Serving = Serving()
    scaling: Scaling = Scaling()

    @field_validator("model")
    @classmethod
    def _is_a_source(cls, model: str) -> str:
        try:
            ModelSource.parse(model)
        except SpecError as error:
            problem = error.message.removeprefix(f"{error.field}: ")
            raise PydanticCustomError("spec", "{problem}", {"problem": problem, "remedy": error.remedy}) from error
        return model

    @property
    def source(self) -> ModelSource:
        """The model field, parsed."""
        return ModelSource.parse(self.model)


class Metadata(BaseModel):
    """The part of Kubernetes' object metadata that a file needs."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    """A DNS label: it becomes the name of a Service."""
    namespace: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _is_a_label(cls, name: str) -> str:
        if NAME_PATTERN.fullmatch(name):
            return name
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:63].rstrip("-")
        rule = "Use at most 63 lower-case letters, digits and '-', a letter first and no '-' last"
        remedy = f"{rule}, such as {better}" if better else rule
        problem = f"{name[:80]!r} is not a DNS label"
        raise PydanticCustomError("spec", "{problem}", {"problem": problem, "remedy": remedy})


class ModelEndpoint(BaseModel):
    """The resource."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    api_version: Literal["penstock.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["ModelEndpoint"]
    metadata: Metadata
    spec: ModelEndpointSpec
    status: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_yaml(cls, text: str, *, origin: str = "the file") -> ModelEndpoint:
        """Read the one ModelEndpoint of a YAML text, which may hold other resources too.

        SpecError lists every problem: the field, the value and what to write instead.
        """
        documents = read_documents(text, origin)
        kinds = [document.get("kind") if isinstance(document, dict) else None for document in documents]
        found = [document for document, kind in zip(documents, kinds, strict=True) if kind == "ModelEndpoint"]
        if len(found) == 1:
            return cls.from_object(found[0], origin=origin)
        if found:
            raise SpecError(f"{origin} holds {len(found)} ModelEndpoints", remedy="Keep one in each file")
        meant = next((kind for kind in kinds if isinstance(kind, str) and closest(kind, ["ModelEndpoint"])), None)
        if meant is not None:
            raise SpecError(f"{origin}: kind is {meant!r}", field="kind", remedy="Write kind: ModelEndpoint")
        named = ", ".join(kind if isinstance(kind, str) else "something without a kind" for kind in kinds)
        raise SpecError(
            f"{origin} holds {named or 'nothing'}, and no ModelEndpoint",
            remedy=f"Start it with `apiVersion: {API_VERSION}` and `kind: ModelEndpoint`",
        )

    @classmethod
    def from_object(cls, value: dict[str, Any], *, origin: str = "the ModelEndpoint") -> ModelEndpoint:
        """Read one ModelEndpoint from parsed YAML or JSON; SpecError as `from_yaml`.

        As strict as the API server, so that what runs here is accepted there: no text for numbers, no snake_case.
        """
        try:
            content = json.dumps(plain(value, origin))
        except ValueError as error:  # whole numbers of thousands of digits
            raise SpecError(f"{origin}: {error}", remedy="Write numbers of a sensible size") from error
        try:
            return cls.model_validate_json(content, strict=True, by_alias=True, by_name=False)
        except ValidationError as error:
            raise spec_error(error, cls, origin) from error

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
