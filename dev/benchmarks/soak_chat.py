"""An hour of mixed chats: does the server's memory grow, does a request fail, and does a cancelled one end?

    python -m benchmarks.soak_chat --artefact artefacts/3f9c0a... [--minutes 60] [--cores 2] [--clients 8]

The artefact is one of text generation (`penstock optimize examples/chat.yaml`). Each client sends one request after the
other: chats, responses and continuations, most of them as streams, of different lengths, greedy and with seeds, some
with several answers, some in a JSON form. One of five streams is closed after a few events, as a stop button does. The
trend of the resident memory in the second half must stay under 2 % an hour (median slope over all pairs of samples); at
the end no sequence runs and no block of the cache is in use.

Blocks of the cache take memory when they are first written. So all of them are filled before the hour begins.
"""

from __future__ import annotations

import csv
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from benchmarks.ours import store
from benchmarks.program import Program
from benchmarks.trend import Sample, judge
from penstock_bench.grid import place
from penstock_bench.server import serve
from penstock_cli.terminal import FiniteRange
from penstock_runtime.host import read_host

SAMPLE_SECONDS = 5.0
REQUEST_SECONDS = 300.0
END_SECONDS = 60.0
"""For the requests that were closed last to end in the server."""
FILL_SECONDS = 1800.0
FILLED = 0.98
PROMPT_NUMBERS = 300
"""Of six digits each: some 2,000 tokens."""
CANCELLED = 0.2
OVERLOADED = (429, 503)
"""Status codes of a busy server: not failures."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}
WORDS = ("what", "who", "why", "how", "the", "a", "cat", "river", "number", "city", "small", "blue", "seven", "writes")


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    body: dict[str, Any]
    is_stream: bool
    events: int | None
    """The connection is closed after this number of events; None: all are read."""


def asked(chance: random.Random) -> Asked:
    """A random request."""
    text = " ".join(chance.choices(WORDS, k=chance.choice((3, 10, 40, 150, 400))))
    tokens = chance.choice((4, 16, 64, 128))
    is_stream = chance.random() < 0.75
    how = {"seed": chance.randrange(2**32), "temperature": 0.8} if chance.random() < 0.5 else {"temperature": 0}
    messages = [{"role": "user", "content": text}]
    body: dict[str, Any]
    match chance.randrange(6):
        case 0:
            path = "/v1/responses"
            body = {"input": messages, "max_output_tokens": tokens, "stream": is_stream, **how}
        case 1:
            path = "/generate_stream" if is_stream else "/generate"
            body = {"inputs": text, "parameters": {"max_new_tokens": tokens}}
        case 2:
            path = "/v1/completions"
            body = {"prompt": text, "max_tokens": tokens, "stream": is_stream, **how}
        case kind:
            path = "/v1/chat/completions"
            body = {"messages": messages, "max_tokens": tokens, "stream": is_stream, **how}
            if kind == 3:
                body["n"] = 2
            elif kind == 4:
                body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    events = chance.randrange(1, 8) if is_stream and chance.random() < CANCELLED else None
    return Asked(path, body, is_stream, events)


@dataclass
class Clients:
    """Threads that send requests until the end, and their results."""

    url: str
    end: float
    """`time.monotonic` seconds."""
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, seed: int) -> None:
        """One client."""
        chance = random.Random(seed)  # noqa: S311 - a load, not a secret
        with httpx.Client(base_url=self.url, timeout=REQUEST_SECONDS) as http:
            while time.monotonic() < self.end:
                one = asked(chance)
                try:
                    outcome = send(http, one)
                except (httpx.HTTPError, ValueError) as error:
                    outcome = f"{type(error).__name__}: {error}"
                with self._lock:
                    if outcome in {"answered", "cancelled", "refused"}:
                        self.counts[outcome] += 1
                    else:
                        self.failures.append(f"{one.path}: {outcome}")
                if outcome == "refused":
                    time.sleep(0.2)


def send(http: httpx.Client, one: Asked) -> str:
    """Send a request: answered, cancelled or refused, or what failed."""
    if not one.is_stream:
        answer = http.post(one.path, json=one.body)
        if answer.status_code in OVERLOADED:
            return "refused"
        return "answered" if answer.is_success and answer.json() else f"{answer.status_code} {answer.text[:200]}"
    with http.stream("POST", one.path, json=one.body) as answer:
        if answer.status_code in OVERLOADED:
            return "refused"
        if not answer.is_success:
            return f"{answer.status_code} {answer.read()[:200]!r}"
        seen = 0
        for line in answer.iter_lines():
            seen += line.startswith("data:")
            if '"error":{' in line or '"error_type"' in line:
                return line[:200]
            if one.events is not None and seen >= one.events:
                return "cancelled"
        return "answered" if seen else "a stream without events"


def fill_cache(url: str, seconds: float) -> int:
    """Send different long prompts until each block of the cache has been written once; returns the number of blocks.

    click.ClickException if that takes more than `seconds`.
    """
    chance = random.Random(0)  # noqa: S311 - texts, not secrets
    deadline = time.monotonic() + seconds
    reported = time.monotonic()
    with httpx.Client(base_url=url, timeout=REQUEST_SECONDS) as http:
        while True:
            cache = http.get("/info").json()["predictor"]["cache"]
            written = cache["blocks_in_use"] + cache["blocks_kept"]
            # A prompt's last block is not kept: the last few blocks are written by the requests of the first minutes.
            if written >= FILLED * cache["blocks"]:
                return int(cache["blocks"])
            if time.monotonic() > deadline:
                raise click.ClickException(f"{written} of {cache['blocks']} blocks are filled after {seconds:.0f} s")
            if time.monotonic() > reported + SAMPLE_SECONDS:
                reported = time.monotonic()
                click.echo(f"filling the cache: {written} of {cache['blocks']} blocks", err=True)
            prompt = " ".join(str(chance.randrange(10**6)) for _ in range(PROMPT_NUMBERS))
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()


def in_use(url: str) -> tuple[int, int, int]:
    """Sequences that run and wait, and blocks of the cache in use."""
    facts = httpx.get(f"{url}/info", timeout=30).json()["predictor"]
    sequences = facts["sequences"]
    return sequences["running"], sequences["waiting"], facts["cache"]["blocks_in_use"]


@click.command(cls=Program, help=__doc__)
@click.option("--minutes", default=60.0, show_default=True, type=FiniteRange(0.2, 24 * 60))
@click.option("--cores", default=2, show_default=True)
@click.option("--clients", default=8, show_default=True)
@click.option(
    "--artefact", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), help="What to serve."
)
@click.option("--output", default=Path("bench/soak-chat"), show_default=True, type=click.Path(path_type=Path))
def main(*, minutes: float, cores: int, clients: int, artefact: Path, output: Path) -> None:
    """Load the server and watch."""
    placement = place(read_host(), cores)
    server = serve(artefact, len(placement.server), cpus=placement.server, store=artefact.parent, models=store())
    samples: list[Sample] = []
    try:
        blocks = fill_cache(server.url, FILL_SECONDS)
        click.echo(f"{blocks} blocks of the cache are filled")
        begun = time.monotonic()
        load = Clients(server.url, begun + minutes * 60)
        # Daemons: an interrupted measurement ends at once.
        threads = [threading.Thread(target=load.run, args=(seed,), daemon=True) for seed in range(clients)]
        for thread in threads:
            thread.start()
        processes = [psutil.Process(pid) for pid in server.pids]
        while time.monotonic() < load.end:
            time.sleep(min(SAMPLE_SECONDS, max(0.1, load.end - time.monotonic())))
            used = sum(process.memory_info().rss for process in processes)
            samples.append(Sample(time.monotonic() - begun, used))
            if len(samples) % 12 == 0:
                click.echo(f"{samples[-1].seconds / 60:5.1f} min  {used / 1e6:.1f} MB, {dict(load.counts)}")
        for thread in threads:
            thread.join(REQUEST_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        while any(left := in_use(server.url)) and time.monotonic() < deadline:
            time.sleep(0.5)
    finally:
        server.stop()
    output.mkdir(parents=True, exist_ok=True)
    with (output / "memory.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["seconds", "rss_bytes"])
        writer.writerows([f"{sample.seconds:.1f}", sample.bytes] for sample in samples)
    verdict = judge(samples)
    for failure in load.failures[:10]:
        click.echo(failure)
    click.echo(f"{dict(load.counts)}, {len(load.failures)} failed; {verdict.sentence}")
    click.echo(f"at the end {left[0]} sequences run, {left[1]} wait, {left[2]} blocks are in use")
    raise SystemExit(0 if verdict.passed and not load.failures and not any(left) else 1)


if __name__ == "__main__":
    main()
