"""`POST /predict` executes the files that the architecture page lists, from the socket to the answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import uvloop

from penstock.manifest import MANIFEST_NAME, ServedModel
from penstock.recipe import EngineName, Plan, Precision, Recipe
from penstock_optimizer.export import Flavour
from penstock_optimizer.quantise import build
from penstock_runtime.app.lifecycle import start_model
from penstock_runtime.app.server import Server, request_limits
from penstock_runtime.host import read_host
from penstock_runtime.serving.loaded_model import load_artefact
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from tests.docs import executed
from tests.runtime.engines.native.programs import needs_library
from tests.runtime.minilm import copy_settings, exported, manifest_of, prepared

pytestmark = needs_library
RECIPE = Recipe(engine=EngineName.NATIVE, precision=Precision.INT8_ROWWISE)
SETTINGS = Settings.model_validate({"http": {"host": "127.0.0.1", "port": 0}})
INPUTS = ("a text", ["a text", "another text", "a third text"])
"""One text runs where it was read; several wait in the queue for a batch."""


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM as the native engine serves it."""
    root = tmp_path_factory.mktemp("artefact")
    copy_settings(root)
    graph = exported(Flavour.FUSED)
    built = build(RECIPE, graph.path, graph.io, prepared("a text of some words"), root, threads=1)
    plan = Plan.model_validate({"recipe": RECIPE, "streams": 1, "threads_per_stream": 1})
    served = ServedModel(path=str(built.path.relative_to(root)), io=built.io, plan=plan)
    manifest = manifest_of(root, chosen=served, baseline=served, cpu=read_host().cpu)
    (root / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return root


async def answers(artefact: Path, recorder: executed.Recorder) -> list[bytes]:
    """The heads of the answers to `INPUTS` on one connection. Records from the connection to the last answer."""
    model = load_artefact(artefact, "chosen", read_host(), cores=1, limits=request_limits(SETTINGS), any_isa=True)
    server = Server(ServerStatus("emotion", model.task.name), SETTINGS)
    await server.start()
    await start_model(server, model)
    port = server.port
    heads = []
    with recorder.record():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for inputs in INPUTS:
            body = json.dumps({"inputs": inputs}).encode()
            writer.write(b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            heads.append(head)
    writer.close()
    server.stop()
    await server.serve(signals=False)
    return heads


def test_a_request_executes_the_listed_files(artefact: Path) -> None:
    with executed.recorder() as recorder:
        heads = uvloop.run(answers(artefact, recorder))

    assert [head.partition(b"\r\n")[0] for head in heads] == [b"HTTP/1.1 200 OK"] * len(INPUTS)
    executed.compare("request", recorder.files)
