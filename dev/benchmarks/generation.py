"""Text generation over HTTP: Penstock and other servers and libraries on the same cores.

    python -m benchmarks.peers.setup openvino-genai ctranslate2
    python -m benchmarks.generation --artefact ARTEFACT --gguf model.gguf --folder FOLDER
    python -m benchmarks.generation --artefact ARTEFACT --llama-server BINARY --llama q8_0.gguf --llama q4_0.gguf

ARTEFACT is the result of `penstock optimize examples/chat.yaml`; several may be given, for example of endpoints with
different `optimization.engines`. FOLDER the model as safetensors (GGUF files are
expanded into the models folder), `model.gguf` the file that openvino-genai reads. Each server runs alone. For prompts
of each length and each number of clients the table has the median time to the first token, the median time of each
further token, and the tokens per second of all clients. Answers have a fixed number of tokens. Penstock's answers are
the answers of the guarded plan; openvino-genai rounds the minima of Q4_1, and its answers are not compared.

BINARY is llama.cpp's `llama-server`, built with `-DGGML_NATIVE=ON`. With gcc 12, `ggml_tile_config_init` needs a
compiler barrier before `_tile_loadconfig`, or its AMX products fail. It runs with as many threads as cores and without
polling, with polling, and with one thread: the best of the three is its figure.

`--long-prompt TOKENS` measures something else: seven streams run, and a prompt of that length arrives. The table has
p50 and p99 of the time between two tokens of the streams, without it and from its arrival to its first token.
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
import numpy as np
import orjson

from benchmarks.peers.setup import interpreter, is_installed
from benchmarks.program import Program
from penstock.manifest import Manifest
from penstock.process import python_module

APP = Path(__file__).parent / "peers" / "generation_app.py"
GENERATION_PEER = "openvino-genai"
CONVERTED_PEER = "ctranslate2"
"""The environments of `benchmarks.peers.setup` that this command uses."""
LLAMA_CONTEXT = 4096
"""Tokens of a slot of llama.cpp's server."""
STREAMS = 7
STREAM_TOKENS = 400
"""Streams next to a long prompt, and the tokens of each."""
START_SECONDS = 300.0
REQUEST_SECONDS = 300.0
ONE_REQUEST = httpx.Limits(max_keepalive_connections=0)
"""A connection for each request: a server may close an idle one at the moment of the next request."""
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
    interface: str = "plain"
    """penstock (/v1/completions), llama (/completion) or plain (`generation_app`)."""
    ends: tuple[int, ...] = ()
    """Tokens that would end an answer early: requests to Penstock forbid them."""

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
            _wait(address + READY[self.interface], process)
            yield address
        finally:
            process.terminate()
            process.wait()

    def stream(self, client: httpx.Client, address: str, tokens: Sequence[int], count: int) -> Times:
        """Send one request and time its tokens."""
        begin = time.perf_counter()
        arrived = [moment - begin for moment in self.arrivals(client, address, tokens, count)]
        return Times(arrived[0], (arrived[-1] - arrived[0]) / max(count - 1, 1), count)

    def arrivals(self, client: httpx.Client, address: str, tokens: Sequence[int], count: int) -> Iterator[float]:
        """Send one request: when each of its tokens arrived, on the clock of `time.perf_counter`."""
        body: dict[str, object]
        if self.interface == "penstock":
            path = "/v1/completions"
            body = {"prompt": list(tokens), "max_tokens": count, "temperature": 0, "stream": True}
            body["logit_bias"] = {str(end): -100 for end in self.ends}
        elif self.interface == "llama":
            path = "/completion"
            body = {"prompt": list(tokens), "n_predict": count, "temperature": 0, "stream": True}
            body |= {"ignore_eos": True, "cache_prompt": False}
        else:
            path = "/"
            body = {"tokens": list(tokens), "count": count}
        with client.stream("POST", address + path, content=orjson.dumps(body), headers=_JSON) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line and not line.endswith("[DONE]"):
                    yield time.perf_counter()


READY = {"penstock": "/readyz", "llama": "/health", "plain": "/"}
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
    with httpx.Client(timeout=REQUEST_SECONDS, limits=ONE_REQUEST) as http:
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
    return Subject(name, serve, "penstock", ends=tuple(ends if isinstance(ends, list) else [ends]))


def llama(server: Path, files: Sequence[Path], cores: int, clients: int) -> list[Subject]:
    """llama.cpp's server with each file and the settings that its figures depend on most."""
    found = []
    for file in files:
        # The context is divided among the slots.
        common: tuple[str, ...] = (
            str(server),
            "-m",
            str(file),
            "--host",
            "127.0.0.1",
            "--port",
            "{port}",
            "-np",
            str(clients),
        )
        common += ("-c", str(LLAMA_CONTEXT * clients), "--no-webui")
        for name, settings in (
            ("", ("-t", str(cores), "--poll", "0")),
            (" polling", ("-t", str(cores))),
            (" one thread", ("-t", "1", "--poll", "0")),
        ):
            found.append(Subject(f"llama.cpp {file.stem}{name}", (*common, *settings), "llama"))
    return found


def subjects(artefacts: Sequence[Path], gguf: Path | None, folder: Path | None, cores: int) -> list[Subject]:
    """Penstock and the libraries that can run here."""
    found = [penstock(artefact, cores) for artefact in artefacts]
    common = ("--port", "{port}", "--threads", str(cores))
    if gguf is not None and is_installed(GENERATION_PEER):
        command = (str(interpreter(GENERATION_PEER)), str(APP), GENERATION_PEER, "--model", str(gguf), *common)
        found += [Subject("openvino-genai", command), Subject("openvino-genai f32 hint", (*command, "--hint", "f32"))]
    if folder is not None:
        model = ("--model", str(folder), *common)
        if is_installed(CONVERTED_PEER):
            command = (str(interpreter(CONVERTED_PEER)), str(APP), CONVERTED_PEER, *model)
            found.append(Subject("ctranslate2 int8", command))
        command = (sys.executable, str(APP), "transformers", *model)
        found += [Subject("transformers fp32", command), Subject("transformers bf16", (*command, "--hint", "bf16"))]
        found.append(Subject("transformers fp32 without cache", (*command[:2], "transformers-without-cache", *model)))
    return found


def next_to_long_prompt(subject: Subject, address: str, length: int, turn: int) -> list[str]:
    """A row of the table of `--long-prompt`."""
    # No prompt begins as one of an earlier round.
    first_word = FIRST_WORD + 7 * (STREAMS + 1) * turn
    gaps: dict[bool, list[float]] = {False: [], True: []}
    arrival = threading.Event()
    first: list[float] = []
    with httpx.Client(timeout=REQUEST_SECONDS, limits=ONE_REQUEST) as http:

        def send(client: int) -> None:
            start = first_word + 7 * client
            last = 0.0
            for moment in subject.arrivals(http, address, range(start, start + 128), STREAM_TOKENS):
                if last and not first:
                    gaps[arrival.is_set()].append(moment - last)
                last = moment

        threads = [threading.Thread(target=send, args=(client,)) for client in range(STREAMS)]
        for thread in threads:
            thread.start()
        while sum(map(len, gaps.values())) < STREAMS * STREAM_TOKENS // 4 and any(one.is_alive() for one in threads):
            time.sleep(0.01)
        arrival.set()
        begin = time.perf_counter()
        start = first_word + 7 * STREAMS
        times = subject.stream(http, address, range(start, start + length), 2)
        first.append(time.perf_counter() - begin)
        for thread in threads:
            thread.join()
    cells = [f"{1000 * float(np.percentile(gaps[key], share)):.0f}" for share in (50, 99) for key in (False, True)]
    return [subject.name, *cells, f"{1000 * times.first:.0f}"]


@click.command(cls=Program)
@click.option("--artefact", "artefacts", type=click.Path(exists=True, path_type=Path), required=True, multiple=True)
@click.option("--gguf", type=click.Path(exists=True, path_type=Path))
@click.option("--folder", type=click.Path(exists=True, path_type=Path))
@click.option("--llama-server", type=click.Path(exists=True, path_type=Path), help="llama.cpp's server.")
@click.option(
    "--llama", "llama_files", type=click.Path(exists=True, path_type=Path), multiple=True, help="A GGUF file for it."
)
@click.option("--long-prompt", "length", type=int, help="Measure streams next to a prompt of this number of tokens.")
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
    llama_server: Path | None,
    llama_files: tuple[Path, ...],
    length: int | None,
    cores: int,
    prompts: str,
    clients: str,
    count: int,
    rounds: int,
) -> None:
    """Measure all servers that can run here, one after the other."""
    numbers = [int(number) for number in clients.split(",")]
    found = subjects(artefacts, gguf, folder, cores)
    if llama_server is not None:
        found += llama(llama_server, llama_files, cores, max(*numbers, STREAMS + 1))
    if length is not None:
        print("| server | p50 alone, ms | p50 with it, ms | p99 alone, ms | p99 with it, ms | first token, ms |")
        print("|---|---|---|---|---|---|")
    else:
        print("| server | prompt | clients | first token, ms | further token, ms | tokens/s |")
        print("|---|---|---|---|---|---|")
    for subject in found:
        with subject.running() as address:
            if length is not None:
                for turn in range(rounds):
                    print(f"| {' | '.join(next_to_long_prompt(subject, address, length, turn))} |", flush=True)
                continue
            for prompt in map(int, prompts.split(",")):
                for number in numbers:
                    row = measure(subject, address, prompt=prompt, clients=number, count=count, rounds=rounds)
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
