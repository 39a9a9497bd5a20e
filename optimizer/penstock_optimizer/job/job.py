"""Resolves what to optimise (model on disk, cores, key of the result, folders), and writes the artefact.

The same key means the same result, so that a result is looked up rather than made again. An artefact's folder is
written as a whole or not at all. A lookup is on the path of each start of `penstock serve`: the exporter and the report
are imported on use.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.errors import ArtefactError, SpecError
from penstock.hardware import Isa, NeuronGeneration
from penstock.logs import log_event
from penstock.manifest import MANIFEST_NAME, CandidateFacts, Manifest, ModelFacts, ServedModel, objective_text
from penstock.recipe import GENERATION_PRECISIONS, EngineName, Recipe
from penstock.resources.core import Scheme
from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec, OptimizationMode
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock.tasks import TaskName
from penstock.vector_space import VectorSpace
from penstock_optimizer.candidate.runner import CandidateContext
from penstock_optimizer.candidate.work_folder import REPORT_NAME, WorkFolder, digests, result_key
from penstock_optimizer.guard.judge import unused_budgets
from penstock_optimizer.load.workload import LengthMix, mix_of_texts, sends_texts
from penstock_optimizer.neuron.choice import longest_row, neuron_key
from penstock_runtime.engines.native.library import ABI, library_path
from penstock_runtime.host import CoreGrant, Host, read_host
from penstock_runtime.host.disk import lock_file
from penstock_runtime.models.files import copy_within
from penstock_runtime.models.folder import TOKENIZER, ModelFolder
from penstock_runtime.models.sources.fetch import fetch_model, resolved_source
from penstock_runtime.models.sources.transfer import OnConfig, ignore_config, ignore_progress
from penstock_runtime.models.sources.transfer import OnProgress as OnTransfer
from penstock_runtime.store.verification import verify_files
from penstock_runtime.tasks.embeddings.space import VECTOR_TASKS, read_space
from penstock_runtime.tasks.factory import head_of, make_task
from penstock_runtime.tasks.texts import PromptTexts
from penstock_runtime.tokens import Tokenizer
from penstock_runtime.tokens.convert import convert

if TYPE_CHECKING:
    from penstock_optimizer.neuron.session import NeuronToolchain

SHORT = 16
"""Hexadecimal digits of the key in folder names."""
TOOLS = ("onnxruntime", "openvino", "onnx", "tokenizers", "numpy")
"""Libraries of which the version may change the graph, its speed or its answers."""


def toolchain() -> dict[str, str]:
    """Versions of Penstock and of the installed libraries, without importing them; and whether the native engine was
    compiled, since that can be done later."""
    versions = {"penstock": __version__}
    if library_path().is_file():
        versions["native"] = str(ABI)
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def optimization_key(spec: ModelEndpointSpec, *, model_digest: str, isa: Isa, cores: int, tools: dict[str, str]) -> str:
    """sha256, hexadecimal, over all that decides the result.

    The time budget is not part of it: more time refines the same result. Nor are scaling and the class's name: pods of
    two classes with one instruction set share results.
    """
    optimization = spec.optimization
    is_generation = spec.task is TaskName.TEXT_GENERATION
    precisions = [one for one in optimization.precisions if is_generation or one not in GENERATION_PRECISIONS]
    parts = {
        "isa": isa.value,
        "cores": cores,
        "engines": sorted(engine.value for engine in optimization.engines if engine is not EngineName.NEURON),
        "precisions": sorted(precision.value for precision in precisions),
        "toolchain": tools,
    }
    return result_key(spec, model_digest, parts)


logger = logging.getLogger("penstock.optimize")

REMOTE = {Scheme.HF, Scheme.S3, Scheme.GS, Scheme.AZ}
"""Sources of which only the needed files are downloaded."""


@dataclass(frozen=True)
class Job:
    """One endpoint on this machine."""

    spec: ModelEndpointSpec
    folder: ModelFolder
    digest: str
    host: Host
    grant: CoreGrant
    tools: dict[str, str]
    key: str
    store: Path
    neuron: NeuronToolchain | None = None
    """What compiles for AWS Inferentia; None: the endpoint is for CPUs."""
    resolved: str = ""
    """The model's source with its commit or digest."""

    @classmethod
    def of(
        cls,
        endpoint: ModelEndpoint,
        *,
        store: Path,
        models: Path,
        cores: int | None = None,
        token: str | None = None,
        host: Host | None = None,
        neuron: NeuronToolchain | None = None,
        on_transfer: OnTransfer = ignore_progress,
    ) -> Job:
        """Fetch the model and read the machine. Errors as for `fetch_model` and `Host.usable_cores`; SpecError for a
        longer input than the model takes, and for an endpoint that pins an artefact of the cluster's store.

        With `neuron`, `cores` are NeuronCores, and the job uses all CPU cores of this process; SpecError when they are
        not whole devices, and for text generation."""
        spec = endpoint.spec if cores is None else endpoint.spec.model_copy(update={"cores": cores})
        if spec.optimization.mode is OptimizationMode.PINNED:
            raise SpecError(
                "optimization.mode is Pinned: the operator serves that artefact from its store, and there is nothing "
                "to make here",
                field="spec.optimization.mode",
                remedy="Set mode: Auto, or serve an artefact's folder: penstock serve FOLDER",
            )
        if neuron is not None:
            _require_neuron(spec, neuron.target)
        host = host or read_host()
        grant = host.usable_cores(spec.cores if neuron is None else None)
        check = config_check(spec)
        folder = fetch_model(spec.source, cache=models, token=token, on_progress=on_transfer, check=check)
        if spec.source.scheme in REMOTE and folder.onnx is None and not _is_built(folder):
            # Weights alone would need torch: the model's own graph, if it has one, is faster to export.
            folder = fetch_model(spec.source, cache=models, token=token, on_progress=on_transfer, graph=True)
        asked = spec.serving.max_input_tokens
        if asked is not None and asked > folder.max_tokens:
            raise SpecError(
                f"serving.maxInputTokens is {asked}; this model takes up to {folder.max_tokens} tokens",
                field="spec.serving.maxInputTokens",
                remedy=f"Set it to {folder.max_tokens} or less, or leave it out",
            )
        digest, tools = folder.digest(), toolchain()
        if neuron is None:
            key = optimization_key(spec, model_digest=digest, isa=host.cpu.isa, cores=grant.cores, tools=tools)
        else:
            tools = {"penstock": tools["penstock"], **neuron.packages}
            key = neuron_key(spec, target=neuron.target, packages=neuron.packages, digest=digest, cores=spec.cores)
        resolved = resolved_source(spec.source, models)
        return cls(spec, folder, digest, host, grant, tools, key, store, neuron, resolved)

    @property
    def max_tokens(self) -> int:
        """The longest row that is served."""
        stated, most = self.spec.serving.max_input_tokens, self.folder.max_tokens
        if self.neuron is not None:
            return longest_row(most, stated, self.spec.workload.sequence_lengths)
        return stated or most

    @property
    def cores(self) -> int:
        """The cores that the plan is for: physical ones of this process, or NeuronCores of a pod."""
        return self.grant.cores if self.neuron is None else self.spec.cores

    @cached_property
    def mix(self) -> LengthMix:
        """The lengths of the requests that plans and capacity are measured with."""
        spec = self.spec
        if not sends_texts(spec.task, spec.workload):
            # Without the tokenizer, which takes a second to load for the largest vocabularies.
            return LengthMix.of(spec.workload, maximum=self.max_tokens)
        tokenizer, most = self.tokenizer, self.max_tokens
        return mix_of_texts(
            spec.task,
            tokenizer.backend,
            spec.workload,
            maximum=most,
            mask_token=tokenizer.mask_token,
            side=tokenizer.side,
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, for making and counting texts."""
        return Tokenizer.load(self.folder)

    def vector_space(self, weights: str) -> VectorSpace | None:
        """The space of the model's vectors, without the endpoint's prompts, which do not change the artefact; None for
        tasks without vectors. `weights`: as `Exported.weights`."""
        if self.spec.task not in VECTOR_TASKS:
            return None
        prompts = PromptTexts.of(self.folder, None)
        return read_space(self.folder, self.tokenizer, weights=weights, max_tokens=self.max_tokens, prompts=prompts)

    @property
    def artefact(self) -> Path:
        """Folder of the finished artefact."""
        return self.store / self.key[:SHORT]

    @property
    def baseline(self) -> Path:
        """Folder of the fp32 artefact, which is served in the meantime."""
        return self.store / f"{self.key[:SHORT]}.baseline"

    @property
    def work(self) -> WorkFolder:
        """Folder of the optimisation in progress."""
        return WorkFolder(self.store / f"{self.key[:SHORT]}.work")

    def lock(self, what: str) -> Path:
        """A lock file of this key."""
        return self.store / f"{self.key[:SHORT]}.{what}lock"

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs to pin processes to; empty: not pinned (under a quota)."""
        return self.grant.cpus if self.grant.keep else ()

    @property
    def load_cpus(self) -> tuple[int, ...]:
        """The CPUs for the load generator: those that the server does not use, if there are any."""
        taken = {*self.grant.cpus, *self.grant.siblings}
        return tuple(cpu for cpu in self.host.allowed if cpu not in taken)

    @property
    def context(self) -> CandidateContext:
        """The settings for the processes of candidates."""
        spec = self.spec
        latency, throughput = spec.objective.latency, spec.objective.throughput
        return CandidateContext(
            model=str(self.folder.path),
            task=spec.task,
            max_tokens=self.max_tokens,
            workload=spec.workload,
            accuracy=spec.optimization.accuracy,
            cores=self.grant.cores,
            requests_per_second=throughput.requests_per_second if latency and throughput else None,
        )

    def manifest(
        self,
        parameters: int,
        *,
        chosen: ServedModel,
        baseline: ServedModel,
        candidates: Sequence[CandidateFacts],
        findings: Sequence[str],
        **measured: Any,
    ) -> Manifest:
        """A manifest of this job, without its files. `measured`: further fields of Manifest, by name."""
        return Manifest(
            key=self.key,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            toolchain=self.tools,
            model=ModelFacts(
                source=self.spec.model,
                resolved=self.resolved,
                digest=self.digest,
                architecture=self.folder.architecture or self.folder.model_type,
                head=head_of(self.spec.task, self.folder),
                parameters=parameters,
                max_tokens=self.max_tokens,
            ),
            task=self.spec.task,
            cpu=self.host.cpu,
            cores=self.cores,
            pinned=self.grant.pinned,
            objective=objective_text(self.spec.objective),
            chosen=chosen,
            baseline=baseline,
            candidates=tuple(candidates),
            workload=measured.pop("workload", None) or self.mix.summary,
            findings=tuple(findings),
            files={},
            **measured,
        )

    def finished(self, *, more_than_seconds: float | None = None, whole: bool = True) -> Manifest | None:
        """The manifest of the finished artefact; None when there is none, or when it was cut short and
        `more_than_seconds` exceeds its budget. `whole` False skips the files that only the fp32 fall-back reads: they
        are the largest, and a second start should be fast."""
        manifest = _read(self.artefact, self.key, whole=whole)
        if manifest is None:
            return None
        worth_more = manifest.cut_short and (more_than_seconds or 0.0) > manifest.budget_seconds
        return None if worth_more else manifest

    def prepared(self) -> Manifest | None:
        """The manifest of the fp32 artefact, if there is one."""
        return _read(self.baseline, self.key)

    def remove_baseline(self) -> None:
        """Delete the fp32 artefact, once the finished one exists: its servers have loaded it long before."""
        shutil.rmtree(self.baseline, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Delete the leftovers of a killed run once the finished artefact was there: the work folder, and the artefact
        that was replaced. For callers that add nothing to that artefact. Nothing is deleted while another process works
        on this key."""
        # A missing folder needs no lock, and a store that cannot be written can still be served from.
        with contextlib.suppress(OSError):
            if not self.work.path.exists() and not has_drafts(self.artefact):
                return
            with lock_file(self.lock(""), blocking=False), lock_file(self.lock("baseline."), blocking=False):
                remove_drafts(self.artefact)
                self.work.remove()

    def check(self) -> None:
        """Check that the model can do the task with this tokenizer and these limits, before anything is written. Errors
        as for `make_task` and `read_decoder`."""
        if self.spec.task is TaskName.TEXT_GENERATION:
            from penstock_optimizer.export import read_decoder

            read_decoder(self.folder)
            Tokenizer.load(self.folder)
            return
        make_task(self.spec.task, self.folder, max_tokens=self.max_tokens)

    def findings(self) -> Sequence[str]:
        """Findings about the endpoint, and about the machine where the result is for this one."""
        about_host = self.grant.findings if self.neuron is None else ()
        return (*unused_budgets(self.spec.task, self.spec.optimization.accuracy), *about_host)


def _read(artefact: Path, key: str, *, whole: bool = True) -> Manifest | None:
    """The manifest of a complete artefact of this key. A damaged one counts as missing: it is made again."""
    if not artefact.exists():
        return None
    try:
        manifest = Manifest.load(artefact)
        if manifest.key != key:
            return None
        models = (manifest.chosen, manifest.baseline) if whole else (manifest.chosen,)
        verify_files(artefact, manifest, *models)
    except ArtefactError as error:
        _warn(str(artefact), error.message)
        return None
    return manifest


@cache
def _warn(artefact: str, damage: str) -> None:
    """Log a damaged artefact once: it is read before its lock is taken and after."""
    logger.warning("%s: it is made again", damage, extra=log_event("ArtefactDamaged", object=artefact))


def _require_neuron(spec: ModelEndpointSpec, target: NeuronGeneration) -> None:
    if spec.task is TaskName.TEXT_GENERATION:
        raise SpecError(
            f"text-generation is not compiled for {target.value}",
            field="spec.task",
            remedy="Take a class of CPUs for it",
        )
    HARDWARE_CLASSES[target.value].devices(spec.cores)


def config_check(spec: ModelEndpointSpec) -> OnConfig:
    """The check of config.json that needs no weights, for `fetch_model`: these may have gigabytes."""
    if spec.task is not TaskName.TEXT_GENERATION:
        return ignore_config
    from penstock_optimizer.export import check_decoder

    return partial(check_decoder, str(spec.source))


def _is_built(folder: ModelFolder) -> bool:
    """True when the graph is built from the weights. Imports the exporter on use: that takes a second."""
    from penstock_optimizer.export import FAMILIES

    return folder.model_type in FAMILIES


MODEL_FOLDER = "model"


def graph_path(recipe: Recipe, graph: Path) -> str:
    """Path of a recipe's graph in the artefact, such as `model/onnxruntime-fp32/model.onnx`."""
    return f"{MODEL_FOLDER}/{recipe.slug}/{graph.name}"


def write_artefact(
    target: Path,
    manifest: Manifest,
    *,
    folder: ModelFolder,
    graphs: Mapping[Recipe, Path],
    more: Mapping[str, Path] = MappingProxyType({}),
) -> Manifest:
    """Write the artefact folder `target` atomically: an older one is replaced only by a complete one.

    The caller holds a lock, so that one process writes at a time; drafts of killed writers are deleted. `manifest`:
    without its files; their digests are added. `graphs`: the graphs to serve; other files in a graph's folder (external
    weights) are copied too. `more`: further files by name.
    """
    from penstock_optimizer.report.view import render_report

    target.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(target)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        # mkdtemp makes a folder for its owner only; the server may run as another user.
        draft.chmod(0o755)
        for path in folder.settings:
            copy_within(folder.path, path, draft / path.relative_to(folder.path))
        if folder.tokenizer.name != TOKENIZER:
            (draft / TOKENIZER).write_bytes(convert(folder.path, folder.config))
        for name, path in more.items():
            _copy(path, draft / name)
        for name, contents in folder.artefact_files.items():
            (draft / name).write_bytes(contents)
        for recipe, graph in graphs.items():
            for path in sorted(graph.parent.iterdir()):
                if path.is_file():
                    _copy(path, draft / MODEL_FOLDER / recipe.slug / path.name)
        manifest = manifest.model_copy(update={"files": digests(draft)})
        (draft / REPORT_NAME).write_text(render_report(manifest), encoding="utf-8")
        (draft / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        _replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return manifest


def remove_drafts(target: Path) -> None:
    """Delete the drafts of killed writers of `target`; each is as large as the artefact. The caller holds the lock."""
    for path in _drafts(target):
        shutil.rmtree(path, ignore_errors=True)


def has_drafts(target: Path) -> bool:
    """True while a process writes `target`, and after a writer was killed."""
    return bool(_drafts(target))


def _drafts(target: Path) -> list[Path]:
    """Drafts of `target`, and the artefact that one replaced."""
    return [path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}-")]


def _copy(source: Path, target: Path) -> None:
    """Copy contents, not links or modes: an artefact must not depend on its sources. No hard link either: a source
    overwritten later would change the artefact."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _replace(draft: Path, target: Path) -> None:
    """Rename the draft to the target. A server with open files of the old one keeps them until it closes them."""
    if not target.exists():
        draft.replace(target)
        return
    old = draft.with_name(f"{draft.name}-old")
    target.replace(old)
    draft.replace(target)
    shutil.rmtree(old, ignore_errors=True)
