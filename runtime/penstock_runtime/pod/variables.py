"""Environment variables of a serving pod, besides the settings of the server (`penstock_runtime.settings`)."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import field_validator, model_validator

from penstock.resources.endpoint_parts.guard_policy import GuardPolicy
from penstock.resources.endpoint_parts.serving import Prompts
from penstock.settings import setting
from penstock.tasks import TaskName
from penstock_runtime.host.termination import DEFAULT_LOG
from penstock_runtime.settings import Variables


class PodVariables(Variables):
    """A serving pod."""

    artefact: str = setting(
        "", "What to serve: a digest (`sha256:...`) to fetch from the store, or the path of an artefact folder."
    )
    store_uri: str = setting(
        "",
        "The artefact store, for a digest: `file:///path`, `s3://bucket/prefix`, `gs://`, `az://` "
        "(docs/reference/artefact-store.md). Credentials come by the variables of the store's own library.",
    )
    cache: Path = setting(
        Path("/var/lib/penstock/cache"),
        "Folder that the artefact is fetched into; pods that share it fetch once. Needs room for it.",
    )
    name: str = setting("model", "The endpoint's name: `model` in the APIs that have one.", min_length=1)
    task: TaskName | None = setting(
        None,
        "The endpoint's task, so that the server can listen before the artefact is there. None: the artefact is "
        "fetched first.",
    )
    cores: int | None = setting(
        None, "Physical cores to use. None: as many as the plan was made for.", unit="cores", ge=1, le=1024
    )
    threads_per_core: int | None = setting(
        None,
        "Logical CPUs that the pod has for each core. None: as the processor has them. Only checked.",
        unit="CPUs",
        ge=1,
        le=8,
    )
    max_input_tokens: int | None = setting(
        None, "Longer inputs are cut or refused. None: the model's limit.", unit="tokens", ge=1
    )
    truncate: bool = setting(True, "Cut over-long inputs; false answers them with 422.")
    prompts: Prompts | None = setting(
        None,
        'Prompts, as JSON like `serving.prompts` of a ModelEndpoint: `{"texts": {"query": "query: "}, "default": '
        '"query"}`. None: those of the model\'s own files.',
    )
    guard_policy: GuardPolicy | None = setting(
        None,
        "Policy of a classifier in front of a language model, as JSON like `serving.guardPolicy` of a ModelEndpoint: "
        '`{"labels": {"INJECTION": {"above": 0.9}}}`. None: it has no routes of gateways but `/classify`.',
    )
    fp32: bool = setting(False, "Serve the fp32 graph of the artefact instead of its plan.")
    allow_other_isa: bool = setting(
        False,
        "Serve a plan that was measured and judged on processors of another instruction set all the same. Its answers "
        "were not judged and its speed was not measured on this one.",
    )
    termination_log: Path = setting(
        DEFAULT_LOG, "File for the error that ended the process, as JSON. It must exist, as in a pod."
    )
    model: str = setting(
        "", "Must not be set: a model is optimised before it is served. The error that ends the process states how."
    )

    @field_validator("prompts", mode="before")
    @classmethod
    def _parse_prompts(cls, value: object) -> object:
        return Prompts.model_validate_json(value) if isinstance(value, str) else value

    @field_validator("guard_policy", mode="before")
    @classmethod
    def _parse_policy(cls, value: object) -> object:
        return GuardPolicy.model_validate_json(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.artefact and not self.is_local and not self.store_uri:
            raise ValueError(
                "PENSTOCK_ARTEFACT is a digest, and PENSTOCK_STORE_URI is not set: set it to the store of the artefact"
            )
        return self

    @property
    def is_local(self) -> bool:
        """True when the artefact is a folder of this machine."""
        return "/" in self.artefact
