"""OptimizedModel (`penstock.dev/v1alpha1`): one optimisation and its result, named by a hash of its spec.

The operator writes these. Endpoints of one namespace with the same key share one. The name is the beginning of the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar, Literal, Self

from pydantic import Field

from penstock.hardware import NeuronGeneration
from penstock.recipe import GENERATION_PRECISIONS, EngineName
from penstock.resources.base import NO_SCHEMA_DEFAULT, AnyMetadata, Facts, Resource, Spec
from penstock.resources.conditions import Condition
from penstock.resources.endpoint import EndpointCore, ModelEndpointSpec, Serving, ServingLimits
from penstock.resources.fields.rules import Rule
from penstock.resources.fields.text_fields import Digest, Time
from penstock.resources.job_summary import Failure
from penstock.resources.result import ArtefactReference, Result
from penstock.tasks import TaskName

NAME_DIGITS = 16
"""Hexadecimal digits of the key in the name."""
RESULT_FORMAT = 2
"""The newest format of results that this release writes and reads. 1: the artefact is directly in the installation's
store, as up to 0.2. 2: it is in the store of its namespace.

Raise it when pods of the release before cannot serve the artefacts: its operator then leaves these results alone.
"""
SEARCH_REVISION = 1
"""Raise it when the search finds plans that are measurably faster, or when the artefacts of earlier releases answer
otherwise than they should: models with a result of a lower revision are optimised again (docs/decisions/new-images.md).
"""


def texts_of(value: str) -> tuple[str, ...]:
    """The texts in the value of a ConfigMap's key: one on each line, without surrounding spaces and empty lines."""
    return tuple(line.strip() for line in value.split("\n") if line.strip())


def texts_digest(texts: Sequence[str]) -> Digest:
    """The digest of texts from a ConfigMap, for `OptimizedModelSpec.texts_digest`."""
    lines = "".join(f"{text}\n" for text in texts)
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


class Toolchain(Spec):
    """The software that makes the artefact: another version may have another result."""

    image: str = Field(min_length=1, max_length=512, description="The optimiser's image.")
    version: str = Field(min_length=1, max_length=64, description="The version of Penstock in it.")
    target: NeuronGeneration | None = Field(
        default=None, description="The Inferentia devices that it compiles for. None: it optimises for CPUs."
    )
    format: int = Field(
        default=1,
        ge=1,
        le=1_000_000,
        description="Format of the artefact, and its place in the store. Operators of releases that do not have this "
        "format do not serve it. It is not part of the key.",
        json_schema_extra=NO_SCHEMA_DEFAULT,
    )
    revision: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Revision of the search. A result that serves is kept after an upgrade, unless the operator has a "
        "higher one (`--search-revision`). It is not part of the key.",
        json_schema_extra=NO_SCHEMA_DEFAULT,
    )


class OptimizedModelSpec(EndpointCore):
    """Everything that the optimisation depends on. Immutable: another spec is another OptimizedModel."""

    texts_digest: Digest | None = Field(
        default=None, description="Digest of the texts of workload.textsFrom: other texts are another optimisation."
    )
    toolchain: Toolchain

    RULES: ClassVar[tuple[Rule, ...]] = (
        *EndpointCore.RULES,
        Rule(
            "self.optimization.mode != 'Pinned'",
            lambda it: it.optimization.artefact is None,
            "mode is Pinned, which needs no optimisation: write mode: Auto or mode: Disabled",
            field_path=".optimization",
        ),
    )

    @classmethod
    def of(cls, endpoint: ModelEndpointSpec, toolchain: Toolchain, *, texts_digest: str | None = None) -> Self:
        """The spec for an endpoint, with the time budget, and without fields that do not change the result: serving
        during the optimisation, prompts, caches, gRPC, the order of engines and precisions, and precisions that the
        task does not have."""
        optimization = endpoint.optimization
        precisions = set(optimization.precisions)
        if endpoint.task is not TaskName.TEXT_GENERATION:
            # An endpoint that allows nothing else keeps them: the field may not be empty.
            precisions = precisions - GENERATION_PRECISIONS or precisions
        # Devices of Inferentia are for one engine alone, and CPUs for all other engines.
        engines = set(optimization.engines) - {EngineName.NEURON} or set(optimization.engines)
        core = {name: getattr(endpoint, name) for name in EndpointCore.model_fields}
        limits = {name: getattr(endpoint.serving, name) for name in ServingLimits.model_fields}
        core["serving"] = ServingLimits(**limits)
        core["optimization"] = optimization.model_copy(
            update={
                "engines": tuple(sorted(engines)),
                "precisions": tuple(sorted(precisions)),
                "serve_while_optimizing": True,
                "budget_seconds": optimization.seconds(compiles=toolchain.target is not None),
            }
        )
        return cls(**core, toolchain=toolchain, texts_digest=texts_digest)

    def endpoint_spec(self) -> ModelEndpointSpec:
        """The spec as an endpoint, for the optimiser; fields that only concern pods have their defaults."""
        core = {name: getattr(self, name) for name in EndpointCore.model_fields}
        return ModelEndpointSpec(**core | {"serving": Serving(**self.serving.model_dump())})


def optimized_model_key(spec: OptimizedModelSpec) -> str:
    """sha256, hexadecimal, of the spec in a canonical form.

    The model counts as it is written: a branch (`@main`) that gets new commits does not change the key. The format and
    the revision are not in the key: results of older ones serve on.
    """
    value = spec.to_object()
    for name in ("format", "revision"):
        value["toolchain"].pop(name, None)
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def optimized_model_name(spec: OptimizedModelSpec) -> str:
    """The name of the OptimizedModel with this spec."""
    return optimized_model_key(spec)[:NAME_DIGITS]


class Phase(StrEnum):
    """Phase of an optimisation."""

    PENDING = "Pending"
    OPTIMIZING = "Optimizing"
    READY = "Ready"
    FAILED = "Failed"


class OptimizedModelStatus(Facts):
    """Progress and result of the optimisation."""

    observed_generation: int | None = Field(default=None, ge=0, description="The generation that this status is about.")
    phase: Phase = Field(default=Phase.PENDING)
    progress: str = Field(default="", max_length=32, description="Candidates that are done, of all: `7/23`.")
    stage: str = Field(default="", max_length=256, description="The current step of the job.")
    baseline: ArtefactReference | None = Field(default=None, description="The fp32 artefact, published early.")
    artefact: ArtefactReference | None = Field(default=None, description="The result.")
    result: Result | None = Field(default=None, description="The result, with the main measurements.")
    failure: Failure | None = Field(default=None, description="Why the last attempt failed.")
    attempts: int = Field(default=0, ge=0, description="Number of jobs that were started.")
    retry_after: Time | None = Field(default=None, description="When the next attempt is made.")
    job: str = Field(default="", max_length=253, description="The job of the last attempt.")
    conditions: tuple[Condition, ...] = Field(
        default=(), max_length=16, description="Conditions, each with the reason and what to do."
    )
    last_used: Time | None = Field(
        default=None,
        description="When the last endpoint stopped using it; none while one does. It is deleted some time after that.",
    )


class OptimizedModel(Resource):
    """One optimisation and its result. The operator creates it for ModelEndpoints, and deletes it when no endpoint has
    used it for some time."""

    KIND: ClassVar[str] = "OptimizedModel"

    api_version: Literal["penstock.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["OptimizedModel"]
    metadata: AnyMetadata
    spec: OptimizedModelSpec
    status: OptimizedModelStatus = OptimizedModelStatus()
