"""The compiled form of a model for AWS Inferentia in an artefact: `neuron.json`, and one file for each bucket.

A bucket is a shape that the model was compiled for: batch rows x tokens. The compile job writes the folder, the engine
of the runtime reads it:

    model/<recipe slug>/neuron.json       this
    model/<recipe slug>/b1-t128.pt        a TorchScript module with the compiled model, for each bucket
    model/<recipe slug>/fence.npz         a few inputs with their fp32 answers, compared before a pod is ready
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from penstock.errors import ArtefactError
from penstock.hardware import NeuronGeneration
from penstock.manifest import Frozen

NEURON_FILE = "neuron.json"
_AGAIN = "Run penstock optimize again"


class NeuronBucket(Frozen):
    """One compiled shape."""

    file: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*\.pt$")
    """Name in the folder of `neuron.json`. Its sha256 is in the artefact's manifest."""
    batch: int = Field(ge=1)
    tokens: int = Field(ge=1)

    @property
    def size(self) -> int:
        """Padded tokens of one run."""
        return self.batch * self.tokens


class NeuronFence(Frozen):
    """Inputs with fp32 answers, which every copy has to reproduce on the device before a pod is ready."""

    file: str = Field(default="fence.npz", pattern=r"^[a-z0-9][a-z0-9.-]*\.npz$")
    """Name in the folder of `neuron.json`. Its arrays are described in `penstock_runtime.engines.neuron.fence`."""
    max_relative_error: float = Field(gt=0, lt=1)
    """Largest norm of (compiled - fp32) divided by the norm of fp32, over the answer to one input."""


class NeuronWorkload(Frozen):
    """What a pod measures its capacity with."""

    lengths: tuple[int, ...] = Field(min_length=1, max_length=1024)
    """Tokens of requests, as often as they occur."""
    p95_objective_milliseconds: float | None = Field(default=None, gt=0)
    """None: three times the p95 of a nearly idle replica."""


class CompiledModel(Frozen):
    """The whole of `neuron.json`. Inputs are int32 [batch, tokens], in the order of `inputs`; outputs are float32, in
    the order of `outputs`, named and split as in the manifest's `GraphIO`."""

    target: NeuronGeneration
    sdk: str
    """Release of the Neuron SDK, such as `2.31.1`."""
    packages: dict[str, str]
    """Versions of torch, of its Neuron package and of the compiler, by distribution name."""
    flags: tuple[str, ...]
    """Arguments of the compiler."""
    model_digest: str
    inputs: tuple[str, ...] = Field(min_length=1)
    outputs: tuple[str, ...] = Field(min_length=1)
    pad_token: int = Field(default=0, ge=0)
    cores_per_model: int = Field(default=1, ge=1)
    """NeuronCores that one copy uses: 1, or the stages of a pipeline (Inf1 only)."""
    requests_per_copy: int = Field(default=2, ge=1)
    """Runs in progress for each copy: 2 for one core, which hides the time of the host; 4 for a pipeline of 4 cores,
    12 for one of 16."""
    weights_bytes: int = Field(ge=0)
    """Memory of the device for one copy of one bucket."""
    buckets: tuple[NeuronBucket, ...] = Field(min_length=1)
    chosen_token: int | None = Field(default=None, ge=0)
    """Masked language models: the id of the mask token. The compiled module returns logits of all tokens, and the
    engine keeps the logits of mask tokens (`Axes.MASKS`)."""
    fence: NeuronFence
    """Required: the guard does not run on a device, so that no pod may be ready without this comparison."""
    workload: NeuronWorkload | None = None
    """None: of a release before 0.3, which had no measurement in the pod."""

    @model_validator(mode="after")
    def _has_each_bucket_once(self) -> CompiledModel:
        if len({(one.batch, one.tokens) for one in self.buckets}) < len(self.buckets):
            raise ValueError("two buckets have the same shape")
        return self

    @classmethod
    def load(cls, path: Path) -> CompiledModel:
        """Read a `neuron.json`. ArtefactError if it is not valid, or a file that it names is missing."""
        try:
            model = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ArtefactError(f"{path} cannot be read ({error.strerror})", remedy=_AGAIN) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            raise ArtefactError(
                f"{path} is not what this version reads ({where}: {first['msg']})", remedy=f"{_AGAIN} with this version"
            ) from error
        for name in (*(bucket.file for bucket in model.buckets), model.fence.file):
            if not (path.parent / name).is_file():
                raise ArtefactError(f"{path.parent / name} is missing", remedy=_AGAIN)
        return model

    @property
    def longest(self) -> int:
        """Tokens of the longest row that a bucket holds."""
        return max(one.tokens for one in self.buckets)
