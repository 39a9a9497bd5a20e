"""ModelEndpoint (`penstock.dev/v1alpha1`): the resource that a user applies, or passes to `penstock serve` as a file.

Fields for clusters only are marked `CLUSTER`: a file may have them, and a local run ignores them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from penstock.errors import SpecError
from penstock.recipe import EngineName, Precision
from penstock.resources.base import API_VERSION, CLUSTER, NO_SCHEMA_DEFAULT, Metadata, Resource, Spec
from penstock.resources.core import (
    NO_WAY_UP_CEL,
    SOURCE_FORMS,
    SOURCE_PATTERN,
    Latency,
    ModelSource,
    Objective,
    Scheme,
    Throughput,
    TokenTime,
)
from penstock.resources.endpoint_parts.exposure import Exposure
from penstock.resources.endpoint_parts.guard import Guard
from penstock.resources.endpoint_parts.guard_policy import GUARD_TASKS
from penstock.resources.endpoint_parts.pod import Pod
from penstock.resources.endpoint_parts.rollout import Gateway, GatewayMode, Rollout
from penstock.resources.endpoint_parts.scaling import MOST_REPLICAS, Scaling
from penstock.resources.endpoint_parts.secrets import Auth, ModelCredentials, Tls
from penstock.resources.endpoint_parts.serving import PROMPT_TASKS, Caches, Prompts, Serving, ServingLimits
from penstock.resources.endpoint_parts.vector_space import VectorSpaceGate
from penstock.resources.fields.rules import ObjectName, Rule, TextRule
from penstock.resources.fields.text_fields import DataKey, Digest, DnsLabel
from penstock.tasks import TaskName

__all__ = [
    "API_VERSION", "CLUSTER", "LONGEST_BUDGET_SECONDS", "AccuracyBudget", "Auth", "Caches", "ConfigMapKey",
    "Exposure", "Gateway", "GatewayMode", "Latency", "Metadata", "ModelCredentials", "ModelEndpoint",
    "ModelEndpointSpec", "NoCandidate", "Objective", "Optimization", "OptimizationMode", "Pod", "Prompts", "Rollout",
    "Scaling", "Serving", "ServingLimits", "Spec", "Throughput", "Tls", "TokenTime", "Workload",
]  # fmt: skip

SIGNED_SCHEMES = {Scheme.HF, Scheme.S3, Scheme.GS, Scheme.AZ, Scheme.OCI}
"""The sources that take credentials."""
_TOKENS = "[1-9][0-9]{0,5}"
LENGTHS_PATTERN = rf"(prompt,output\n)?{_TOKENS},{_TOKENS}(\n{_TOKENS},{_TOKENS})*\n?"
MOST_CHARACTERS = 32_768
"""Characters of all texts of a workload together: more would not fit into an annotation (256 KiB)."""
LONGEST_BUDGET_SECONDS = 86_400
"""Longest time budget of one optimisation."""
BUDGET_SECONDS = 600.0
"""Time budget of an optimisation for CPUs, where the endpoint has none."""
COMPILE_BUDGET_SECONDS = 7200.0
"""The same for AWS Inferentia. Not measured: ten shapes at up to ten minutes, and the fp32 answers."""


class ConfigMapKey(Spec):
    """A key of a ConfigMap of the same namespace."""

    config_map_name: ObjectName = Field(description="The name of the ConfigMap.")
    key: DataKey = Field(default="texts", description="The key whose value holds one text on each line.")


RequestLengths = Annotated[
    str,
    Field(max_length=8192),
    TextRule(
        LENGTHS_PATTERN,
        "{self} is not a list of request lengths",
        "Write one request on each line: tokens of the prompt, a comma, tokens of the answer, such as 128,64",
    ),
]
"""Lengths of typical requests of text generation, as CSV."""


class Workload(Spec):
    """Typical requests: the search and the capacity curve are measured with them."""

    sequence_lengths: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = Field(
        default=(),
        max_length=64,
        description="Typical lengths in tokens, each as likely as it is listed. Empty: log-normal, median 44, p95 186.",
    )
    lengths: RequestLengths | None = Field(
        default=None,
        description="Text generation: typical requests as CSV, one on each line: tokens of the prompt, tokens of the "
        "answer, each as likely as it is listed. The first line may be `prompt,output`. Default: prompts of 64 to 512 "
        "tokens and answers of 32 to 96.",
    )
    texts: tuple[Annotated[str, Field(min_length=1, max_length=8192)], ...] = Field(
        default=(),
        max_length=512,
        description="Typical inputs: calibration and accuracy checks use them in addition to the built-in texts. "
        f"At most {MOST_CHARACTERS:,} characters in all.",
    )
    texts_from: ConfigMapKey | None = Field(
        default=None,
        description="Typical inputs from a ConfigMap, one on each line, instead of `texts`.",
        json_schema_extra=CLUSTER,
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.texts) || size(self.texts) == 0 || !has(self.textsFrom)",
            lambda it: not it.texts or it.texts_from is None,
            "texts and textsFrom are both given: keep one of them",
        ),
        Rule(
            f"!has(self.texts) || self.texts.map(text, size(text)).sum() <= {MOST_CHARACTERS}",
            lambda it: sum(map(len, it.texts)) <= MOST_CHARACTERS,
            f"texts are over {MOST_CHARACTERS:,} characters in all: give fewer or shorter ones, "
            "or put them into a ConfigMap and write textsFrom",
        ),
        Rule(
            "!has(self.lengths) || !has(self.sequenceLengths) || size(self.sequenceLengths) == 0",
            lambda it: it.lengths is None or not it.sequence_lengths,
            "lengths and sequenceLengths are both given: keep one of them",
        ),
    )

    @property
    def request_lengths(self) -> tuple[tuple[int, int], ...]:
        """`lengths` as pairs: tokens of the prompt and of the answer."""
        lines = (self.lengths or "").removeprefix("prompt,output\n").split()
        return tuple((int(prompt), int(output)) for prompt, output in (line.split(",") for line in lines))


class OptimizationMode(StrEnum):
    """Whether to search for a faster plan."""

    AUTO = "Auto"
    OFF = "Disabled"
    """Not `Off`, which YAML reads as false unless it is quoted."""
    PINNED = "Pinned"


class NoCandidate(StrEnum):
    """What to do when no candidate is within the accuracy budget."""

    SERVE_FP32 = "ServeFP32"
    FAIL = "Fail"


class AccuracyBudget(Spec):
    """How far answers may differ from those of the fp32 model.

    The defaults depend on the task (docs/reference/accuracy-budgets.md).
    """

    min_cosine: float | None = Field(default=None, gt=0, le=1, description="Embeddings: lowest cosine of any text.")
    min_agreement: float | None = Field(
        default=None, gt=0, le=1, description="Other tasks: lowest share of answers that stay the same."
    )


class Optimization(Spec):
    """The search and its limits."""

    mode: OptimizationMode = Field(
        default=OptimizationMode.AUTO,
        description="`Auto` searches; `Disabled` serves the fp32 graph as it is; "
        "`Pinned` serves the artefact in `artefact` without a search (cluster only).",
    )
    artefact: Digest | None = Field(
        default=None,
        description="The digest of the artefact for mode Pinned, as shown in the status of an optimised endpoint of "
        "the same namespace.",
        json_schema_extra=CLUSTER,
    )
    engines: tuple[EngineName, ...] = Field(
        default=tuple(EngineName), min_length=1, max_length=16, description="The engines that candidates may use."
    )
    precisions: tuple[Precision, ...] = Field(
        default=tuple(Precision), min_length=1, max_length=16, description="The precisions that candidates may use."
    )
    accuracy: AccuracyBudget = AccuracyBudget()
    when_no_candidate: NoCandidate = Field(
        default=NoCandidate.SERVE_FP32, description="What to do when no candidate is within the accuracy budget."
    )
    budget_seconds: float | None = Field(
        default=None,
        gt=0,
        le=LONGEST_BUDGET_SECONDS,
        description="Time limit of the whole optimisation. Default: 600, and 7,200 for AWS Inferentia, where the "
        "compiler takes minutes for each shape.",
    )
    serve_while_optimizing: bool = Field(
        default=True,
        description="Serve the fp32 graph until the optimisation has a result. false: no pods before that.",
        json_schema_extra=CLUSTER,
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.mode != 'Pinned' || has(self.artefact)",
            lambda it: it.mode is not OptimizationMode.PINNED or it.artefact is not None,
            "mode Pinned needs artefact: add the digest (sha256:...) that the status of a proven endpoint shows, "
            "or write mode: Auto",
        ),
        Rule(
            "self.mode == 'Pinned' || !has(self.artefact)",
            lambda it: it.mode is OptimizationMode.PINNED or it.artefact is None,
            "artefact is for mode Pinned, and mode is {mode}: write mode: Pinned, or remove artefact",
        ),
    )

    def seconds(self, *, compiles: bool) -> float:
        """The time budget. `compiles`: for AWS Inferentia."""
        return self.budget_seconds or (COMPILE_BUDGET_SECONDS if compiles else BUDGET_SECONDS)


@dataclass(frozen=True)
class SourceRule(TextRule):
    """The forms of a model source, with the messages of `ModelSource.parse`."""

    def check(self, text: str) -> str:
        """The text itself, when it can be parsed."""
        try:
            ModelSource.parse(text)
        except SpecError as error:
            problem = error.message.removeprefix(f"{error.field}: ")
            raise PydanticCustomError("spec", "{problem}", {"problem": problem, "remedy": error.remedy}) from error
        return text


ModelUrl = Annotated[
    str,
    Field(max_length=512),
    SourceRule(
        pattern=SOURCE_PATTERN,
        problem="{self} is not a model source",
        remedy=f"Write one of {SOURCE_FORMS}",
        also=NO_WAY_UP_CEL,
    ),
]
"""URL of a model."""


class EndpointCore(Spec):
    """The fields that a ModelEndpoint and an OptimizedModel share: all that the optimisation depends on."""

    model: ModelUrl = Field(
        description="Where the model comes from: `hf://organisation/name@revision`, `s3://bucket/path`, `gs://`, "
        "`az://`, `oci://registry/repository:tag`, `pvc://claim/path`, `file:///path`, `pkg://import_name/folder` "
        "(docs/reference/models.md)."
    )
    task: TaskName = Field(description="The task, by its Hugging Face name.")
    hardware_class: DnsLabel = Field(
        default="any", description="Name of a HardwareClass. `any`: every node.", json_schema_extra=CLUSTER
    )
    cores: int = Field(
        default=1, ge=1, le=256, description="Physical cores of one replica; NeuronCores on a class that has them."
    )
    objective: Objective = Objective()
    workload: Workload = Workload()
    optimization: Optimization = Optimization()
    serving: ServingLimits = ServingLimits()
    model_credentials: ModelCredentials | None = Field(
        default=None,
        description="Credentials of the download. A local run takes them from its environment variables.",
        json_schema_extra=CLUSTER,
    )

    vector_space: VectorSpaceGate | None = Field(
        default=None,
        description="The index that vectors must fit (docs/how-to/check-an-index.md). None: any vectors are served.",
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.vectorSpace) || self.task == 'feature-extraction'",
            lambda it: it.vector_space is None or it.task is TaskName.FEATURE_EXTRACTION,
            "vectorSpace is for feature-extraction, and task is {task}: remove vectorSpace",
        ),
        Rule(
            "!has(self.modelCredentials) || self.model.matches('^(hf|s3|gs|az|oci)://')",
            lambda it: it.model_credentials is None or it.source.scheme in SIGNED_SCHEMES,
            "modelCredentials are for hf://, s3://, gs://, az:// and oci://, and model is {model}: remove "
            "modelCredentials",
        ),
        Rule(
            "!has(self.objective) || self.task == 'text-generation' || !(has(self.objective.timeToFirstToken) || "
            "has(self.objective.timePerOutputToken) || has(self.objective.tokensPerSecond))",
            lambda it: it.task is TaskName.TEXT_GENERATION or not it.objective.is_for_tokens,
            "objective.timeToFirstToken, timePerOutputToken and tokensPerSecond are for text-generation, and task is "
            "{task}: write objective.latency or objective.throughput",
            field_path=".objective",
        ),
        Rule(
            "!has(self.workload) || self.task == 'text-generation' || !has(self.workload.lengths)",
            lambda it: it.task is TaskName.TEXT_GENERATION or it.workload.lengths is None,
            "workload.lengths are for text-generation, and task is {task}: write workload.sequenceLengths",
            field_path=".workload",
        ),
    )

    @property
    def source(self) -> ModelSource:
        """The model field, parsed."""
        return ModelSource.parse(self.model)

    @property
    def sources(self) -> dict[str, ModelSource]:
        """All that the job reads, by field."""
        index = None if self.vector_space is None else self.vector_space.index
        return {"spec.model": self.source} | ({} if index is None else {"spec.vectorSpace.index.sample": index.source})


class ModelEndpointSpec(EndpointCore):
    """What to serve, on which hardware, and with which objective."""

    serving: Serving = Serving()
    guard: Guard = Field(default=Guard(), json_schema_extra=NO_SCHEMA_DEFAULT)
    auth: Auth | None = Field(
        default=None,
        description="Bearer tokens that requests need. None: the endpoint is open to the cluster.",
        json_schema_extra=CLUSTER,
    )
    exposure: Exposure | None = Field(
        default=None,
        description="Requests from outside the cluster. None: the endpoint is reached inside the cluster only.",
        json_schema_extra=CLUSTER,
    )
    tls: Tls | None = Field(
        default=None,
        description="The pods serve HTTPS. None: plain HTTP inside the cluster.",
        json_schema_extra=CLUSTER,
    )
    scaling: Scaling = Field(default=Scaling(), json_schema_extra=CLUSTER)
    gateway: Gateway = Field(default=Gateway(), json_schema_extra=CLUSTER)
    rollout: Rollout = Field(default=Rollout(), json_schema_extra=CLUSTER)
    pod: Pod = Field(default=Pod(), json_schema_extra=CLUSTER)
    replicas: int = Field(
        default=1,
        ge=0,
        le=MOST_REPLICAS,
        description="The replicas in the scaling modes External and None; what `kubectl scale` writes.",
        json_schema_extra=CLUSTER,
    )
    suspend: bool = Field(
        default=False,
        description="true ends all pods and starts no optimisation; results are kept.",
        json_schema_extra=CLUSTER,
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        *EndpointCore.RULES,
        Rule(
            "!has(self.vectorSpace) || ((!has(self.serving) || !has(self.serving.prompts)) && "
            "(!has(self.optimization) || !has(self.optimization.mode) || self.optimization.mode != 'Pinned'))",
            lambda it: (
                it.vector_space is None
                or (it.serving.prompts is None and it.optimization.mode is not OptimizationMode.PINNED)
            ),
            "vectorSpace is judged by the optimisation, which knows no serving.prompts and makes no pinned artefact: "
            "remove vectorSpace, or serving.prompts and mode: Pinned",
        ),
        Rule(
            f"!has(self.serving) || !has(self.serving.prompts) || self.task in {[task.value for task in PROMPT_TASKS]}",
            lambda it: it.serving.prompts is None or it.task in PROMPT_TASKS,
            f"serving.prompts are for {', '.join(PROMPT_TASKS)}, and task is {{task}}: remove serving.prompts",
            field_path=".serving",
        ),
        Rule(
            "!has(self.serving) || !has(self.serving.guardPolicy) || "
            f"self.task in {[task.value for task in GUARD_TASKS]}",
            lambda it: it.serving.guard_policy is None or it.task in GUARD_TASKS,
            f"serving.guardPolicy is for {', '.join(GUARD_TASKS)}, and task is {{task}}: remove serving.guardPolicy",
            field_path=".serving",
        ),
        Rule(
            f"!has(self.serving) || !has(self.serving.caches) || self.task != '{TaskName.TEXT_GENERATION.value}'",
            lambda it: it.serving.caches is None or it.task is not TaskName.TEXT_GENERATION,
            "serving.caches are not for text-generation, which reuses prompts without them: remove serving.caches",
            field_path=".serving",
        ),
        Rule(
            "!has(self.serving) || !has(self.serving.grpc) || !self.serving.grpc || self.gateway.mode == 'Never' || "
            "(self.gateway.mode == 'Auto' && self.scaling.minReplicas > 0 && "
            "(!has(self.rollout) || !has(self.rollout.canary)))",
            lambda it: (
                not it.serving.grpc
                or it.gateway.mode is GatewayMode.NEVER
                or (it.gateway.mode is GatewayMode.AUTO and it.scaling.min_replicas > 0 and it.rollout.canary is None)
            ),
            "serving.grpc does not go through a gateway: write gateway.mode: Never (or scaling.minReplicas: 1 with "
            "gateway.mode: Auto and without rollout.canary), or remove serving.grpc",
            field_path=".serving",
        ),
        Rule(
            "!has(self.rollout) || !has(self.rollout.canary) || !has(self.gateway) || !has(self.gateway.mode)"
            " || self.gateway.mode != 'Never'",
            lambda it: it.rollout.canary is None or it.gateway.mode is not GatewayMode.NEVER,
            "rollout.canary needs a gateway, which divides the requests, and gateway.mode is Never: write Auto",
        ),
    )


class ModelEndpoint(Resource):
    """One model and one task as one HTTP service: Penstock optimises the model on the hardware that will serve it,
    checks that the answers are still right, and serves it from pods with exclusive cores."""

    KIND: ClassVar[str] = "ModelEndpoint"

    api_version: Literal["penstock.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["ModelEndpoint"]
    metadata: Metadata
    spec: ModelEndpointSpec
    status: dict[str, Any] = Field(default_factory=dict)
