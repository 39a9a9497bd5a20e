"""`penstock certify`: whether queries of one model may search the index of another one."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from penstock.errors import IndexSampleUnusable
from penstock.manifest import Manifest
from penstock.prices.pod_costs import per_million
from penstock.resources.endpoint_parts.vector_space import IndexCertificate, IndexCriteria, IndexVerdict, Recalls
from penstock_cli.space import space_at
from penstock_cli.terminal import PLAIN_SECONDS, FiniteRange, console, fact, facts, refuse_options
from penstock_optimizer.capacity.curve import serve_replica
from penstock_optimizer.guard.certificate import (
    PAIRS_PER_DIMENSION,
    IndexVectors,
    certify,
    fit_adapter,
    who_wrote,
    with_adapter,
)
from penstock_optimizer.guard.index_sample import (
    AGAIN,
    MOST_CHARACTERS,
    Embedder,
    IndexSample,
    index_vectors,
    read_sample,
)
from penstock_runtime.host import read_host

STATUS = {
    IndexVerdict.SAME: 0,
    IndexVerdict.COMPATIBLE: 0,
    IndexVerdict.ADAPTER: 3,
    IndexVerdict.RE_EMBED: 4,
    IndexVerdict.NOT_CERTIFIED: 5,
}
"""Exit status."""
WORDS = {
    IndexVerdict.SAME: "same: both models give the same vectors",
    IndexVerdict.COMPATIBLE: "compatible: queries may search the index, and new documents may be added to it",
    IndexVerdict.ADAPTER: "adapter: queries may search the index through it; new documents may not be added",
    IndexVerdict.RE_EMBED: "re-embed: queries of the new model do not fit the index",
    IndexVerdict.NOT_CERTIFIED: "not certified: the queries are too few to tell; more of them may prove it",
}
START_SECONDS = 300.0
MOST_QUERIES = 20_000
CHECKED = 200
"""Documents with which OLD is compared with the index."""
FIELDS = IndexCriteria.model_fields
ROWS = "Rows of a text and its stored vector: Parquet (with the extra `index`) or JSON lines."
TOKEN = click.option(
    "--auth-token",
    envvar="PENSTOCK_AUTH_TOKEN",
    default="",
    help="The token that the servers want. Better in the variable: every user of this machine can read arguments.",
)
COLUMNS = (
    click.option("--text-column", default="", help="Column of the texts. Default: text, content, document or chunk."),
    click.option(
        "--vector-column", default="", help="Column of the vectors. Default: vector, embedding or embeddings."
    ),
)
PROMPT = click.option("--document-prompt", default="", help="Name of the prompt with which the index was written.")


@contextmanager
def embedder_of(target: str, token: str) -> Iterator[Embedder]:
    """A server at a URL, or one that serves the folder of an artefact within the context."""
    if target.startswith(("http://", "https://")):
        yield Embedder(target.rstrip("/"), token)
        return
    folder, host = Path(target), read_host()
    grant = host.usable_cores(min(Manifest.load(folder).cores, host.usable_cores(None).cores))
    with (
        tempfile.TemporaryDirectory() as scratch,
        serve_replica(
            folder,
            cores=grant.cores,
            cpus=grant.cpus if grant.keep else (),
            log=Path(scratch, "server.log"),
            start_seconds=START_SECONDS,
        ) as server,
    ):
        yield Embedder(server.url)


def progress(name: str) -> Callable[[int, int], None]:
    """Prints how many texts have vectors, now and then."""
    printed = time.monotonic()

    def moved(done: int, of: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > (2.0 if console.is_terminal else PLAIN_SECONDS):
            printed = time.monotonic()
            fact(name, f"{done} of {of} texts have vectors")

    return moved


@click.command
@click.argument("old")
@click.argument("new")
@click.option(
    "--index",
    type=click.Path(path_type=Path),
    required=True,
    help=ROWS,
)
@click.option(
    "--queries",
    type=click.Path(path_type=Path),
    help="Typical queries, one on each line. Default: documents of the sample, which are longer than queries.",
)
@click.option(
    "--k", type=click.IntRange(1, 100), default=FIELDS["k"].default, show_default=True, help=FIELDS["k"].description
)
@click.option(
    "--tolerance",
    type=FiniteRange(0, 0.5),
    default=FIELDS["tolerance"].default,
    show_default=True,
    help=FIELDS["tolerance"].description,
)
@click.option(
    "--min-recall",
    type=FiniteRange(0.5, 0.9999),
    default=FIELDS["min_recall"].default,
    show_default=True,
    help=FIELDS["min_recall"].description,
)
@COLUMNS[0]
@COLUMNS[1]
@click.option("--query-prompt", default="", help="Name of the prompt of queries.")
@PROMPT
@click.option(
    "--adapter",
    type=click.Path(dir_okay=False, path_type=Path),
    help="If the models are not compatible, try a linear map of queries into the old space, and write it to this .npz.",
)
@click.option(
    "--documents", type=click.IntRange(1), help="Documents of the whole index, for the cost of embedding them."
)
@click.option("--price-per-hour", type=FiniteRange(0), help="Of one replica of NEW, for the same.")
@TOKEN
@click.option("--json", "as_json", is_flag=True, help="Print the certificate as JSON.")
def command(old: str, new: str, index: Path, queries: Path | None, auth_token: str, **options: Any) -> None:
    """Certify that queries of NEW may search an index that OLD wrote. Each is the URL of a server, or the folder of an
    artefact.

    No labels are needed: the results of OLD are the reference. A result of NEW is a loss only if OLD scored it clearly
    lower than its own last result. The exit status is 0 for `same` and `compatible`, 3 for `adapter`, 4 for `re-embed`,
    and 5 if it could not be certified.
    """
    if options["as_json"]:
        refuse_options(["documents", "price_per_hour"], "the lines that are printed without --json")
    criteria = IndexCriteria(k=options["k"], tolerance=options["tolerance"], min_recall=options["min_recall"])
    sample = read_sample(index, text=options["text_column"], vector=options["vector_column"])
    asked = () if queries is None else _queries(queries)
    pairs = max(AGAIN, PAIRS_PER_DIMENSION * sample.vectors.shape[1]) if options["adapter"] else AGAIN
    quiet = options["as_json"]
    spaces = space_at(old, auth_token), space_at(new, auth_token)
    with ExitStack() as stack:
        writer = stack.enter_context(embedder_of(old, auth_token))
        _check_writer(sample, writer, options["document_prompt"], old)
        embedder = writer if new == old else stack.enter_context(embedder_of(new, auth_token))
        prompts = options["query_prompt"], options["document_prompt"]
        report = (lambda _done, _of: None) if quiet else progress("embed")
        begun = time.monotonic()
        given = index_vectors(
            sample, criteria, embedder, writer, queries=asked, prompts=prompts, pairs=pairs, on_progress=report
        )
        rate = (len(given.new) + len(given.again)) / max(time.monotonic() - begun, 1e-9)
    same = spaces[0].id == spaces[1].id
    certificate = certify(replace(given, same_space=same), criteria)
    note: list[tuple[str, str]] = []
    if options["adapter"] is not None and not certificate.verdict.fits:
        certificate, note = _adapted(given, criteria, certificate, options["adapter"])
    if quiet:
        click.echo(certificate.model_dump_json(by_alias=True, indent=2, exclude_none=True))
    else:
        facts([("old", f"{spaces[0].id}   {old}"), ("new", f"{spaces[1].id}   {new}"), *rows(certificate), *note])
        if certificate.verdict is IndexVerdict.RE_EMBED:
            _print_cost(rate, options["documents"] or sample.rows, options["price_per_hour"])
    sys.exit(STATUS[certificate.verdict])


def rows(certificate: IndexCertificate) -> list[tuple[str, str]]:
    """Name and value of each line about a certificate."""
    kind = "documents of the sample" if certificate.of_documents else "queries"
    found = [("sample", f"{certificate.documents} stored vectors, {certificate.queries} {kind}")]
    for name, each in (("index", certificate.alone), ("mixed", certificate.mixed), ("adapted", certificate.adapted)):
        if each is not None:
            found.append((name, _recalls(each, certificate.criteria)))
    if certificate.mean_cosine is not None:
        found.append(("cosine", f"mean {certificate.mean_cosine:.5f}, lowest {certificate.lowest_cosine:.5f}"))
    if certificate.widths is not None:
        found.append(("widths", certificate.summary))
    if certificate.hardest:
        found.append(("hardest", f"queries number {', '.join(str(one + 1) for one in certificate.hardest[:10])}"))
    return [*found, ("result", WORDS[certificate.verdict])]


def _recalls(found: Recalls, criteria: IndexCriteria) -> str:
    return (
        f"{found.recall:.4f} of {criteria.k} results no loss beyond {criteria.tolerance:g} (at least "
        f"{found.recall_low:.4f}), plain recall {found.plain:.4f} (at least {found.plain_low:.4f}), first "
        f"result {found.first:.4f}"
    )


def _queries(path: Path) -> tuple[str, ...]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_QUERIES * 2048)
    except (OSError, UnicodeDecodeError) as error:
        raise IndexSampleUnusable(
            f"the queries {path} cannot be read ({error})", remedy="Give one on each line"
        ) from error
    found = tuple(line.strip()[:MOST_CHARACTERS] for line in text.splitlines() if line.strip())
    if not found:
        raise IndexSampleUnusable(f"{path} has no query", remedy="Give one on each line")
    return found[:MOST_QUERIES]


def _check_writer(sample: IndexSample, writer: Embedder, prompt: str, old: str) -> None:
    """IndexSampleUnusable unless OLD has written the index: its answers would be no reference."""
    chosen = np.random.default_rng(1).permutation(len(sample.texts))[:CHECKED]
    made = writer.vectors([sample.texts[row] for row in chosen], prompt=prompt)
    stored = sample.vectors[chosen]
    if made.shape == stored.shape:
        wrote = who_wrote(stored, made, LARGEST_CLOSE)
        if wrote.own and wrote.other_low < LARGEST_STRANGE:
            return
        share = f"of {len(chosen)} stored vectors {wrote.other} are not its own (mean cosine {wrote.cosine:.3f})"
    else:
        share = f"the stored vectors have {stored.shape[1]} values, and it gives {made.shape[1]}"
    raise IndexSampleUnusable(
        f"{old} has not written this index: {share}",
        remedy="Give its writer as OLD (penstock index check), with the prompt of documents (--document-prompt)",
    )


LARGEST_CLOSE = 5e-3
"""Of 1 - cosine between precisions of one model: int8 of MiniLM has up to 4.2e-3."""
LARGEST_STRANGE = 0.05
"""Share of an index that others may have written."""


def _adapted(
    given: IndexVectors, criteria: IndexCriteria, certificate: IndexCertificate, path: Path
) -> tuple[IndexCertificate, list[tuple[str, str]]]:
    adapter = fit_adapter(given.again, given.documents[: len(given.again)])
    if adapter is None:
        least = PAIRS_PER_DIMENSION * max(given.again.shape[1], given.documents.shape[1])
        why = f"needs {least} documents with vectors of both" if len(given.again) < least else "is no better than none"
        return certificate, [("adapter", f"none: it {why} ({len(given.again)} here)")]
    judged = with_adapter(given, adapter, criteria, certificate)
    if judged.verdict is not IndexVerdict.ADAPTER:
        return certificate, [("adapter", "none: with it, queries still lose too much")]
    np.savez(path, weights=adapter.weights, offset=adapter.offset)
    return judged, [("adapter", f"written to {path}: query @ weights + offset, then to length 1")]


def _print_cost(rate: float, documents: int, price: float | None) -> None:
    hours = documents / rate / 3600
    cost = "" if price is None else f", {per_million(price, rate) * documents / 1e6:,.2f} at this price"
    fact("cost", f"{documents:,} documents take {hours:.1f} hours of one replica at {rate:.0f} texts/s{cost}")
