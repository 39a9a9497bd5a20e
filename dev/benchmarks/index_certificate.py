"""Certificates of models for the index of another one, with Debian's package descriptions as documents and queries.

    cd dev && ../.venv/bin/python -m benchmarks.index_certificate WRITER ARTEFACT ...

Each is the folder of an artefact. The corpus is what `apt-cache dumpavail` prints, in an order of its own: 12,000
descriptions in the index, 2,000 others as queries. ARTEFACT may be WRITER itself.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np

from benchmarks.program import Program
from penstock.manifest import Manifest
from penstock.resources.endpoint_parts.vector_space import IndexCriteria, Recalls
from penstock_cli.certify import LARGEST_CLOSE, embedder_of
from penstock_optimizer.guard.certificate import certify, fit_adapter, who_wrote, with_adapter
from penstock_optimizer.guard.index_sample import IndexSample, index_vectors

DOCUMENTS, QUERIES, PAIRS = 12_000, 2_000, 3_000
LEAST_CHARACTERS = 12


def corpus() -> list[str]:
    """Descriptions of packages, each once."""
    words = "Description: "
    printed = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    found = (line.removeprefix(words).strip() for line in printed.splitlines() if line.startswith(words))
    texts = list(dict.fromkeys(text for text in found if len(text) >= LEAST_CHARACTERS))
    order = np.random.default_rng(44).permutation(len(texts))
    if len(texts) < DOCUMENTS + QUERIES:
        raise click.ClickException("there are too few packages: run apt-get update")
    return [texts[number] for number in order[: DOCUMENTS + QUERIES]]


def closest(artefact: str) -> float:
    """1 - cosine that the artefact's replicas may have."""
    probes = Manifest.load(Path(artefact)).probes
    return LARGEST_CLOSE if probes is None else probes.largest_difference


def shown(found: Recalls | None) -> str:
    """The means of a certificate, with their lower bounds."""
    if found is None:
        return "-"
    return (
        f"{found.recall:.4f} ({found.recall_low:.4f}) | {found.plain:.4f} ({found.plain_low:.4f}) | {found.first:.3f}"
    )


@click.command(cls=Program)
@click.argument("writer")
@click.argument("artefacts", nargs=-1, required=True)
def main(writer: str, artefacts: tuple[str, ...]) -> None:
    """Print a line for each artefact."""
    texts, criteria = corpus(), IndexCriteria()
    documents, queries = texts[:DOCUMENTS], texts[DOCUMENTS:]
    print("artefact | cosine | alone | mixed | verdict | adapted | equal/close/other | seconds")
    with ExitStack() as stack:
        old = stack.enter_context(embedder_of(writer, ""))
        stored = old.vectors(documents)
        sample = IndexSample(tuple(documents), stored, len(documents), "")
        for artefact in artefacts:
            with embedder_of(artefact, "") as new:
                given = index_vectors(sample, criteria, new, old, queries=queries, pairs=PAIRS)
            begun = time.monotonic()
            found = certify(given, criteria)
            seconds = time.monotonic() - begun
            adapter = fit_adapter(given.again, given.documents[:PAIRS])
            adapted = found if adapter is None else with_adapter(given, adapter, criteria, found)
            wrote = who_wrote(given.documents[:PAIRS], given.again, closest(artefact))
            print(
                f"{artefact} | {found.mean_cosine or 0:.5f} | {shown(found.alone)} | {shown(found.mixed)} | "
                f"{found.verdict.value} | {shown(adapted.adapted)} | {wrote.equal}/{wrote.close}/{wrote.other} | "
                f"{seconds:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
