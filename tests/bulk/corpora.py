"""A corpus and a small model for the tests of bulk work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

import penstock
from penstock.tasks import TaskName
from penstock_bulk.corpus import BulkWork
from penstock_bulk.plans import BulkPlan, Options, make_plan
from penstock_bulk.storage import Folder, open_folder
from tests.golden.models import BERT, Sizes, write_model

WORDS = ("bird", "plane", "paris", "bread", "water", "flight", "fuel", "wing", "capital", "flour")
SIZES = Sizes(width=32, layers=2, heads=4, inner=48, positions=48)


def texts(count: int, seed: int = 45) -> list[str]:
    """Of different lengths."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, size=draw.integers(1, 30))) for _ in range(count)]


def rows(count: int) -> list[dict[str, Any]]:
    """With an id and a column of a language."""
    return [{"id": f"r{number}", "text": text, "lang": "en"} for number, text in enumerate(texts(count))]


def write_lines(path: Path, some: list[Any]) -> Path:
    """JSON lines; what is bytes is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in some))
    return path


def write_parquet(path: Path, some: list[dict[str, Any]]) -> Path:
    """With several row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(some), path, row_group_size=70)
    return path


def load(folder: Path, task: TaskName = TaskName.FEATURE_EXTRACTION, threads: int | None = None) -> penstock.Model:
    """A small model in `folder`, fp32."""
    model = folder / task.value
    if not model.exists():
        write_model(model, task, BERT, SIZES, pooled=task is TaskName.FEATURE_EXTRACTION)
    return penstock.load(
        model.as_uri(), task=task.value, plan="fp32", threads=threads, store=folder / "store", models=folder / "models"
    )


def planned(
    source: Path | str, output: Path | str, model: penstock.Model, **options: Any
) -> tuple[BulkPlan, Folder, BulkWork]:
    """Work that embeds, unless the options name another task."""
    asked = Options(**{"task": "embed", "shard_rows": 40, **options})
    folder = open_folder(str(output))
    plan = make_plan(str(source), model, asked)
    return plan, folder, BulkWork(plan, folder, model)


def contents(output: Path) -> dict[str, bytes]:
    """All files of an output."""
    return {
        path.relative_to(output).as_posix(): path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()
    }


def letters(output: Path) -> list[dict[str, Any]]:
    """All dead letters of an output."""
    found = contents(output)
    return [json.loads(line) for name in found if name.startswith("_dead/") for line in found[name].splitlines()]
