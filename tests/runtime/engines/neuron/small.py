"""Small models compiled with the stand-in for the Neuron SDK, and the same models in numpy.

Vectors are sums of rows of two tables and of the mean over the text, through one matrix and tanh. Heads are one matrix.
Torch and the stand-in run in other processes only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuron_standin.install import VERSIONS, install
from neuron_standin.machine import write_machine
from penstock.capacity import CapacityCurve
from penstock.hardware import CpuIdentity, Isa, NeuronGeneration
from penstock.manifest import GRAPH_OUTPUTS, MANIFEST_NAME, GraphIO, Manifest, ModelFacts, ServedModel
from penstock.neuron_artefact import CompiledModel, NeuronBucket, NeuronFence
from penstock.recipe import Batching, EngineName, Plan, Precision, Recipe
from penstock.tasks import Head, TaskName
from penstock_runtime.engines.base import EngineFacts, Streams, Threads
from penstock_runtime.engines.neuron.fence import write_fence
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.host import read_host
from penstock_runtime.rows import Batch, Float, Outputs, Row, collate
from tests.runtime.http.serving import WIDTH, WORDS

ROOT = Path(__file__).parents[4]
MASK = 4
"""The mask token of `write_folder`."""
RECIPE = Recipe(engine=EngineName.NEURON, precision=Precision.FP32)
VOCABULARY = len({*WORDS.split()}) + 5
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
BUCKETS = ((1, 32), (4, 64))
KINDS = {
    "vectors": (Head.ENCODER, 0),
    "classes": (Head.SEQUENCE, 3),
    "score": (Head.SEQUENCE, 1),
    "tokens": (Head.TOKEN, 5),
    "spans": (Head.SPAN, 2),
    "masks": (Head.MASKED_LM, VOCABULARY),
    "sparse": (Head.SPARSE, VOCABULARY),
}
"""Head and number of outputs of each model; 0: the vectors themselves."""
KIND_OF_TASK = {
    TaskName.FEATURE_EXTRACTION: "vectors",
    TaskName.SENTENCE_SIMILARITY: "vectors",
    TaskName.TEXT_CLASSIFICATION: "classes",
    TaskName.ZERO_SHOT_CLASSIFICATION: "classes",
    TaskName.TEXT_RANKING: "score",
    TaskName.TOKEN_CLASSIFICATION: "tokens",
    TaskName.QUESTION_ANSWERING: "spans",
    TaskName.FILL_MASK: "masks",
}

COMPILE = """
import json, sys
import numpy as np
import torch

given = json.loads(sys.argv[1])
if sys.argv[2] == "inf2":
    import torch_neuronx as neuron
    options = {"compiler_args": "--target inf2 --auto-cast none", "cpu_backend": True}
else:
    import torch_neuron as neuron
    options = {"compiler_args": ["--fast-math", "none"]}

class Small(torch.nn.Module):
    def __init__(self, weights, head):
        super().__init__()
        for name, values in weights.items():
            values = torch.from_numpy(values)
            # Embeddings are modules, as in real models: on Inf1 they stay on the host.
            own = torch.nn.Embedding.from_pretrained if name in {"table", "kinds"} else torch.nn.Parameter
            setattr(self, name, own(values))
        self.head = head

    def forward(self, ids, mask, types):
        real = mask.to(torch.float32).unsqueeze(-1)
        own = self.table(ids) + self.kinds(types)
        mean = (own * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
        hidden = torch.tanh((own + mean) @ self.matrix)
        if self.head == "vectors":
            return hidden
        if self.head in {"classes", "score"}:
            return hidden[:, 0] @ self.heads
        answers = hidden @ self.heads
        if self.head == "sparse":
            return (torch.log1p(torch.relu(answers)) * real).amax(1)
        return (answers[..., 0], answers[..., 1]) if self.head == "spans" else answers

for one in given:
    model = Small(dict(np.load(one["weights"])), one["head"]).eval()
    own = dict(options)
    if one["cores"] > 1:
        own["compiler_args"] = [*own["compiler_args"], "--neuroncore-pipeline-cores", str(one["cores"])]
    for batch, tokens, file in one["buckets"]:
        example = tuple(torch.ones((batch, tokens), dtype=torch.int32) for _ in range(3))
        neuron.trace(model, example, **own).save(file)
"""


def weights_of(kind: str) -> dict[str, Float]:
    """The same at each call."""
    random = np.random.default_rng(list(KINDS).index(kind))
    _, outputs = KINDS[kind]
    shapes: dict[str, tuple[int, ...]] = {"table": (VOCABULARY, WIDTH), "kinds": (2, WIDTH), "matrix": (WIDTH, WIDTH)}
    if outputs:
        shapes["heads"] = (WIDTH, outputs)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def io_of(kind: str) -> GraphIO:
    return GraphIO(inputs=INPUTS, outputs=GRAPH_OUTPUTS[KINDS[kind][0]])


@dataclass(eq=False)
class InNumpy:
    """The same model as an engine on the CPU."""

    kind: str

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts("numpy", "1", Threads(1, 1), "f32")

    def run(self, batch: Batch) -> Outputs:
        weights = weights_of(self.kind)
        real = batch.attention_mask[..., None].astype(np.float32)
        own = weights["table"][batch.input_ids] + weights["kinds"][batch.token_type_ids]
        mean = (own * real).sum(1, keepdims=True) / real.sum(1, keepdims=True)
        hidden = np.tanh((own + mean) @ weights["matrix"]).astype(np.float32)
        if self.kind == "vectors":
            return {"last_hidden_state": hidden}
        answers = hidden @ weights["heads"]
        match self.kind:
            case "classes" | "score":
                return {"logits": answers[:, 0]}
            case "spans":
                return {"start_logits": answers[..., 0].copy(), "end_logits": answers[..., 1].copy()}
            case "masks":
                return {"logits": answers[batch.input_ids == MASK]}
            case "sparse":
                return {"weights": (np.log1p(np.maximum(answers, 0)) * real).max(1)}
            case _:
                return {"logits": answers}

    run_wide = run
    run_widening = run

    def start_streams(self) -> Streams:
        return ThreadStreams(self)

    def close(self) -> None:
        pass


def fence_of(kind: str) -> tuple[Batch, Outputs]:
    """Inputs and fp32 answers."""
    batch = collate([Row([2, 7, 8, MASK, 9, 3]), Row([2, 10, MASK, 3], [0, 0, 1, 1])])
    return batch, InNumpy(kind).run(batch)


@dataclass(frozen=True)
class Standin:
    """The stand-in, installed in a folder, and a machine with its devices."""

    folder: Path
    generation: str = "inf2"

    @property
    def machine(self) -> Path:
        return self.folder / "machine.json"

    @property
    def path(self) -> Path:
        return self.folder / "packages"

    def variables(self, *, devices: bool = True, **more: str) -> dict[str, str]:
        """Environment of a process on a host with or without the devices."""
        own = {"PYTHONPATH": str(self.path), "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}"}
        return {**own, **({"STANDIN_MACHINE": str(self.machine)} if devices else {}), **more}

    def describe(self, **more: Any) -> None:
        """Write the machine: one device, and the faults."""
        write_machine(self.machine, self.folder / "state", self.generation, **more)


def install_standin(folder: Path, generation: str = "inf2", *, versions: Mapping[str, str] | None = None) -> Standin:
    install(folder / "packages", generation, versions)
    standin = Standin(folder, generation)
    standin.describe()
    return standin


def of_inf1(cores: int) -> dict[str, Any]:
    """Fields of `neuron.json` of a model for Inf1 with copies over this many NeuronCores."""
    return {
        "target": "inf1",
        "sdk": "2.20.0",
        "packages": dict(VERSIONS["inf1"]),
        "flags": ["--fast-math", "none", *(["--neuroncore-pipeline-cores", str(cores)] if cores > 1 else [])],
        "cores_per_model": cores,
        "requests_per_copy": 4 if cores > 1 else 2,
    }


def compile_kinds(standin: Standin, folder: Path, wanted: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Path]:
    """Compile a model for each kind and number of NeuronCores of a copy; the paths of their `neuron.json`."""
    given, found = [], {}
    for kind, cores in wanted:
        own = folder / f"{kind}-{cores}"
        own.mkdir(parents=True)
        np.savez(own / "weights.npz", **weights_of(kind))  # type: ignore[arg-type] # as in write_fence
        buckets = [(batch, tokens, str(own / f"b{batch}-t{tokens}.pt")) for batch, tokens in BUCKETS]
        given.append({"head": kind, "weights": str(own / "weights.npz"), "buckets": buckets, "cores": cores})
        found[kind, cores] = own
    environment = standin.variables(devices=False, NEURON_PLATFORM_TARGET_OVERRIDE="inf2")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(given), standin.generation],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return {
        (kind, cores): write_compiled(own, kind, **(of_inf1(cores) if standin.generation == "inf1" else {}))
        for (kind, cores), own in found.items()
    }


def write_compiled(folder: Path, kind: str, **changes: Any) -> Path:
    """`neuron.json` and the stored answers; `changes`: other values of its fields."""
    write_fence(folder / "fence.npz", *fence_of(kind))
    model = CompiledModel(
        target=NeuronGeneration.INF2,
        sdk="2.31.1",
        packages=dict(VERSIONS["inf2"]),
        flags=("--target", "inf2", "--auto-cast", "none"),
        model_digest="0" * 64,
        inputs=INPUTS,
        outputs=tuple(io_of(kind).outputs),
        weights_bytes=1000,
        buckets=tuple(
            NeuronBucket(file=f"b{batch}-t{tokens}.pt", batch=batch, tokens=tokens) for batch, tokens in BUCKETS
        ),
        chosen_token=MASK if kind == "masks" else None,
        fence=NeuronFence(max_relative_error=0.001),
    )
    path = folder / "neuron.json"
    path.write_text(json.dumps({**model.model_dump(mode="json"), **changes}))
    return path


def changed_copy(path: Path, to: Path, kind: str, **changes: Any) -> Path:
    """A copy of a compiled model with other values in its `neuron.json`."""
    shutil.copytree(path.parent, to)
    return write_compiled(to, kind, **changes)


def write_artefact(
    root: Path, path: Path, kind: str, task: TaskName, write: Callable[[Path, TaskName], object]
) -> Manifest:
    """An artefact with a compiled model for a task, made on a processor of another kind than this one. `write` writes
    the files of the model besides the weights."""
    folder = root / "model" / RECIPE.slug
    shutil.copytree(path.parent, folder, ignore=shutil.ignore_patterns("weights.npz"))
    write(root, task)
    plan = plan_of(cores_per_copy=CompiledModel.load(path).cores_per_model)
    served = ServedModel(path=str((folder / "neuron.json").relative_to(root)), io=io_of(kind), plan=plan)
    here = read_host().cpu.isa
    manifest = Manifest(
        key="0" * 64,
        created="2026-11-27T06:00:00Z",
        toolchain={},
        model=ModelFacts(
            source="a model of the tests",
            digest="0" * 64,
            architecture="BertModel",
            head=KINDS[kind][0],
            parameters=1000,
            max_tokens=64,
        ),
        task=task,
        cpu=CpuIdentity(isa=Isa.NEON if here is not Isa.NEON else Isa.AVX2, model_name="another processor"),
        # More than this machine has: they are NeuronCores.
        cores=1000,
        objective="best of latency and throughput",
        chosen=served,
        baseline=served,
        candidates=(),
        capacity=CapacityCurve(),
        files={
            str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(root.rglob("*"))
            if file.is_file()
        },
    )
    (root / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return manifest


def plan_of(copies: int = 2, cores_per_copy: int = 1) -> Plan:
    return Plan(
        recipe=RECIPE,
        streams=copies,
        threads_per_stream=cores_per_copy,
        batching=Batching.PADDED,
        max_batch_rows=4,
        max_batch_tokens=256,
        max_padding_share=0.5,
    )
