"""Int8 graphs on a processor without VNNI: the real AVX2 kernels, on an emulated Haswell.

QEMU's user mode runs ONNX Runtime's machine code and reports a CPU without AVX-512 and VNNI, so that the library takes
the same kernels as there, saturation included. Slow (some 50 s each), hence few rows.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from penstock.recipe import EngineName, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import TaskName
from penstock_optimizer.export import Flavour
from penstock_optimizer.guard.gate import calibration_rows, judging_samples, own_corpus, prepare, samples, split
from penstock_optimizer.guard.judge import ObservedAnswer, judge
from penstock_optimizer.quantise import copy_graph
from penstock_optimizer.quantise.linear import feed
from penstock_runtime.host import read_host
from penstock_runtime.rows import Float, Row
from tests.runtime import minilm

EMULATOR = "qemu-x86_64"
EMULATED = Path("~/.cache/penstock/tests/emulated").expanduser()
MOST_EMULATED = 12
"""Files that are kept between runs."""
TEXTS = ("I like you. I love you.", "ok", "Where is the nearest pharmacy, please?", "😀 🎉", "192.168.0.1:8080")

JUDGED_TOKENS = 32
JUDGED_TEXTS = 60
"""As many rows as the guard needs; short ones, which are the worst and the fastest."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def emulator() -> None:
    """Without the emulator these tests show nothing, but must not be skipped."""
    if shutil.which(EMULATOR) is None:
        pytest.fail(f"{EMULATOR} is not installed: make system installs it (Debian: apt-get install qemu-user)")


PROGRAM = """
import sys
import numpy, onnxruntime
for graph in sys.argv[2:]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    rows = numpy.load(sys.argv[1])
    found = {}
    for index in range(len(rows.files) // 3):
        feed = {name: rows[f"{index}.{name}"] for name in ("input_ids", "attention_mask", "token_type_ids")}
        found[str(index)] = session.run(None, {one.name: feed[one.name] for one in session.get_inputs()})[0]
    numpy.savez(graph + ".npz", **found)
"""


def recipe(*options: str, precision: Precision = Precision.INT8_STATIC) -> Recipe:
    return Recipe(engine=EngineName.ONNXRUNTIME, precision=precision, options=tuple(sorted(options)))


RECIPES = {
    "limited": recipe("per-channel", "smooth", "reduced-range"),
    "full": recipe("per-channel", "smooth"),
}


def run(graphs: list[Path], rows: list[Row], folder: Path, *emulator: str) -> dict[str, list[Float]]:
    """Each graph's outputs for each row, by its folder's name, on this CPU or an emulated one."""
    file = folder / "rows.npz"
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    np.savez(file, **{f"{i}.{name}": array for i, row in enumerate(rows) for name, array in feed(row, inputs).items()})
    outputs = emulated(graphs, file, emulator) if emulator else ran(graphs, file, ())
    return {graph.parent.name: arrays for graph, arrays in zip(graphs, outputs, strict=True)}


def ran(graphs: list[Path], rows: Path, emulator: tuple[str, ...]) -> list[list[Float]]:
    """The outputs, from a separate process."""
    command = [*emulator, sys.executable, "-c", PROGRAM, str(rows), *map(str, graphs)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    return [arrays(Path(f"{graph}.npz")) for graph in graphs]


def emulated(graphs: list[Path], rows: Path, emulator: tuple[str, ...]) -> list[list[Float]]:
    """The same on an emulated CPU, which takes minutes: cached outside the repository, by all inputs.

    A graph with other bytes, other rows, another emulator or another ONNX Runtime is run again.
    """
    version = subprocess.run([emulator[0], "--version"], capture_output=True, check=True).stdout
    about = [version, repr(emulator[1:]).encode(), PROGRAM.encode(), onnxruntime.__version__.encode()]
    about += [array.tobytes() for array in arrays(rows)]
    found = []
    for graph in graphs:
        parts = [*about, *(path.read_bytes() for path in sorted(graph.parent.iterdir()) if path.suffix != ".npz")]
        key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
        kept = EMULATED / f"{key}.npz"
        if not kept.is_file():
            (outputs,) = ran([graph], rows, emulator)
            EMULATED.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}.npz")
            np.savez_compressed(part, *outputs)
            part.rename(kept)
        kept.touch()
        found.append(arrays(kept))
    for old in sorted(EMULATED.glob("*.npz"), key=lambda path: -path.stat().st_mtime)[MOST_EMULATED:]:
        old.unlink(missing_ok=True)
    return found


def copied(graph: Path, folder: Path) -> Path:
    """A graph whose folder may be written."""
    folder.mkdir()
    copy_graph(graph, folder / graph.name)
    return folder / graph.name


def arrays(file: Path) -> list[Float]:
    """All arrays of an .npz, in the order in which they were written."""
    with np.load(file) as found:
        return [found[name] for name in found.files]


def test_the_default_budget_rejects_per_tensor_and_accepts_per_channel_reduced_range(tmp_path: Path) -> None:
    exported = minilm.exported(Flavour.FUSED)
    task = minilm.task()
    texts = judging_samples(task, samples(TaskName.FEATURE_EXTRACTION, split(own_corpus())[1]))
    rows = [row for prepared in prepare(task, texts) for row in prepared.rows if row.length <= JUDGED_TOKENS]
    rows = rows[:: len(rows) // JUDGED_TEXTS]
    dynamic = {
        "per-tensor": recipe(precision=Precision.INT8_DYNAMIC),
        "per-channel": recipe("per-channel", "reduced-range", precision=Precision.INT8_DYNAMIC),
    }
    graphs = [copied(minilm.quantised(one, ()).path, tmp_path / name) for name, one in dynamic.items()]
    reference = tmp_path / "fp32"
    reference.mkdir()
    shutil.copy(exported.path, reference)

    expected = observed(run([reference / exported.path.name], rows, tmp_path)["fp32"])
    haswell = run(graphs, rows, tmp_path, EMULATOR, "-cpu", "Haswell")
    found = {
        name: judge(TaskName.FEATURE_EXTRACTION, expected, observed(outputs), AccuracyBudget())
        for name, outputs in haswell.items()
    }

    means = {name: verdict.metrics[0].value for name, verdict in found.items()}
    assert means == {"per-tensor": pytest.approx(0.93, abs=0.02), "per-channel": pytest.approx(0.99, abs=0.004)}
    assert not found["per-tensor"].passed
    assert [one.name for one in found["per-tensor"].metrics if not one.passed][:2] == ["mean_cosine", "p1_cosine"]
    assert found["per-channel"].passed, found["per-channel"].reason


def observed(outputs: list[Float]) -> list[ObservedAnswer]:
    vectors = pooled(outputs)
    return [ObservedAnswer(vector[np.newaxis], (vector,)) for vector in vectors]


def pooled(outputs: list[Float]) -> Float:
    vectors = np.stack([one[0].mean(axis=0) for one in outputs])
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def test_limited_pairs_do_not_saturate_and_full_range_does(tmp_path: Path) -> None:
    exported = minilm.exported(Flavour.FUSED)
    task = minilm.task()
    texts = samples(TaskName.FEATURE_EXTRACTION, split(own_corpus())[0])
    calibration = calibration_rows(task, texts, at_most=48)
    rows = [row for text in TEXTS for row in task.prepare(task.parse(text, {})).rows]
    graphs = [copied(minilm.quantised(one, calibration).path, tmp_path / name) for name, one in RECIPES.items()]
    reference = tmp_path / "fp32"
    reference.mkdir()
    shutil.copy(exported.path, reference)

    here = run([*graphs, reference / exported.path.name], rows, tmp_path)
    haswell = run(graphs, rows, tmp_path, EMULATOR, "-cpu", "Haswell")

    fp32 = pooled(here["fp32"])
    cosines = {name: (pooled(found) * fp32).sum(axis=1) for name, found in haswell.items()}
    change = {name: np.abs(pooled(haswell[name]) - pooled(here[name])).max() for name in RECIPES}
    assert change["limited"] < 1e-5, "the same integers on both"
    assert cosines["limited"].min() > 0.97
    if read_host().cpu.isa.has_int8_dot:
        assert change["full"] > 1e-3, "this CPU has VNNI, the emulated one has not: sums saturate there"
    assert cosines["full"].mean() < cosines["limited"].mean()
