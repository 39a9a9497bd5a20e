"""MiniLM, or a family's base model, on Penstock and on other servers, measured alternately on the same cores.

    python -m benchmarks.peers.setup          # once: LitServe, MLServer, infinity-emb, sentence-transformers from PyPI
    python -m benchmarks.peers                # all that is set up
    python -m benchmarks.peers --server 'tei=text-embeddings-router --model-id {model} --port {port}'
    python -m benchmarks.peers --family modernbert --group single   # plain transformers, and servers that are given

All servers are up at once and get the same model folder, CPUs and truncation; all but the measured one are stopped
(SIGSTOP). With --family the weights are random: only the speed means something. Each cell ends with the last answer, so
that none begins with the leftovers of another. Answers are checked against plain transformers in fp32 first, alone and
16 at a time. Writes results.json, results.csv and results.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
from tokenizers import Tokenizer

from benchmarks.models import family_model, minilm, minilm_with_graph
from benchmarks.ours import serving
from benchmarks.peers.answers import Agreement, agreement, ask
from benchmarks.peers.cells import GROUPS, Cell, aims
from benchmarks.peers.outcome import Outcome, Standing, write
from benchmarks.peers.servers import EMBED, PYPI_PEERS, TRANSFORMERS, Peer, Place, peer_of_command
from benchmarks.program import Program
from penstock.recipe import EngineName
from penstock.tasks import TaskName
from penstock_bench.cell import CellSpec, Client, MeasurementFailed, Turn, measure_in_turn
from penstock_bench.grid import Placement, place
from penstock_bench.random_models.families import CONFIGURATIONS
from penstock_bench.results import OURS, Figures
from penstock_bench.server import READY_PATH, MeasuredServer, free_port
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.workload import LengthMix, TextMaker
from penstock_runtime.host import read_host

READY_SECONDS = 240.0
CHECKED_TEXTS = 100
CHECKED_TEXTS_OF_A_FAMILY = 16
"""Base models take long."""


@contextmanager
def started(peers: Sequence[Peer], placement: Placement, model: Path) -> Iterator[dict[str, MeasuredServer]]:
    """All servers, ready, and then ended. One that does not start is left out, with a line that has the reason."""
    with ExitStack() as stack:
        servers: dict[str, MeasuredServer] = {}
        for peer in peers:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            where = Place(model=model, port=free_port(), cpus=placement.server, scratch=scratch)
            server = MeasuredServer.start(
                peer.name, peer.command(where), port=where.port, cpus=where.cpus, environment=peer.environment(where)
            )
            stack.callback(server.stop)
            try:
                server.wait_until_ready(peer.ready_path, seconds=READY_SECONDS)
            except MeasurementFailed as error:
                click.echo(f"left out: {error}", err=True)
                server.stop()
                continue
            # Stopped while another one is measured: some of them burn a core while they wait.
            server.pause()
            servers[peer.name] = server
            click.echo(f"ready     {peer.name}")
        yield servers


def check(servers: dict[str, MeasuredServer], peers: dict[str, Peer], texts: Sequence[str]) -> dict[str, Agreement]:
    """Each server's answers compared with the reference's."""
    reference_server = servers[TRANSFORMERS.name]
    reference_server.resume()
    reference = ask(reference_server.url, TRANSFORMERS.shape, texts, at_once=1)
    reference_server.pause()
    found: dict[str, Agreement] = {}
    for name, server in servers.items():
        server.resume()
        found[name] = agreement(server.url, peers[name].shape, texts, reference)
        server.pause()
        one = found[name]
        detail = one.error
        if one.alone is not None and one.together is not None:
            detail = f"lowest cosine to fp32 {one.alone.minimum:.4f} alone, {one.together.minimum:.4f} in batches"
        click.echo(f"answers   {name}: {detail}{'' if one.right else ' (wrong)'}")
    return found


def bodies(peer: Peer, texts: Sequence[str], lengths: Sequence[int]) -> tuple[RequestBody, ...]:
    """The same texts for everybody, in each one's own shape."""
    return tuple(
        RequestBody(body=json.dumps(peer.shape.body(text), ensure_ascii=False), group=tokens)
        for text, tokens in zip(texts, lengths, strict=True)
    )


def measure_cell(
    cell: Cell,
    servers: dict[str, MeasuredServer],
    peers: dict[str, Peer],
    client: Client,
    *,
    tokenizer: Tokenizer,
    seconds: float,
    rounds: int,
) -> dict[str, Figures]:
    """All servers in one cell."""
    maker = TextMaker(tokenizer, seed=cell.tokens)
    lengths = cell.lengths(seed=7)
    texts = [maker.text(tokens) for tokens in lengths]
    turns = [
        Turn(
            server,
            CellSpec(
                url=server.url + peers[name].shape.path,
                bodies=bodies(peers[name], texts, lengths),
                clients=cell.clients,
                seconds=seconds,
                # A round of every client is let pass: the first batches after a pause are odd ones.
                warm_up_seconds=min(0.5, seconds / 4),
                warm_up_requests=cell.clients,
                minimum_requests=max(3, 2 * cell.clients),
                maximum_seconds=seconds * 6,
                timeout_seconds=60,
            ),
        )
        for name, server in servers.items()
    ]
    cells = measure_in_turn(turns, client.measure, rounds=rounds, patience_seconds=seconds * rounds * len(turns) * 3)
    return {name: Figures.of(found) for name, found in cells.items()}


@click.command(cls=Program, help=__doc__)
@click.option("--cores", default=2, show_default=True, help="Physical cores of every server.")
@click.option(
    "--server",
    "commands",
    multiple=True,
    help="NAME=COMMAND of a further server that speaks /embed; {model}, {port} and {cpus} are filled in.",
)
@click.option(
    "--url",
    "urls",
    multiple=True,
    help="NAME=URL of a running server that speaks /embed. It cannot be stopped meanwhile.",
)
@click.option("--only", multiple=True, help="Only these servers (the baseline is always there: it is the reference).")
@click.option("--group", "groups", multiple=True, type=click.Choice(list(GROUPS)), help="Only these cells.")
@click.option("--length", "lengths", multiple=True, type=int, help="Only cells of texts with this number of tokens.")
@click.option(
    "--family", type=click.Choice(list(CONFIGURATIONS)), help="A base model of this family instead of MiniLM."
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice([engine.value for engine in EngineName]),
    help="Penstock chooses among the plans of these engines only.",
)
@click.option("--seconds", default=2.0, show_default=True, help="Of each server in each round of a cell.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--output", default=Path("bench/peers"), show_default=True, type=click.Path(path_type=Path))
def main(
    *,
    cores: int,
    commands: Sequence[str],
    urls: Sequence[str],
    only: Sequence[str],
    groups: Sequence[str],
    lengths: Sequence[int],
    family: str | None,
    engines: Sequence[str],
    seconds: float,
    rounds: int,
    output: Path,
) -> None:
    """Measure."""
    host = read_host()
    placement = place(host, cores)
    asked = [*([] if family else PYPI_PEERS), *map(peer_of_command, commands)]
    chosen = [peer for peer in asked if not only or peer.name in only]
    for peer in chosen:
        if peer.missing:
            click.echo(f"left out: {peer.missing}", err=True)
    peers = {peer.name: peer for peer in (TRANSFORMERS, *(peer for peer in chosen if not peer.missing))}
    model = family_model(family) if family else minilm_with_graph(host.cpu.isa)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with ExitStack() as stack:
        ours = None
        if not only or OURS in only:
            name, folder = (f"family-{family}", model) if family else ("minilm-512", minilm())
            task = TaskName.FEATURE_EXTRACTION
            ours, _ = stack.enter_context(serving(name, folder, task, placement, engines))
            ours.pause()
        servers = stack.enter_context(started(list(peers.values()), placement, model))
        if ours is not None:
            servers = {OURS: ours, **servers}
            peers[OURS] = Peer(OURS, "the plan that penstock optimize chose", EMBED, READY_PATH, lambda _: [])
        for text in urls:
            name, _, url = text.partition("=")
            servers[name] = MeasuredServer(name, url)
            peers[name] = Peer(name, url, EMBED, "/health", lambda _: [])
        maker, checked = TextMaker(tokenizer, seed=99), CHECKED_TEXTS_OF_A_FAMILY if family else CHECKED_TEXTS
        texts = [maker.text(tokens) for tokens in LengthMix(maximum=512).sample(checked, seed=3)]
        agreements = check(servers, peers, texts)
        client = stack.enter_context(Client(placement.client))
        standings: list[Standing] = []
        found = []
        cells = [cell for group in groups or GROUPS for cell in GROUPS[group]]
        for cell in [cell for cell in cells if not lengths or cell.tokens in lengths]:
            figures = measure_cell(cell, servers, peers, client, tokenizer=tokenizer, seconds=seconds, rounds=rounds)
            same = [peer.name for peer in chosen if peer.shape is EMBED and not peer.needs]
            found += aims(cell, figures, ours=OURS, same_graph=same, cores=cores)
            standings += [Standing(cell=cell, server=name, figures=one) for name, one in figures.items()]
            line = ", ".join(f"{name} {one.per_second:.1f}" for name, one in figures.items())
            click.echo(f"measured  {cell.name}: {line} requests/s")
    write(
        Outcome(
            cpu=host.cpu.summary,
            cores=cores,
            seconds=seconds,
            rounds=rounds,
            servers={name: peers[name].about for name in servers},
            agreements=agreements,
            standings=standings,
            aims=found,
            note=placement.note,
        ),
        output,
    )
    click.echo(f"written   {output}/results.md")


if __name__ == "__main__":
    main()
