"""Serves an artefact in memory with some number of streams, and prints what it holds: run by test_footprint.

python -m tests.endtoend.footprint ARTEFACT STREAMS
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil

from penstock.recipe import Batching
from penstock_runtime.host import read_host
from penstock_runtime.serving.loaded_model import load_artefact, load_graph
from penstock_runtime.serving.predictor import Predictor

WORDS = ("people", "write", "short", "texts", "as", "a", "rule", ",", "and", "long", "ones", "now", "and", "then")


def memory_bytes() -> int:
    """Resident in this process. Shared pages count in full: their share would change with what else runs."""
    return psutil.Process().memory_info().rss


async def main(artefact: Path, streams: int) -> None:
    """Load, warm up, answer requests of all lengths on every stream, print."""
    # The plan differs from the artefact's: the graph is loaded as `load_artefact` does after its checks.
    checked = load_artefact(artefact, "chosen", read_host(), cores=1)
    task, io, manifest = checked.task, checked.io, checked.manifest
    assert manifest is not None
    checked.close()
    before = memory_bytes()
    plan = manifest.chosen.plan.model_copy(
        update={
            "streams": streams, "threads_per_stream": 1, "batching": Batching.SINGLE,
            "wide_from_tokens": None, "wide_alone_from_tokens": None,
        }
    )  # fmt: skip
    model = load_graph(task, artefact / manifest.chosen.path, io, plan, max_tokens=128)
    predictor = Predictor(model)
    await predictor.warm_up()
    texts = [" ".join((WORDS * 12)[:count]) for count in range(2, 110, 3)]
    for _ in range(2):
        await asyncio.gather(*(predictor.predict(text, {}) for text in texts))
    print(json.dumps({"loaded": memory_bytes(), "before": before, "copies": model.engine.facts.weight_copies}))
    await predictor.drain()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
