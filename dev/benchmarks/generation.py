"""Text generation over HTTP: Penstock against transformers.generate and openvino-genai, on the same cores.

    python -m benchmarks.peers.setup openvino-genai
    python -m benchmarks.generation --artefact ARTEFACT --gguf model.gguf --folder FOLDER

ARTEFACT is what `penstock optimize examples/chat.yaml` has made; several may be given, such as those of endpoints with
different `optimization.engines`. FOLDER the model as safetensors (GGUF files are
expanded into the models folder), `model.gguf` the file that openvino-genai reads. Each server runs alone. For prompts
of each length and each number of clients the table has the median time to the first token, the median time of each
further token, and the tokens per second of all clients. Answers have a fixed number of tokens. Penstock's answers are
those of the guarded plan; openvino-genai rounds the minima of Q4_1, and its answers are not compared.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import httpx
import orjson

from benchmarks.peers.setup import interpreter, is_installed
from benchmarks.program import Program
from penstock.manifest import Manifest
from penstock.process import python_module

APP = Path(__file__).parent / "peers" / "generation_app.py"
GENERATION_PEER = "openvino-genai"
"""The environment of `benchmarks.peers.setup` that this command uses."""
START_SECONDS = 300.0
REQUEST_SECONDS = 300.0
FIRST_WORD = 1000
"""A token that is part of a word in byte-level vocabularies: the tokens of prompts are counted from here."""


@dataclass(frozen=True)
class Times:
    """One streamed answer. Seconds."""

    first: float
    following: float
    tokens: int


@dataclass(frozen=True)
class Subject:
    """A server to measure."""

    name: str
    command: tuple[str, ...]
    """With `{port}`."""
    is_penstock: bool = False
    ends: tuple[int, ...] = ()
    """Tokens that would end an answer early: Penstock is asked not to choose them."""

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Its address, as soon as it answers."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        command = [word.replace("{port}", str(port)) for word in self.command]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{port}"
        try:
            _wait(address + ("/readyz" if self.is_penstock else "/"), process)
            yield address
        finally:
            process.terminate()
            process.wait()

    def stream(self, client: httpx.Client, address: str, tokens: Sequence[int], count: int) -> Times:
        """Send one request and time its tokens."""
        if self.is_penstock:
            path = "/v1/completions"
            body: dict[str, object] = {"prompt": list(tokens), "max_tokens": count, "temperature": 0, "stream": True}
            body["logit_bias"] = {str(end): -100 for end in self.ends}
        else:
            path = "/"
            body = {"tokens": list(tokens), "count": count}
        begin = time.perf_counter()
        with client.stream("POST", address + path, content=orjson.dumps(body), headers=_JSON) as response:
            response.raise_for_status()
            lines = (line for line in response.iter_lines() if line and not line.endswith("[DONE]"))
            arrived = [time.perf_counter() for _ in lines]
        last = arrived[-1]
        return Times(arrived[0] - begin, (last - arrived[0]) / max(count - 1, 1), count)


_JSON = {"content-type": "application/json"}


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(address).is_success:
                return
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise click.ClickException(f"{process.args!r} does not answer")


def measure(subject: Subject, address: str, *, prompt: int, clients: int, count: int, rounds: int) -> list[str]:
    """A row of the table. Prompts of different clients and rounds have no common beginning."""
    times: list[Times] = []
    rates = []
    with httpx.Client(timeout=REQUEST_SECONDS) as http:
        for number in range(rounds + 1):
            found: list[Times] = []

            def send(client: int, number: int = number, found: list[Times] = found) -> None:
                start = FIRST_WORD + 7 * (number * clients + client)
                found.append(subject.stream(http, address, range(start, start + prompt), count))

            begin = time.perf_counter()
            threads = [threading.Thread(target=send, args=(client,)) for client in range(clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if len(found) != clients:
                raise click.ClickException(f"{subject.name} failed to answer {clients - len(found)} requests")
            # The first round warms up.
            if number:
                times += found
                rates.append(clients * count / (time.perf_counter() - begin))
    first = f"{1000 * median(one.first for one in times):.0f}"
    following = f"{1000 * median(one.following for one in times):.1f}"
    return [subject.name, str(prompt), str(clients), first, following, f"{median(rates):.0f}"]


def penstock(artefact: Path, cores: int) -> Subject:
    """Penstock with an artefact's plan."""
    serve = (*python_module("penstock_cli.main"), "serve", str(artefact), "--port", "{port}", "--cores", str(cores))
    ends = orjson.loads((artefact / "generation_config.json").read_bytes())["eos_token_id"]
    name = f"penstock {Manifest.load(artefact).chosen.plan.recipe.name}"
    return Subject(name, serve, is_penstock=True, ends=tuple(ends if isinstance(ends, list) else [ends]))


def subjects(artefacts: Sequence[Path], gguf: Path | None, folder: Path | None, cores: int) -> list[Subject]:
    """The servers that can run here."""
    found = [penstock(artefact, cores) for artefact in artefacts]
    common = ("--port", "{port}", "--threads", str(cores))
    if folder is not None:
        command = (sys.executable, str(APP), "transformers", "--model", str(folder), *common)
        found += [Subject("transformers fp32", command), Subject("transformers bf16", (*command, "--hint", "bf16"))]
    if gguf is not None and is_installed(GENERATION_PEER):
        command = (str(interpreter(GENERATION_PEER)), str(APP), GENERATION_PEER, "--model", str(gguf), *common)
        found += [Subject("openvino-genai", command), Subject("openvino-genai f32 hint", (*command, "--hint", "f32"))]
    return found


@click.command(cls=Program)
@click.option("--artefact", "artefacts", type=click.Path(exists=True, path_type=Path), required=True, multiple=True)
@click.option("--gguf", type=click.Path(exists=True, path_type=Path))
@click.option("--folder", type=click.Path(exists=True, path_type=Path))
@click.option("--cores", default=2, show_default=True)
@click.option("--prompts", default="128,512", show_default=True, help="Lengths of prompts, tokens.")
@click.option("--clients", default="1,8", show_default=True, help="Clients at a time.")
@click.option("--count", default=64, show_default=True, help="Tokens of an answer.")
@click.option("--rounds", default=3, show_default=True, help="Measured rounds of each cell.")
def main(
    *,
    artefacts: tuple[Path, ...],
    gguf: Path | None,
    folder: Path | None,
    cores: int,
    prompts: str,
    clients: str,
    count: int,
    rounds: int,
) -> None:
    """Measure all servers that can run here, one after the other."""
    print("| server | prompt | clients | first token, ms | further token, ms | tokens/s |")
    print("|---|---|---|---|---|---|")
    for subject in subjects(artefacts, gguf, folder, cores):
        with subject.running() as address:
            for prompt in map(int, prompts.split(",")):
                for some in map(int, clients.split(",")):
                    row = measure(subject, address, prompt=prompt, clients=some, count=count, rounds=rounds)
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
