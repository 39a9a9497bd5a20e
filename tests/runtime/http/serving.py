"""Servers for the tests: the real server and the real tasks around a model that is made of arithmetic.

`serving(task)` runs one in a thread and gives its URL. `Model` answers as a model of random weights would, at once;
`Gate` holds its requests until the test lets them go.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock.tasks import HEAD_OF_TASK, Head, TaskName
from penstock_runtime.app.server import Server, request_limits
from penstock_runtime.http.transport.connection import Connection
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Outputs, Row
from penstock_runtime.serving.predictor import Answer, Timings
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from penstock_runtime.tasks import Task, make_task
from penstock_runtime.tasks.factory import head_of

WIDTH = 16
WORDS = """
    i like you love a text of some words paris is the capital france my name clara and live in berkeley what where that
    happy person dog very sunny day today deep learning cheese machine kind urgent phone problem good bad this example
    have with . , ? !
"""
ARCHITECTURES = {
    Head.ENCODER: "BertModel",
    Head.SEQUENCE: "BertForSequenceClassification",
    Head.TOKEN: "BertForTokenClassification",
    Head.SPAN: "BertForQuestionAnswering",
    Head.MASKED_LM: "BertForMaskedLM",
}
LABELS = {
    TaskName.TEXT_CLASSIFICATION: ("joy", "love", "anger"),
    TaskName.TOKEN_CLASSIFICATION: ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"),
    TaskName.ZERO_SHOT_CLASSIFICATION: ("contradiction", "neutral", "entailment"),
    TaskName.TEXT_RANKING: ("relevance",),
}
REQUESTS: dict[TaskName, dict[str, Any]] = {
    TaskName.FEATURE_EXTRACTION: {"inputs": "i like you"},
    TaskName.SENTENCE_SIMILARITY: {
        "inputs": {"source_sentence": "that is a happy person", "sentences": ["a happy dog", "a very happy person"]}
    },
    TaskName.TEXT_RANKING: {"inputs": {"query": "what is deep learning ?", "texts": ["cheese", "machine learning"]}},
    TaskName.TEXT_CLASSIFICATION: {"inputs": "i like you"},
    TaskName.TOKEN_CLASSIFICATION: {"inputs": "my name is clara and i live in berkeley"},
    TaskName.QUESTION_ANSWERING: {
        "inputs": {"question": "what is my name ?", "context": "my name is clara and i live in berkeley"}
    },
    TaskName.FILL_MASK: {"inputs": "paris is the [MASK] of france"},
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: {
        "inputs": "my name is clara and i live in berkeley",
        "parameters": {"candidate_labels": ["person", "city"], "threshold": 0.1},
    },
    TaskName.ZERO_SHOT_CLASSIFICATION: {
        "inputs": "i have a problem with my phone",
        "parameters": {"candidate_labels": ["urgent", "phone"]},
    },
    TaskName.TEXT_GENERATION: {"inputs": "once upon a time", "parameters": {"max_new_tokens": 4}},
}
"""A valid request for each task."""


def write_folder(path: Path, task: TaskName) -> Path:
    """Configuration and tokenizer of a small BERT; no weights are needed."""
    path.mkdir(parents=True, exist_ok=True)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if task is TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION:
        specials += ["<<ENT>>", "<<SEP>>"]
    vocabulary = {word: index for index, word in enumerate((*specials, *dict.fromkeys(WORDS.split())))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(specials)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    (path / "tokenizer_config.json").write_text(
        json.dumps({"model_max_length": 64, **{f"{name}_token": text for name, text in names.items()}})
    )
    labels = LABELS.get(task, ("LABEL_0", "LABEL_1"))
    (path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "bert",
                "architectures": [ARCHITECTURES[HEAD_OF_TASK[task]]],
                "hidden_size": WIDTH,
                "max_position_embeddings": 64,
                "vocab_size": len(vocabulary),
                "id2label": {str(index): label for index, label in enumerate(labels)},
                "label2id": {label: index for index, label in enumerate(labels)},
            }
        )
    )
    if task is TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION:
        write_gliner_files(path, vocabulary["<<ENT>>"])
    if task in {TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY}:
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        (path / "modules.json").write_text(
            json.dumps(
                [
                    {"idx": index, "name": str(index), "path": where, "type": f"sentence_transformers.models.{kind}"}
                    for index, (where, kind) in enumerate(modules)
                ]
            )
        )
        (path / "1_Pooling").mkdir(exist_ok=True)
        (path / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True})
        )
    return path


TIMINGS = Timings(
    queue_milliseconds=0.125, tokenization_milliseconds=0.25, inference_milliseconds=0.5, compute_milliseconds=1.0
)


class Model:
    """A predictor whose forward pass is arithmetic on token ids."""

    def __init__(self, task: Task, head: Head, labels: int, vocabulary: int) -> None:
        self.task = task
        self._head = head
        self._labels = labels
        self._vocabulary = vocabulary
        self.deadlines: list[float | None] = []
        """That requests came with."""

    async def predict(
        self,
        inputs: Any,
        parameters: Mapping[str, Any],
        *,
        deadline_seconds: float | None = None,
        caller: int = 0,
        client: str = "",
        tenant: str = "",
        is_bulk: bool = False,
    ) -> Answer:
        self.deadlines.append(deadline_seconds)
        prepared = self.task.prepare(self.task.parse(inputs, parameters))
        reduced = [self.task.reduce(row, self._run(row)) for row in prepared.rows]
        return Answer(
            self.task.assemble(prepared, reduced), TIMINGS, prepared.tokens, prepared.truncated, cut_at=prepared.cut_at
        )

    async def with_tokenizer(self, work: Callable[[Any], Any], size: int, client: str) -> Any:
        return work(self.task.tokenizer)

    async def drain(self) -> None:
        return

    def queue_depth(self) -> tuple[int, int]:
        return 0, 0

    def facts(self) -> dict[str, Any]:
        return {"engine": "arithmetic"}

    def _run(self, row: Row) -> Outputs:
        ids = np.asarray(row.ids, dtype=np.float32)[:, None]

        def values(width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
            return np.sin(ids * np.arange(1, width + 1, dtype=np.float32)).astype(np.float32)

        match self._head:
            case Head.ENCODER:
                return {"last_hidden_state": values(WIDTH)}
            case Head.SEQUENCE:
                return {"logits": values(self._labels).sum(axis=0)}
            case Head.TOKEN:
                return {"logits": values(self._labels)}
            case Head.SPAN:
                return {"start_logits": values(2)[:, 0], "end_logits": values(2)[:, 1]}
            case Head.SPARSE:
                return {"weights": values(self._vocabulary).max(axis=0).clip(0)}
            case Head.MASKED_LM:
                return {"logits": values(self._vocabulary)[[i for i, one in enumerate(row.ids) if one == 4]]}
            case Head.CAUSAL_LM:
                raise NotImplementedError("see small_generation_model")


def write_gliner_files(path: Path, class_token: int) -> None:
    """Settings and head of GLiNER, next to the configuration of its encoder."""
    encoder = json.loads((path / "config.json").read_text())
    settings = {
        "encoder_config": encoder,
        "hidden_size": WIDTH,
        "span_mode": "marker",
        "max_width": 3,
        "num_rnn_layers": 0,
        "class_token_index": class_token,
    }
    (path / "gliner_config.json").write_text(json.dumps(settings))
    spans, inner = "span_rep_layer.span_rep_layer", 2 * WIDTH
    shapes = {f"{spans}.{side}.0": (inner, WIDTH) for side in ("project_start", "project_end")}
    shapes |= {f"{spans}.{side}.3": (WIDTH, inner) for side in ("project_start", "project_end")}
    shapes |= {f"{spans}.out_project": (WIDTH, inner)}
    shapes |= {"prompt_rep_layer.0": (4 * WIDTH, WIDTH), "prompt_rep_layer.3": (WIDTH, 4 * WIDTH)}
    generator, tensors = np.random.default_rng(5), {}
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = generator.normal(size=shape).astype(np.float32) / 4
        tensors[f"{name}.bias"] = np.zeros(shape[0], np.float32)
    save_file(tensors, path / "gliner_head.safetensors")


def write_sparse_folder(path: Path, _: TaskName = TaskName.FEATURE_EXTRACTION) -> Path:
    """The files of a model with sparse vectors."""
    write_folder(path, TaskName.FILL_MASK)
    modules = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    entries = [{"path": where, "type": f"sentence_transformers.models.{kind}"} for where, kind in modules]
    (path / "modules.json").write_text(json.dumps(entries))
    return path


def write_token_vectors_folder(path: Path, values: int = 3) -> Path:
    """The files of a model with a vector of `values` numbers for each token, as PyLate writes them."""
    write_folder(path, TaskName.FEATURE_EXTRACTION)
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    (path / "modules.json").write_text(json.dumps([{"path": where, "type": kind} for where, kind in modules]))
    # Its vocabulary has no punctuation: the default words would be unknown tokens, of which documents have many.
    settings = {"query_length": 12, "query_prefix": "[MASK]", "skiplist_words": []}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (path / "1_Dense").mkdir()
    dense = {"in_features": WIDTH, "out_features": values, "bias": False}
    (path / "1_Dense" / "config.json").write_text(json.dumps(dense))
    weight = np.random.default_rng(3).normal(size=(values, WIDTH)).astype(np.float32)
    save_file({"linear.weight": weight}, path / "1_Dense" / "model.safetensors")
    return path


def write_three_outputs_folder(path: Path) -> Path:
    """The files of a model with the three outputs of BGE-M3."""
    write_folder(path, TaskName.FEATURE_EXTRACTION)
    for seed, (name, values) in enumerate((("colbert_linear", WIDTH), ("sparse_linear", 1))):
        weight = np.random.default_rng(seed).normal(size=(values, WIDTH)).astype(np.float32)
        save_file({"weight": weight, "bias": np.ones(values, np.float32)}, path / f"{name}.safetensors")
    return path


def make_model(path: Path, task: TaskName, settings: Settings | None = None) -> Model:
    """A model for the task, with its files below `path`."""
    return model_of(write_folder(path, task), task, settings)


def model_of(path: Path, task: TaskName, settings: Settings | None = None) -> Model:
    """A model for the task, from existing files."""
    folder = ModelFolder.open(path, weights=False)
    made = make_task(task, folder, limits=request_limits(settings or Settings()))
    return Model(made, head_of(task, folder), len(LABELS.get(task, (0, 0))), folder.config["vocab_size"])


class Gate:
    """A predictor that holds every request until it is opened; it counts requests that arrived, were answered, were
    cancelled."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._open = asyncio.Event()
        self._changed = threading.Condition()
        self.counts = {"waiting": 0, "answered": 0, "cancelled": 0}
        self.error: Exception | None = None
        """Raised instead of an answer."""

    async def predict(
        self,
        inputs: Any,
        parameters: Mapping[str, Any],
        *,
        deadline_seconds: float | None = None,
        caller: int = 0,
        client: str = "",
        tenant: str = "",
        is_bulk: bool = False,
    ) -> Answer:
        self.loop = asyncio.get_running_loop()
        self._count("waiting", 1)
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self._count("waiting", -1)
            self._count("cancelled", 1)
            raise
        self._count("waiting", -1)
        if self.error is not None:
            raise self.error
        self._count("answered", 1)
        return Answer([np.array([0.5], np.float32)], TIMINGS, tokens=3, truncated=0)

    async def with_tokenizer(self, work: Callable[[Any], Any], size: int, client: str) -> Any:
        raise NotImplementedError

    async def drain(self) -> None:
        return

    def queue_depth(self) -> tuple[int, int]:
        return 0, 0

    def facts(self) -> dict[str, Any]:
        return {}

    def open(self) -> None:
        """Let all requests through, from any thread."""
        if self.loop is None:
            self._open.set()
        else:
            self.loop.call_soon_threadsafe(self._open.set)

    def wait_for(self, name: str, count: int, seconds: float = 60.0) -> None:
        """Wait until a count is reached."""
        with self._changed:
            reached = self._changed.wait_for(lambda: self.counts[name] >= count, seconds)
        assert reached, f"{name} is {self.counts[name]}, not {count}"

    def _count(self, name: str, by: int) -> None:
        with self._changed:
            self.counts[name] += by
            self._changed.notify_all()


@dataclass
class Endpoint:
    """A server in a thread."""

    server: Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    model: Any
    cut: list[int]
    """What `serve` returned, when it has."""

    @property
    def url(self) -> str:
        return self.server.url

    def stop(self) -> None:
        """Stop as at a signal; when this returns, the server has received it."""
        known = threading.Event()

        def stop() -> None:
            self.server.stop()
            known.set()

        self.loop.call_soon_threadsafe(stop)
        assert known.wait(60)

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=60)


def serving(model: Any, task: TaskName = TaskName.FEATURE_EXTRACTION, **flags: Any) -> AbstractContextManager[Endpoint]:
    """A server for a predictor; see `running`."""
    return running(lambda settings: (Server(ServerStatus("emotion", task), settings, model), model), **flags)


@contextmanager
def running(
    make: Callable[[Settings], tuple[Server, Any] | Awaitable[tuple[Server, Any]]], **flags: Any
) -> Iterator[Endpoint]:
    """A server and its predictor, which `make` makes in the event loop, on a free port in a thread of its own; it is
    drained at the end."""
    settings = Settings.load({}, {"port": 0, "drain_idle_seconds": 0.0, "drain_limit_seconds": 5.0, **flags})
    started = threading.Event()
    made: list[Any] = []
    cut: list[int] = []

    async def main() -> None:
        result = make(settings)
        server, predictor = result if isinstance(result, tuple) else await result
        await server.start()
        made.extend((server, asyncio.get_running_loop(), predictor))
        started.set()
        cut.append(await server.serve(signals=False))

    def run() -> None:
        try:
            uvloop.run(main())
        finally:
            started.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    assert started.wait(60)
    endpoint = Endpoint(made[0], made[1], thread, made[2], cut)
    try:
        yield endpoint
    finally:
        if thread.is_alive():
            with suppress(RuntimeError):  # a drain that a test began has just closed its loop
                endpoint.stop()
        thread.join(60)
        assert not thread.is_alive(), "the server did not end"


def exchange(endpoint: Endpoint, data: bytes, *, answers: int = 1) -> list[bytes]:
    """Send bytes on a new connection and read that many answers, whole."""
    with endpoint.connect() as client:
        client.sendall(data)
        return [read_answer(client) for _ in range(answers)]


def until(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_sample(port: int, line: str, seconds: float = 60.0) -> None:
    """Wait until `/metrics` has this line."""
    end = time.monotonic() + seconds
    text = ""
    while line not in text:
        assert time.monotonic() < end, f"no {line} in {text}"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
            text = read_answer(client).decode()


def ask(endpoint: Endpoint, inputs: Any, **headers: str) -> httpx.Response:
    """One request, from any thread, with time for a slow machine."""
    # Nothing is encrypted here: loading certificates would take longer than the test.
    return httpx.post(f"{endpoint.url}/predict", json={"inputs": inputs}, headers=headers, timeout=60, verify=False)


def read_answer(client: socket.socket) -> bytes:
    """One answer with a content length (or none), byte by byte so that the next one stays in the socket."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = client.recv(1)
        if not byte:
            return head
        head += byte
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
    body = b""
    while len(body) < length:
        piece = client.recv(length - len(body))
        if not piece:
            break
        body += piece
    return head + body


def post(path: str, body: bytes, *headers: str) -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def open_connections(endpoint: Endpoint) -> list[Connection]:
    """The connections of a server."""
    listener = endpoint.server._listener
    assert listener is not None
    return [one for one in listener.connections if isinstance(one, Connection)]
