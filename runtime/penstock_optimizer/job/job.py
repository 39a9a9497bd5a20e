"""What an optimisation is about, resolved: the model on disk, the cores, the key, the folders."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from penstock.errors import ArtefactError, SpecError
from penstock.manifest import Manifest, ModelFacts
from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec, OptimizationMode
from penstock.resources.source import Scheme
from penstock.tasks import HEAD_OF_TASK
from penstock_optimizer.candidate.candidate import Subject
from penstock_optimizer.guard import unread
from penstock_optimizer.job.artefact import has_drafts, remove_drafts
from penstock_optimizer.job.key import SHORT, optimization_key, toolchain
from penstock_optimizer.job.work_folder import WorkFolder, locked_at_once
from penstock_optimizer.load.bodies import mix_of_texts, sends_texts
from penstock_optimizer.load.lengths import LengthMix
from penstock_runtime.host import CoreGrant, Host, read_host
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.progress import OnProgress as OnTransfer
from penstock_runtime.models.progress import ignore
from penstock_runtime.models.sources import fetch_model
from penstock_runtime.serving.verification import verify_files
from penstock_runtime.tasks.factory import make_task
from penstock_runtime.tokens import Tokenizer

logger = logging.getLogger("penstock.optimize")

REMOTE = {Scheme.HF, Scheme.S3, Scheme.GS, Scheme.AZ}
"""Sources of which only what is needed is fetched."""


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
        on_transfer: OnTransfer = ignore,
    ) -> Job:
        """Fetch the model and look at the machine. Errors as `fetch_model` and `Host.usable_cores`; SpecError for a
        longer input than the model takes, and for an endpoint that pins an artefact of the cluster's store."""
        spec = endpoint.spec
        if spec.optimization.mode is OptimizationMode.PINNED:
            raise SpecError(
                "optimization.mode is Pinned: the operator serves that artefact from its store, and there is nothing "
                "to make here",
                field="spec.optimization.mode",
                remedy="Set mode: Auto, or serve an artefact's folder: penstock serve FOLDER",
            )
        host = host or read_host()
        grant = host.usable_cores(cores or spec.cores)
        folder = fetch_model(spec.source, cache=models, token=token, on_progress=on_transfer)
        if spec.source.scheme in REMOTE and folder.onnx is None and not _is_built(folder):
            # Weights alone would need torch: the model's own graph, if it has one, is the shorter way.
            folder = fetch_model(spec.source, cache=models, token=token, on_progress=on_transfer, graph=True)
        asked = spec.serving.max_input_tokens
        if asked is not None and asked > folder.max_tokens:
            raise SpecError(
                f"serving.maxInputTokens is {asked}; the model's own files allow {folder.max_tokens} tokens",
                field="spec.serving.maxInputTokens",
                remedy=f"Set it to {folder.max_tokens} or less, or leave it out",
            )
        digest, tools = folder.digest(), toolchain()
        key = optimization_key(spec, model_digest=digest, isa=host.cpu.isa, cores=grant.cores, tools=tools)
        return cls(spec, folder, digest, host, grant, tools, key, store)

    @property
    def max_tokens(self) -> int:
        """The longest row that is served."""
        return self.spec.serving.max_input_tokens or self.folder.max_tokens

    @cached_property
    def mix(self) -> LengthMix:
        """The lengths of the requests that plans and capacity are measured with."""
        spec = self.spec
        if not sends_texts(spec.task, spec.workload):
            # Without the tokenizer, which takes a second for the largest vocabularies.
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
        """The model's, for making and counting texts."""
        return Tokenizer.load(self.folder)

    @property
    def artefact(self) -> Path:
        """Where the finished artefact lies."""
        return self.store / self.key[:SHORT]

    @property
    def baseline(self) -> Path:
        """Where the fp32 artefact lies that is served meanwhile."""
        return self.store / f"{self.key[:SHORT]}.baseline"

    @property
    def work(self) -> WorkFolder:
        """The folder of the optimisation under way."""
        return WorkFolder(self.store / f"{self.key[:SHORT]}.work")

    def lock(self, what: str) -> Path:
        """A lock file of this key."""
        return self.store / f"{self.key[:SHORT]}.{what}lock"

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs to be kept on; empty: wherever the scheduler finds room (under a quota)."""
        return self.grant.cpus if self.grant.keep else ()

    @property
    def load_cpus(self) -> tuple[int, ...]:
        """The CPUs for the load generator: those that the server does not use, if there are any."""
        taken = {*self.grant.cpus, *self.grant.siblings}
        return tuple(cpu for cpu in self.host.allowed if cpu not in taken)

    @property
    def subject(self) -> Subject:
        """For the processes of candidates."""
        spec = self.spec
        latency, throughput = spec.objective.latency, spec.objective.throughput
        return Subject(
            model=str(self.folder.path),
            task=spec.task,
            max_tokens=self.max_tokens,
            workload=spec.workload,
            accuracy=spec.optimization.accuracy,
            cores=self.grant.cores,
            requests_per_second=throughput.requests_per_second if latency and throughput else None,
        )

    def model_facts(self, parameters: int) -> ModelFacts:
        """For the manifest."""
        return ModelFacts(
            source=self.spec.model,
            digest=self.digest,
            architecture=self.folder.architecture or self.folder.model_type,
            head=HEAD_OF_TASK[self.spec.task],
            parameters=parameters,
            max_tokens=self.max_tokens,
        )

    def finished(self, *, more_than_seconds: float | None = None, whole: bool = True) -> Manifest | None:
        """The manifest of the finished artefact; None when there is none, or when it was cut short and a larger
        budget than it had is at hand. `whole` False leaves the files alone that only the fp32 fall-back reads: the
        largest, and a second start is to be quick."""
        manifest = _read(self.artefact, self.key, whole=whole)
        if manifest is None:
            return None
        worth_more = manifest.cut_short and (more_than_seconds or 0.0) > manifest.budget_seconds
        return None if worth_more else manifest

    def prepared(self) -> Manifest | None:
        """The manifest of the fp32 artefact, if there is one."""
        return _read(self.baseline, self.key)

    def remove_baseline(self) -> None:
        """Delete the fp32 artefact. For a call that has found the finished one: whoever asked for the fp32 one before
        that was there has loaded it long since."""
        shutil.rmtree(self.baseline, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Delete what a run left that was killed once the finished artefact was there: the work folder, and the
        artefact that it replaced. For a call that has found one that nothing is to be added to; where anybody is at
        work on this key, nothing is deleted."""
        # What is not there needs no lock, and a store that cannot be written serves all the same.
        with contextlib.suppress(OSError):
            if not self.work.path.exists() and not has_drafts(self.artefact):
                return
            with locked_at_once(self.lock("")), locked_at_once(self.lock("baseline.")):
                remove_drafts(self.artefact)
                self.work.remove()

    def check(self) -> None:
        """Can the model do the task, with this tokenizer and these limits? Errors as `make_task` has them. To be asked
        before anything is written that could not be served."""
        make_task(self.spec.task, self.folder, max_tokens=self.max_tokens)

    def findings(self) -> Sequence[str]:
        """What is odd about the endpoint and the machine."""
        return (*unread(self.spec.task, self.spec.optimization.accuracy), *self.grant.findings)


def _read(artefact: Path, key: str, *, whole: bool = True) -> Manifest | None:
    """A complete artefact of this key. One that is damaged is as good as none: it is made again."""
    if not artefact.exists():
        return None
    try:
        manifest = Manifest.load(artefact)
        if manifest.key != key:
            return None
        models = (manifest.chosen, manifest.baseline) if whole else (manifest.chosen,)
        verify_files(artefact, manifest, *models)
    except ArtefactError as error:
        _warn(error.message)
        return None
    return manifest


@cache
def _warn(damage: str) -> None:
    """Say once that an artefact is damaged: it is looked at before its lock is taken and after."""
    logger.warning("%s: it is made again", damage)


def _is_built(folder: ModelFolder) -> bool:
    """True when the graph is built from the weights. Imports the exporter, a second's work, only when asked."""
    from penstock_optimizer.export.families import FAMILIES

    return folder.model_type in FAMILIES
