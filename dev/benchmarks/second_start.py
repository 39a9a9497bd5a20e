"""The second start of `penstock serve` on this machine, from the process to its first answer, by stage.

    python -m benchmarks.second_start FILE [--store artefacts] [--rounds 8]

FILE is a ModelEndpoint; its artefact is in the store (`penstock optimize FILE`). Each round starts the server in a new
process, sends one request when it serves, and ends it. The stages: the interpreter; the imports of the command; finding
the artefact (the model's files and the artefact's are compared with their digests); loading it; the warm-up and the
check of the probes; the request. Shown for each: CPU time of the process and time by the clock, both as the minimum and
the median of the rounds. On a machine with other work only the minimum of the CPU time can be compared.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.program import Program
from penstock_runtime.host import read_host

STAGES = ("interpreter", "imports", "find", "load", "warm-up", "answer")
BODY = json.dumps({"inputs": "I like you. I love you."}).encode()
CHILD = """
import json, sys, time
def mark(stage):
    print("MARK", json.dumps([stage, time.time(), time.process_time()]), flush=True)
mark("interpreter")
from penstock.process import without_collections
with without_collections():
    import penstock_cli.serve as serve, penstock_optimizer.optimise as optimise
mark("imports")
def timed(stage, function):
    def call(*given, **named):
        try:
            return function(*given, **named)
        finally:
            mark(stage)
    return call
async def start(*given, start=serve.start_model):
    try:
        return await start(*given)
    finally:
        mark("warm-up")
optimise.prepare = timed("find", optimise.prepare)
serve.load_artefact, serve.start_model = timed("load", serve.load_artefact), start
serve.command(sys.argv[1:])
"""
"""The command with its stages marked."""


def start(file: Path, store: Path) -> dict[str, tuple[float, float]]:
    """One start: CPU time and time by the clock of each stage, milliseconds."""
    begin = time.time()
    words = [str(file), "--store", str(store), "--port", "0", "--no-optimize"]
    marks: list[tuple[str, float, float]] = []
    url = ""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("MARK "):
                    marks.append(tuple(json.loads(line.removeprefix("MARK "))))
                elif line.startswith("serving"):
                    url = re.findall(r"http://\S+", line)[0]
                    break
            if [name for name, *_ in marks] != list(STAGES[:-1]):
                raise click.ClickException(f"{file} was not found finished in {store}: penstock optimize {file}")
            before = cpu_seconds(process.pid)
            request = urllib.request.Request(f"{url}/predict", BODY, {"content-type": "application/json"})
            asked = time.time()
            urllib.request.urlopen(request).close()
            answer = (cpu_seconds(process.pid) - before, time.time() - asked)
        finally:
            process.terminate()
            process.stdout.read()
    found, clock, cpu = {}, begin, 0.0
    for name, at, used in marks:
        found[name] = (1000 * (used - cpu), 1000 * (at - clock))
        clock, cpu = at, used
    return found | {"answer": (1000 * answer[0], 1000 * answer[1])}


def cpu_seconds(process: int) -> float:
    """User and system time, in steps of 10 ms."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@click.command(cls=Program, help=__doc__)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--store", default="artefacts", show_default=True, type=click.Path(path_type=Path))
@click.option("--rounds", default=8, show_default=True)
def main(*, file: Path, store: Path, rounds: int) -> None:
    """Measure."""
    start(file, store)  # compiles modules and fills the page cache
    turns = [start(file, store) for _ in range(rounds)]
    rows: dict[str, Any] = {stage: [turn[stage] for turn in turns] for stage in STAGES}
    rows["all"] = [tuple(map(sum, zip(*turn.values(), strict=True))) for turn in turns]
    click.echo(f"{read_host().cpu.model_name}, {rounds} starts, milliseconds")
    click.echo(f"{'':12}{'CPU min':>9}{'median':>9}{'clock min':>11}{'median':>9}")
    for stage, values in rows.items():
        cpu, clock = ([one[place] for one in values] for place in (0, 1))
        click.echo(f"{stage:12}{min(cpu):9.0f}{median(cpu):9.0f}{min(clock):11.0f}{median(clock):9.0f}")


if __name__ == "__main__":
    main()
