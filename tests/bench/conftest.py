"""Stub servers in processes of their own, ended with the test."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from penstock.resources.files.reading import from_file
from penstock_bench.cell import Client
from penstock_bench.server import GONE, MeasuredServer, free_port

STUB = Path(__file__).with_name("stub_server.py")

StartStub = Callable[..., MeasuredServer]


def ends(pid: int, *, seconds: float = 60.0) -> bool:
    """Whether a process that is not our child ends in time. A zombie has ended: its parent may not collect it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() in GONE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def start_stub() -> Iterator[StartStub]:
    """`start_stub(delay_ms=0, status=200, habit="", cpus=(), name="stub")` gives a server that is ready."""
    with ExitStack() as stack:

        def start(
            delay_ms: float = 0, status: int = 200, habit: str = "", *, cpus: tuple[int, ...] = (), name: str = "stub"
        ) -> MeasuredServer:
            port = free_port()
            command = [sys.executable, str(STUB), str(port), str(delay_ms), str(status), habit]
            server = MeasuredServer.start(name, command, port=port, cpus=cpus)
            stack.callback(server.stop)
            server.wait_until_ready("/health", seconds=60)
            return server

        yield start


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client() as one:
        yield one


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers with two labels, whose tokenizer counts everyday words as one token."""
    import transformers

    from penstock_bench.subject import everyday_tokenizer

    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = everyday_tokenizer()
    transformers.set_seed(1)
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[SEP]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_endpoint(tiny_model: Path) -> Path:
    """A ModelEndpoint file for it: fp32, no search."""
    path = tiny_model.parent / "tiny.yaml"
    path.write_text(
        "apiVersion: penstock.dev/v1alpha1\n"
        "kind: ModelEndpoint\n"
        "metadata: {name: tiny}\n"
        f"spec: {{model: 'file://{tiny_model}', task: text-classification, "
        "optimization: {mode: Disabled, budgetSeconds: 200}}\n"
    )
    return path


@pytest.fixture(scope="session")
def artefact(tiny_endpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its fp32 artefact."""
    from penstock.resources.endpoint import ModelEndpoint
    from penstock_optimizer.optimise import prepare

    endpoint = from_file(ModelEndpoint, tiny_endpoint)
    return prepare(endpoint, store=tmp_path_factory.mktemp("store"), models=tiny_endpoint.parent, cores=1).artefact
