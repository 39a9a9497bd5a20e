"""One row of each family's base model in process: int8 in the native engine against plain transformers in fp32.

    taskset -c 0,1 python -m benchmarks.family_speed --family bert --family modernbert --lengths 8,32,128,512

Weights are random, so the graph is not judged, and the native one made without calibration: neither changes its speed.
Families that the native engine does not know use another one (`WITHOUT_NATIVE`). Both get the same number of threads,
and are measured in turns. Printed are milliseconds, the fastest run of all turns, which a busy machine disturbs least;
the ratio of these; and, in brackets, that of the medians.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

import click
from tokenizers import Tokenizer

from benchmarks.families import family_model
from benchmarks.markdown import markdown_table
from benchmarks.program import Program
from penstock.recipe import BF16_REST, PER_CHANNEL, EngineName, Precision, Recipe
from penstock.tasks import Head
from penstock_bench.random_models.families import BASE, FAMILIES
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.load.workload import TextMaker
from penstock_optimizer.quantise import build
from penstock_runtime.batching.collate import collate
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.host import read_host
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Row

RECIPE = Recipe(engine=EngineName.NATIVE, precision=Precision.INT8_ROWWISE, options=(PER_CHANNEL,))
WITHOUT_NATIVE: Mapping[str, Recipe] = {
    "bart": Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC, options=(BF16_REST, PER_CHANNEL))
}
"""Families that the native engine does not know, and what is measured instead."""
WITHOUT_A_CLASS = frozenset({"jina"})
"""Families that transformers runs with code of their authors only, which is not fetched here."""
SINCE_5: Mapping[str, str] = {"nomic": "nomic_bert", "gte": "gte", "eurobert": "eurobert"}
"""Families that transformers knows since version 5, in a layout of its own: `model_type` by family."""

Run = Callable[[int], object]
"""Computes a row of this number of tokens."""


def row(tokens: int) -> list[int]:
    """Ids of some text of exactly this length."""
    return [101, *(1000 + 37 * index % 28000 for index in range(tokens - 2)), 102]


def ours(name: str, folder: ModelFolder, threads: int, scratch: Path) -> Run:
    """The native engine, or one that knows the family."""
    recipe = WITHOUT_NATIVE.get(name, RECIPE)
    native = recipe.engine is EngineName.NATIVE
    exported = export(folder, Head.ENCODER, scratch / "fp32", flavour=Flavour.FUSED if native else Flavour.PLAIN)
    calibration = () if native else [Row(row(tokens)) for tokens in (8, 16, 32)]
    built = build(recipe, exported.path, exported.io, calibration, scratch / "int8", threads=threads)
    engine = load_engine(built.path, built.io, recipe, Threads(1, threads))
    return lambda tokens: engine.run(collate([Row(row(tokens))]))


def transformers(name: str, folder: ModelFolder, threads: int) -> Run:
    """Its own model, with the attention that it chooses by itself."""
    import torch
    from transformers import AutoConfig, AutoModel, T5EncoderModel

    torch.set_num_threads(threads)
    if name in SINCE_5:
        sizes = {**BASE, "intermediate_size": FAMILIES["bert"]["intermediate_size"], "pad_token_id": 0}
        config = AutoConfig.for_model(SINCE_5[name], **sizes)
        model = AutoModel.from_config(config, dtype=torch.float32).eval()
    else:
        model_class = T5EncoderModel if folder.model_type == "t5" else AutoModel
        model = model_class.from_pretrained(folder.path, dtype=torch.float32).eval()

    def run(tokens: int) -> object:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([row(tokens)]), attention_mask=torch.ones(1, tokens, dtype=torch.int64))

    return run


def has_class(name: str) -> bool:
    """Whether the installed transformers has a model of the family."""
    known = int(version("transformers").partition(".")[0]) >= 5 or name not in SINCE_5
    return known and name not in WITHOUT_A_CLASS


def served(url: str, folder: ModelFolder) -> Run:
    """A server, asked for the vector of one text."""
    maker = TextMaker(Tokenizer.from_file(str(folder.path / "tokenizer.json")), seed=1)
    texts: dict[int, bytes] = {}

    def run(tokens: int) -> object:
        body = texts.setdefault(tokens, json.dumps({"inputs": maker.text(tokens)}).encode())
        asked = urllib.request.Request(f"{url}/embed", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read()

    return run


def timings(
    runs: Sequence[Run], tokens: int, turns: int, seconds: float, *, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Milliseconds of the runs of each of them, `seconds` in each turn and at least two runs."""
    found: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run(tokens)
    for turn in range(turns):
        order = range(len(runs)) if turn % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            end, count = time.perf_counter() + seconds, 0
            while time.perf_counter() < end or count < 2:
                begin = clock()
                runs[index](tokens)
                found[index].append((clock() - begin) * 1000)
                count += 1
    return found


def cells(found: Sequence[Sequence[float]]) -> list[str]:
    """Of one length: ours, and theirs with the ratio."""
    own, *others = found
    if not others:
        return [f"{min(own):.1f}", ""]
    (other,) = others
    ratio, of_medians = min(other) / min(own), median(other) / median(own)
    return [f"{min(own):.1f}", f"{min(other):.1f}: {ratio:.2f}x ({of_medians:.2f}x)"]


@click.command(cls=Program, help=__doc__)
@click.option("--family", "names", multiple=True, type=click.Choice(list(FAMILIES)), help="Default: all.")
@click.option("--lengths", default="8,32,128,512", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--turns", default=5, show_default=True)
@click.option("--seconds", default=0.3, show_default=True, help="Of each in each turn.")
@click.option("--against", type=click.Choice(list(FAMILIES)), help="Another family, on the native engine.")
@click.option("--url", help="Of a server with the same model.")
@click.option("--cpu-time", is_flag=True, help="The processor's time of one thread.")
def main(
    *, names: Sequence[str], lengths: str, threads: int, turns: int, seconds: float, against: str | None,
    url: str | None, cpu_time: bool
) -> None:  # fmt: skip
    """Measure and print."""
    threads, clock = (1, time.process_time) if cpu_time else (threads, time.perf_counter)
    sizes = [int(size) for size in lengths.split(",")]
    table = []
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = ModelFolder.open(family_model(name))
            runs = [ours(name, folder, threads, Path(scratch))]
            if against:
                other = ModelFolder.open(family_model(against))
                runs.append(ours(against, other, threads, Path(scratch) / "other"))
            elif url:
                runs.append(served(url, folder))
            elif has_class(name):
                runs.append(transformers(name, folder, threads))
            found = [cells(timings(runs, tokens, turns, seconds, clock=clock)) for tokens in sizes]
        table.append([name, *(cell for pair in found for cell in pair)])
        click.echo(f"measured  {' | '.join(table[-1])}", err=True)
    cpu = read_host().cpu
    unit = "milliseconds of the processor" if cpu_time else "milliseconds"
    click.echo(f"{cpu.model_name} ({cpu.isa.value}), threads: {threads}, load {os.getloadavg()[0]:.0f}, {unit}\n")
    compared = against or ("server" if url else "transformers")
    click.echo(markdown_table(["family", *(cell for size in sizes for cell in (f"{size}", compared))], table))


if __name__ == "__main__":
    main()
