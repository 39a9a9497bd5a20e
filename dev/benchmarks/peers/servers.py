"""The servers that Penstock is compared with: how each is started, its request and its answer.

Each gets the same model folder (fp32 weights, and our own int8 graph as `onnx/model.onnx`), the same CPUs, and the
settings that its documentation recommends for a CPU; settings without which its answers are wrong have a comment.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.setup import interpreter, is_installed
from penstock.tasks import TaskName
from penstock_bench import baseline

APPS = Path(__file__).parent
MAX_BATCH = 16
BATCH_WAIT_SECONDS = 0.002

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "OTEL_SDK_DISABLED": "true",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}

Vector = Sequence[float]


@dataclass(frozen=True)
class Shape:
    """A server's request for the vector of one text, and its answer."""

    path: str
    body: Callable[[str], Any]
    vector: Callable[[Any], Vector]
    """From the parsed answer."""


def _mean_of_tokens(answer: Any) -> Vector:
    """MLServer's feature-extraction stops at token vectors: [1][tokens][hidden] as JSON in a string."""
    tokens = json.loads(answer["outputs"][0]["data"][0])
    while isinstance(tokens[0][0], list):
        tokens = tokens[0]
    sums = [sum(column) for column in zip(*tokens, strict=True)]
    norm = sum(value * value for value in sums) ** 0.5
    return [value / norm for value in sums]


EMBED = Shape("/embed", lambda text: {"inputs": text}, lambda answer: answer[0])
PREDICT = Shape("/predict", lambda text: {"inputs": text}, lambda answer: answer)
INFINITY = Shape(
    "/embeddings", lambda text: {"model": "minilm", "input": text}, lambda answer: answer["data"][0]["embedding"]
)
LITSERVE = Shape("/predict", lambda text: {"input": text}, lambda answer: answer["embedding"])
MLSERVER = Shape(
    "/v2/models/minilm/infer",
    # The input must be called `inputs`: under `args` a merged batch loses all texts but the first.
    lambda text: {"inputs": [{"name": "inputs", "shape": [1], "datatype": "BYTES", "data": [text]}]},
    _mean_of_tokens,
)


@dataclass(frozen=True)
class Place:
    """Where a server is to run."""

    model: Path
    port: int
    cpus: tuple[int, ...]
    scratch: Path
    """A folder for files that it needs or writes."""

    @property
    def threads(self) -> int:
        """One for each CPU."""
        return len(self.cpus)


@dataclass(frozen=True)
class Peer:
    """A server under comparison."""

    name: str
    about: str
    """Version and settings, for the table's legend."""
    shape: Shape
    ready_path: str
    command: Callable[[Place], Sequence[str]]
    environment: Callable[[Place], Mapping[str, str]] = field(default=lambda _: {})
    needs: str = ""
    """The environment of `benchmarks.peers.setup` that it runs in; empty: ours, or a command of the user's."""

    @property
    def missing(self) -> str:
        """Why it cannot run here; empty when it can."""
        if self.needs and not is_installed(self.needs):
            return f"{self.name}: not set up. Run python -m benchmarks.peers.setup {self.needs}"
        return ""


def _infinity(engine: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        return [
            *(
                str(interpreter("infinity")),
                "-W",
                "ignore",
                str(interpreter("infinity").with_name("infinity_emb")),
                "v2",
            ),
            *("--model-id", str(place.model), "--served-model-name", "minilm", "--engine", engine),
            # The default of the optimum engine is CLS pooling, whatever the model declares: wrong vectors.
            *("--pooling-method", "mean"),
            # It would write another graph into the model folder; this one is fused already.
            "--onnx-disable-optimize",
            # It would answer repeated texts from disk.
            "--no-vector-disk-cache",
            *("--device", "cpu", "--dtype", "float32", "--batch-size", "32"),
            *("--host", "127.0.0.1", "--port", str(place.port), "--log-level", "warning"),
        ]

    return command


def _mlserver(place: Place) -> list[str]:
    settings = {
        "host": "127.0.0.1",
        "http_port": place.port,
        "grpc_port": place.port + 1,
        "metrics_port": place.port + 2,
        "metrics_endpoint": None,
        "parallel_workers": 0,
        "debug": False,
        "use_structured_logging": False,
        "access_log": False,
    }
    model = {
        "name": "minilm",
        "implementation": "mlserver_huggingface.HuggingFaceRuntime",
        "max_batch_size": MAX_BATCH,
        "max_batch_time": BATCH_WAIT_SECONDS,
        "parameters": {
            "extra": {
                "task": "feature-extraction",
                "pretrained_model": str(place.model),
                "pretrained_tokenizer": str(place.model),
                "framework": "pt",
                "optimum_model": False,
                "device": -1,
            }
        },
    }
    (place.scratch / "settings.json").write_text(json.dumps(settings))
    (place.scratch / "model-settings.json").write_text(json.dumps(model))
    python = interpreter("mlserver")
    return [str(python), "-W", "ignore", str(python.with_name("mlserver")), "start", str(place.scratch)]


def _sentence_transformers(backend: str) -> Peer:
    return Peer(
        name=f"sentence-transformers-{backend}",
        about=f"sentence-transformers 5.7.0, {backend} backend, behind FastAPI"
        + (", our int8 graph" if backend == "onnx" else ", fp32"),
        shape=EMBED,
        ready_path="/health",
        command=lambda place: [
            str(interpreter("sentence-transformers")),
            *("-W", "ignore"),
            str(APPS / "sentence_transformers_app.py"),
            *(str(place.model), str(place.port), backend),
        ],
        environment=lambda place: {**OFFLINE, "OMP_NUM_THREADS": str(place.threads)},
        needs="sentence-transformers",
    )


PYPI_PEERS: tuple[Peer, ...] = (
    Peer(
        name="infinity-torch",
        about="infinity-emb 0.0.78, torch engine, fp32 (BetterTransformer and compile as by default)",
        shape=INFINITY,
        ready_path="/health",
        command=_infinity("torch"),
        environment=lambda place: {
            **OFFLINE,
            "INFINITY_ANONYMOUS_USAGE_STATS": "0",
            "OMP_NUM_THREADS": str(place.threads),
        },
        needs="infinity",
    ),
    Peer(
        name="infinity-optimum",
        about="infinity-emb 0.0.78, optimum engine, our int8 graph, mean pooling forced",
        shape=INFINITY,
        ready_path="/health",
        command=_infinity("optimum"),
        environment=lambda _: {**OFFLINE, "INFINITY_ANONYMOUS_USAGE_STATS": "0"},
        needs="infinity",
    ),
    Peer(
        name="litserve",
        about=f"LitServe 0.2.19 with ONNX Runtime, our int8 graph, batches of {MAX_BATCH} within "
        f"{BATCH_WAIT_SECONDS * 1e3:g} ms, padded",
        shape=LITSERVE,
        ready_path="/health",
        command=lambda place: [
            *(str(interpreter("litserve")), str(APPS / "litserve_app.py")),
            *(str(place.model), str(place.port)),
        ],
        environment=lambda _: OFFLINE,
        needs="litserve",
    ),
    Peer(
        name="mlserver",
        about=f"MLServer 1.7.1 with mlserver-huggingface, torch fp32, adaptive batches of {MAX_BATCH}; answers with "
        "token vectors, which the client would have to pool",
        shape=MLSERVER,
        ready_path="/v2/health/ready",
        command=_mlserver,
        environment=lambda place: {**OFFLINE, "USE_TF": "0", "OMP_NUM_THREADS": str(place.threads)},
        needs="mlserver",
    ),
    _sentence_transformers("torch"),
    _sentence_transformers("onnx"),
    _sentence_transformers("openvino"),
)

TRANSFORMERS = Peer(
    name="transformers",
    about="a plain transformers pipeline behind FastAPI, fp32: the baseline, and the reference of the answers",
    shape=PREDICT,
    ready_path=baseline.READY_PATH,
    command=lambda place: baseline.command(sys.executable, place.model, TaskName.FEATURE_EXTRACTION, place.port),
    environment=lambda place: baseline.environment(place.threads),
)


def peer_of_command(text: str) -> Peer:
    """From `NAME=COMMAND` of the command line: any server that speaks `/embed` (text-embeddings-inference's shape).

    `{model}`, `{port}` and `{cpus}` (such as 0,1) in the command are filled in.
    """
    name, _, command = text.partition("=")
    if not name or not command.strip():
        raise ValueError(
            f"{text!r} is not NAME=COMMAND, such as 'tei=text-embeddings-router --model-id {{model}} --port {{port}}'"
        )
    words = shlex.split(command)

    def fill(place: Place) -> list[str]:
        values = {"model": str(place.model), "port": str(place.port), "cpus": ",".join(map(str, place.cpus))}
        return [word.format(**values) for word in words]

    return Peer(name=name, about=command.strip(), shape=EMBED, ready_path="/health", command=fill)
