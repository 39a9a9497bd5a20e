"""The manifest of an artefact: its graphs, plans and source model, the machine, and the measurements behind it.

An artefact is a folder:

    manifest.json                this
    report.html                  the evidence for people
    model/<recipe slug>/         model.onnx, or model.xml and model.bin
    tokenizer.json, config.json, modules.json, 1_Pooling/config.json ... as the model brought them
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.capacity import CapacityCurve, TokenCurve
from penstock.errors import ArtefactError
from penstock.hardware import CpuIdentity
from penstock.recipe import EngineName, Plan, Recipe
from penstock.resources.core import Objective
from penstock.resources.endpoint_parts.vector_space import IndexCertificate
from penstock.tasks import Head, TaskName
from penstock.vector_space import VectorSpace

MANIFEST_NAME = "manifest.json"
PROBES_FILE = "probes.npy"
"""float32 [probe texts, width]."""
SCHEMA_VERSION = 1


class Frozen(BaseModel):
    """Base of the values in a manifest: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Axes(StrEnum):
    """How an output of the graph is split into the rows of a batch."""

    ROW = "row"
    """[batch, ...]: one entry a row."""
    TOKENS = "tokens"
    """[batch, tokens, ...]: one entry a token; padding is cut off."""
    MASKS = "masks"
    """[masks, ...]: one entry for every mask token of the batch, row by row in order."""


GRAPH_OUTPUTS: dict[Head, dict[str, Axes]] = {
    Head.ENCODER: {"last_hidden_state": Axes.TOKENS},
    Head.SEQUENCE: {"logits": Axes.ROW},
    Head.TOKEN: {"logits": Axes.TOKENS},
    Head.SPAN: {"start_logits": Axes.TOKENS, "end_logits": Axes.TOKENS},
    Head.MASKED_LM: {"logits": Axes.MASKS},
    Head.CAUSAL_LM: {"logits": Axes.TOKENS},
    Head.SPARSE: {"weights": Axes.ROW},
}
"""Outputs of the graphs that Penstock builds. The ONNX file of a model can differ (masked-lm: TOKENS); see GraphIO."""


class GraphIO(Frozen):
    """Inputs and outputs of the graph. Inputs are int64 [batch, tokens], a subset of
    `input_ids`, `attention_mask` (1 real, 0 padding), `token_type_ids`. Outputs are float32."""

    inputs: tuple[str, ...]
    outputs: dict[str, Axes]


class ModelFacts(Frozen):
    """The model that was optimised."""

    source: str
    """As the endpoint states it, such as `hf://org/name@revision`."""
    resolved: str = ""
    """The source with what its tag or branch was at the download, such as `oci://registry/repository:tag@sha256:...`;
    empty for sources without versions."""
    digest: str
    """sha256 over names and contents of the files that matter: weights, configuration, tokenizer."""
    architecture: str
    """Such as `BertModel`."""
    head: Head
    parameters: int = Field(ge=0)
    max_tokens: int = Field(ge=1)


class DecoderFacts(Frozen):
    """Facts of the model for an engine of text generation besides the graph, which has no attention in it."""

    vocabulary: int = Field(ge=1)
    """Logits of a token."""
    context: int = Field(ge=1)
    """The largest number of tokens of a sequence."""
    heads: int = Field(ge=1)
    key_heads: int = Field(ge=1)
    """Heads of keys and values."""
    head_size: int = Field(ge=1)
    scales: tuple[float, ...]
    """Factor of the products of queries and keys, for each layer."""
    windows: tuple[int, ...]
    """Tokens that a token attends to at most, for each layer; 0: all before it."""


class ServedGraph(Frozen):
    """A graph file in the artefact."""

    path: str
    """Relative to the artefact: `model/<slug>/model.onnx` or `.xml`."""
    io: GraphIO


class ServedModel(ServedGraph):
    """A graph in the artefact that can be served, with the plan that fits it."""

    plan: Plan
    short: ServedGraph | None = None
    """The graph of `plan.short`, where the plan has that."""

    @model_validator(mode="after")
    def _has_the_graphs_of_its_plan(self) -> Self:
        if (self.short is None) != (self.plan.short is None):
            missing = "graph" if self.short is None else "plan"
            raise ValueError(f"short rows have no {missing} of their own")
        return self

    @property
    def graphs(self) -> tuple[ServedGraph, ...]:
        """Its graph, and the graph of its short rows, if any."""
        return (self,) if self.short is None else (self, self.short)


class LatencyPoint(Frozen):
    """In-process time of one forward pass at batch 1 with the plan's widest threads."""

    tokens: int = Field(ge=1)
    p50_milliseconds: float = Field(ge=0)
    minimum_milliseconds: float = Field(ge=0)
    spread: float = Field(default=0.0, ge=0)
    """Interquartile range over median: the noise of the measurement."""


_REFERENCE_IN_0_1 = "teacher"


class Outcome(StrEnum):
    """The result of trying a candidate."""

    CHOSEN = "chosen"
    SLOWER = "slower"
    """Within the accuracy budget, but not the best for the objective."""
    REJECTED = "rejected"
    """Outside the accuracy budget."""
    FAILED = "failed"
    """Could not be built or run: crashed, refused, or ran out of time."""
    SKIPPED = "skipped"
    """Not tried, for the reason given."""
    REFERENCE = "reference"
    """The fp32 graph that all candidates are compared with. Version 0.1 wrote it as `teacher`."""

    @classmethod
    def _missing_(cls, value: object) -> Outcome | None:
        return cls.REFERENCE if value == _REFERENCE_IN_0_1 else None


class ReasonCode(StrEnum):
    """Why a candidate has its outcome, for code to compare. `CandidateFacts.reason` has the words."""

    OTHER = "other"
    """Only the words tell."""
    WITHIN_BUDGET = "within-budget"
    """It goes on to the next stage."""
    NO_TURN = "no-turn"
    NOT_MEASURED = "not-measured"
    CUT_OFF = "cut-off"
    NO_PLAN_TRIED = "no-plan-tried"
    TIMED_OUT = "timed-out"
    """A call did not end; the words have which one."""

    @property
    def words(self) -> str:
        """The reason in manifest and report; empty where it has details that the code does not."""
        return _REASONS.get(self, "")

    @property
    def is_out_of_time(self) -> bool:
        """A larger time budget would try the candidate."""
        return self in {self.NO_TURN, self.NOT_MEASURED, self.CUT_OFF, self.NO_PLAN_TRIED}


_REASONS = {
    ReasonCode.WITHIN_BUDGET: "within the accuracy budget",
    ReasonCode.NO_TURN: "the time budget was spent before its turn",
    ReasonCode.NOT_MEASURED: (
        "the answers are right; the time budget was spent before it was compared with the others"
    ),
    ReasonCode.CUT_OFF: "the time budget was spent while it was tried",
    ReasonCode.NO_PLAN_TRIED: "faster at first measurement; the plan search ended before its turn",
}


class Metric(Frozen):
    """One measured agreement with the fp32 reference, and its budget."""

    name: str
    """Such as `min_cosine`, `argmax_agreement`, `batch_invariance`."""
    value: float
    lower: float | None = None
    """Lower end of the 95 % confidence interval, where the metric is a mean or a share."""
    budget: float
    higher_is_better: bool = True
    passed: bool


class Verdict(Frozen):
    """The verdict of the accuracy guard."""

    passed: bool
    reason: str
    """One sentence, such as `min_cosine 0.944 is under the budget of 0.985`."""
    metrics: tuple[Metric, ...] = ()
    texts: int = Field(default=0, ge=0)
    batching: str = ""
    """The widest `penstock.recipe.Batching` in which answers stay the same."""


class GenerationSpeed(Frozen):
    """Speed of text generation, in process."""

    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    first_token_milliseconds: float = Field(ge=0)
    """Median time of a prompt alone."""
    next_token_p50_milliseconds: float = Field(ge=0)
    """Time of each further token of one client."""
    next_token_p95_milliseconds: float = Field(ge=0)
    tokens_per_second: float = Field(ge=0)
    """Of `clients` at a time, prompts included."""
    clients: int = Field(ge=1)

    @property
    def answer_milliseconds(self) -> float:
        """Time of a whole answer of one client, its prompt included."""
        return self.first_token_milliseconds + (self.output_tokens - 1) * self.next_token_p50_milliseconds


class BatchInvariance(Frozen):
    """Whether answers of text generation depend on the requests that run at the same time: the same requests, half of
    them greedy and half with a seed, alone and with other requests."""

    requests: int = Field(ge=0)
    differing: int = Field(ge=0)
    """Requests with another token than alone."""
    at_once: int = Field(ge=1)
    same_tokens: float = Field(ge=0, le=1)
    """Share of the tokens before the first other one."""


class CandidateFacts(Frozen):
    """One candidate: its recipe, the verdict on its accuracy, and its speed."""

    recipe: Recipe
    outcome: Outcome
    reason: str
    reason_code: ReasonCode = Field(default=ReasonCode.OTHER, exclude=True)
    """Not in the file, which has the words alone."""
    verdict: Verdict | None = None
    latency: tuple[LatencyPoint, ...] = ()
    """Of text generation: the time of a prompt of this length alone."""
    generation: GenerationSpeed | None = None
    """Only of text generation."""
    batch_invariance: BatchInvariance | None = None
    """Only of text generation."""
    fused_nodes: dict[str, int] = Field(default_factory=dict)
    build_seconds: float = 0.0
    size_bytes: int = 0

    @model_validator(mode="before")
    @classmethod
    def _read_reason_code(cls, data: Any) -> Any:
        if isinstance(data, dict) and "reason_code" not in data:
            code = next((code for code, words in _REASONS.items() if words == data.get("reason")), ReasonCode.OTHER)
            return {**data, "reason_code": code}
        return data

    @property
    def milliseconds(self) -> dict[int, float]:
        """Median latency by tokens."""
        return {point.tokens: point.p50_milliseconds for point in self.latency}

    def settled(self, outcome: Outcome, reason: str | ReasonCode, code: ReasonCode = ReasonCode.OTHER) -> Self:
        """A copy with this outcome. `reason`: the words, or a code that has words."""
        if isinstance(reason, ReasonCode):
            return self.settled(outcome, reason.words, reason)
        return self.model_copy(update={"outcome": outcome, "reason": reason, "reason_code": code})


def served_latency(plan: Plan, candidates: Iterable[CandidateFacts]) -> tuple[LatencyPoint, ...]:
    """The measured latency of a plan by length: of its recipe, and of the recipe for short rows at their lengths."""
    measured = {one.recipe: one.latency for one in candidates}
    own = [point for point in measured.get(plan.recipe, ()) if plan.serves(point.tokens)]
    short = measured.get(plan.short.recipe, ()) if plan.short is not None else ()
    points = (*own, *(point for point in short if not plan.serves(point.tokens)))
    return tuple(sorted(points, key=lambda point: point.tokens))


class GemmShare(Frozen):
    """The share of the machine's measured matrix-product throughput that the chosen plan reaches at one length."""

    tokens: int
    ceiling_gops: float
    """Measured on this machine at these threads and the chosen precision, 10^9 operations per second."""
    reached_gops: float
    share: float


class PlanTrial(Frozen):
    """One comparison of the plan search."""

    plan: Plan
    against: Plan
    promoted: bool
    reason: str
    """One clause, such as `12 % better by rows/s (noise 3 %)`."""


class ProbeFacts(Frozen):
    """The recorded vectors of probe texts (`probes.npy`), which each replica computes again before it answers."""

    texts: str
    """sha256 of the texts."""
    largest_difference: float = Field(ge=0)
    """Of 1 - cosine, between the vectors of a replica and the recorded ones."""


class LiveLimits(Frozen):
    """What answers of the chosen plan differ from fp32's at most, on average: the guard of live traffic tests for more.
    From texts that the plan was not calibrated with; upper ends of the intervals."""

    texts: int = Field(ge=1)
    divergence: float = Field(gt=0, lt=1)
    """Of the mean divergence, on a scale where 1 is a ruined answer."""
    severe: float = Field(gt=0, lt=1)
    """Of the share of answers outside the budget of one answer."""


class Manifest(Frozen):
    """The whole of `manifest.json`."""

    schema_version: int = SCHEMA_VERSION
    key: str
    """The optimisation key, hexadecimal sha256."""
    created: str
    """ISO 8601, UTC."""
    toolchain: dict[str, str]
    """Versions of the libraries that made or will run the model."""
    model: ModelFacts
    task: TaskName
    decoder: DecoderFacts | None = None
    """Only of text generation."""
    vector_space: VectorSpace | None = None
    """Only of tasks with embeddings, without the endpoint's prompts; None: made by a version that did not record it."""
    index: IndexCertificate | None = None
    """How the vectors fit the index of the endpoint; None: it names none."""
    probes: ProbeFacts | None = None
    """Only of tasks with one dense vector for each text; None: not recorded."""
    live: LiveLimits | None = None
    """None: not measured, fp32 was chosen, or the task is text generation."""
    cpu: CpuIdentity
    cores: int = Field(ge=1)
    pinned: bool | None = None
    """Whether the measuring process had these cores for itself. None: made by a version that did not record it."""
    objective: str
    chosen: ServedModel
    baseline: ServedModel
    """The fp32 plan: served while the search runs, and the fall-back. Compiled for Inferentia: the chosen one again."""
    candidates: tuple[CandidateFacts, ...]
    capacity: CapacityCurve = CapacityCurve()
    provisional_capacity: CapacityCurve = CapacityCurve()
    """Only of models compiled for Inferentia: of published figures for models of this size. A pod measures the capacity
    before it is ready, and the autoscaler uses this one until then."""
    token_capacity: TokenCurve = TokenCurve()
    """Only of text generation, which has it instead of `capacity`."""
    gemm: tuple[GemmShare, ...] = ()
    speed_up: dict[int, float] = Field(default_factory=dict)
    """Time of the fp32 reference divided by the time of the chosen plan, by tokens."""
    noise: float = 0.0
    """Relative spread of repeated measurements: gains below it promote nothing."""
    contention: float | None = None
    """Share of the measured time in which the measuring threads waited for a CPU: other programs ran on it, or the
    hypervisor other machines. None: made by a version that did not record it."""
    workload: str = ""
    """The lengths that plans and capacity were measured with, such as `median 44 tokens, p95 187, longest 512`."""
    trials: tuple[PlanTrial, ...] = ()
    """The plan search, in order."""
    findings: tuple[str, ...] = ()
    """What limits the figures: shared cores, noise, no fused nodes, a time budget that ran out."""
    serving_rss_bytes: int | None = None
    """Resident memory of the serving process under the load of the capacity curve."""
    seconds: float = 0.0
    """Duration of the optimisation."""
    budget_seconds: float = 0.0
    cut_short: bool = False
    """True when the time budget ended before everything was tried: a larger budget continues from here."""
    files: dict[str, str]
    """sha256 of every file of the artefact but the manifest and the report, by relative path."""

    @property
    def typical_speed_up(self) -> float | None:
        """How many times as fast as fp32 the chosen plan is at what the endpoint is for: answers of one client in text
        generation, otherwise the geometric mean over the lengths. None: it was not measured."""
        speeds = [speed for speed in self.speed_up.values() if speed > 0]
        reference = next((one for one in self.candidates if one.recipe == self.baseline.plan.recipe), None)
        chosen = next((one for one in self.candidates if one.recipe == self.chosen.plan.recipe), None)
        if reference is not None and reference.generation and chosen is not None and chosen.generation:
            fast = chosen.generation.answer_milliseconds
            return reference.generation.answer_milliseconds / fast if fast > 0 else None
        return math.exp(sum(map(math.log, speeds)) / len(speeds)) if speeds else None

    @property
    def serves_fp32(self) -> bool:
        """True when the fp32 fall-back itself was chosen. A model compiled for Inferentia has no other fall-back."""
        recipe = self.chosen.plan.recipe
        return recipe == self.baseline.plan.recipe and recipe.engine is not EngineName.NEURON

    @classmethod
    def load(cls, artefact: Path) -> Manifest:
        """Read the manifest of an artefact folder; ArtefactError when it is missing, unreadable or not valid."""
        path = artefact / MANIFEST_NAME
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise ArtefactError(f"{artefact} has no {MANIFEST_NAME}", remedy="Run penstock optimize again") from None
        except OSError as error:
            raise ArtefactError(
                f"{path} cannot be read ({error.strerror})",
                remedy="Let this process read it, or run penstock optimize again",
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            raise ArtefactError(
                f"{path} is not a manifest that this version reads ({where}: {first['msg']})",
                remedy="Run penstock optimize again with this version",
            ) from error
        for name in manifest.files:
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts:
                raise ArtefactError(f"{path} names {name}, which is outside the artefact", remedy="Make it again")
        return manifest


def objective_text(objective: Objective) -> str:
    """An objective in one line, for `Manifest.objective`."""
    parts = []
    if objective.latency is not None:
        parts.append(f"p95 within {objective.latency.p95_milliseconds:g} ms")
    if objective.first_token_milliseconds is not None:
        parts.append(f"first token within {objective.first_token_milliseconds:g} ms")
    if objective.next_token_milliseconds is not None:
        parts.append(f"{objective.next_token_milliseconds:g} ms per token")
    if objective.throughput is not None:
        parts.append(f"{objective.throughput.requests_per_second:g} requests/s")
    if objective.tokens_per_second is not None:
        parts.append(f"{objective.tokens_per_second:g} tokens/s")
    return " and ".join(parts) or "best of latency and throughput"
