"""Properties that only a separate process shows: memory, cores in use, first runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from penstock.recipe import Recipe
from tests.runtime.minilm import OPENVINO_FP32, OPENVINO_STATIC, ORT_DYNAMIC, ORT_FP32, graph

PRELUDE = """
import json, random, sys, threading, time
from pathlib import Path
from penstock.manifest import GraphIO
from penstock.recipe import Recipe
from penstock_runtime.rows import collate
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.rows import Row

given = json.loads(sys.argv[1])
recipe, io = Recipe.model_validate(given["recipe"]), GraphIO.model_validate(given["io"])

def load(streams, wide=False):
    return load_engine(Path(given["path"]), io, recipe, Threads(streams, 1), wide=wide, max_tokens=512)

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

def batch(rows, length):
    return collate([Row([5] * length)] * rows)

def together(count, work):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def measure(recipe: Recipe, code: str, *, seconds: float = 200) -> dict[str, Any]:
    """Run code that prints one JSON object."""
    path, io = graph(recipe)
    given = {
        "path": str(path),
        "io": io.model_dump(mode="json"),
        "recipe": recipe.model_dump(mode="json"),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", PRELUDE + code, json.dumps(given)],
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def slug(recipe: Recipe) -> str:
    return recipe.slug


@pytest.mark.parametrize("recipe", [ORT_FP32, OPENVINO_FP32], ids=slug)
def test_simultaneous_first_runs_end(recipe: Recipe) -> None:
    found = measure(
        recipe,
        """
engine = load(4)
gate = threading.Barrier(4)
done = []
def work(number):
    gate.wait()
    engine.run(batch(1, 5 + number))
    done.append(number)
together(4, work)
print(json.dumps({"done": sorted(done)}))
""",
        seconds=100,
    )
    assert found["done"] == [0, 1, 2, 3]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("recipe", [ORT_FP32, OPENVINO_FP32], ids=slug)
def test_no_more_cores_are_used_than_in_the_plan(recipe: Recipe, wide: bool) -> None:
    """Two streams on any machine: the default would be all its cores."""
    found = measure(
        recipe,
        f"""
engine = load(2, wide={wide})
def work(_):
    end = time.perf_counter() + 0.7
    while time.perf_counter() < end:
        engine.run(batch(1, 128))
together(2, work)
start, used = time.perf_counter(), time.process_time()
together(2, work)
print(json.dumps({{"cores": (time.process_time() - used) / (time.perf_counter() - start)}}))
""",
    )
    # The pool's helper in ORT's wide session may run at the same time as both callers for a moment.
    assert found["cores"] < (3.2 if wide and recipe is ORT_FP32 else 2.3)


@pytest.mark.parametrize("recipe", [ORT_FP32, ORT_DYNAMIC, OPENVINO_FP32, OPENVINO_STATIC], ids=slug)
def test_streams_do_not_multiply_the_weights(recipe: Recipe) -> None:
    """Four streams against one, after the same short run on each stream."""
    code = """
before = anonymous()
engine = load({streams})
gate = threading.Barrier({streams})
def work(_):
    gate.wait()
    engine.run(batch(1, 8))
together({streams}, work)
print(json.dumps({{"mebibytes": anonymous() - before}}))
"""
    one = measure(recipe, code.format(streams=1))
    four = measure(recipe, code.format(streams=4))

    # A stream has 12 to 16 MiB of its own (layers, kernels, buffers). With another copy of the packed matrices it would
    # be 40 MiB more in fp32, 10 MiB more in int8.
    assert four["mebibytes"] - one["mebibytes"] < 3 * 20


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [ORT_DYNAMIC, OPENVINO_STATIC], ids=slug)
def test_mixed_lengths_do_not_let_memory_grow(recipe: Recipe) -> None:
    """Every shape that the batcher may form runs once; afterwards a mix of them hardly adds memory."""
    found = measure(
        recipe,
        """
engine = load(2, wide=True)
grid = engine.facts.grid
lengths = range(16, 257, 16) if grid is None else grid.lengths(256)
for rows in (1, 2, 4):
    for length in lengths:
        if rows * length <= 256:
            together(2, lambda _: engine.run(batch(rows, length)))
first = anonymous()
def work(number):
    chance = random.Random(number)
    for _ in range(120):
        length = max(1, min(256, int(chance.lognormvariate(3.5, 0.9))))
        engine.run(batch(chance.choice([rows for rows in (1, 2, 4) if rows * length <= 256]), length))
together(2, work)
print(json.dumps({"first": first, "then": anonymous()}))
""",
    )
    assert found["then"] - found["first"] < 0.1 * found["first"] + 10, found
