"""`penstock index check`: who wrote the vectors of an index, and whether two models did."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from penstock.errors import IndexSampleUnusable
from penstock.manifest import Manifest
from penstock_cli.certify import COLUMNS, LARGEST_CLOSE, PROMPT, ROWS, TOKEN, embedder_of, progress
from penstock_cli.space import space_at
from penstock_cli.terminal import facts
from penstock_optimizer.guard.certificate import Writers, who_wrote
from penstock_optimizer.guard.index_sample import read_sample

PAIRS = 1_000
"""At most these are embedded again, evenly from the whole file."""


@click.group
def command() -> None:
    """Say who wrote the vectors of an index."""


@command.command(short_help="Compare stored vectors with those of a server or an artefact.")
@click.argument("target")
@click.option(
    "--pairs",
    type=click.Path(path_type=Path),
    required=True,
    help=f"{ROWS} At least 200.",
)
@COLUMNS[0]
@COLUMNS[1]
@PROMPT
@TOKEN
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def check(target: str, pairs: Path, document_prompt: str, auth_token: str, **options: Any) -> None:
    """Compare the stored vectors of an index with those of TARGET: the URL of a server, or the folder of an artefact.

    The exit status is 0 if TARGET wrote the index, or another precision of its model; 1 if another model did, and 2 if
    both did.
    """
    sample = read_sample(pairs, text=options["text_column"], vector=options["vector_column"], most=PAIRS)
    space = space_at(target, auth_token)
    closest, quiet = LARGEST_CLOSE, options["as_json"]
    if not target.startswith(("http://", "https://")) and (probes := Manifest.load(Path(target)).probes) is not None:
        closest = probes.largest_difference
    with embedder_of(target, auth_token) as embedder:
        made = embedder.vectors(
            sample.texts,
            prompt=document_prompt,
            on_progress=(lambda _done, _of: None) if quiet else progress("embed"),
        )
    if made.shape != sample.vectors.shape:
        raise IndexSampleUnusable(
            f"the stored vectors have {sample.vectors.shape[1]} values, and {target} gives {made.shape[1]}: another "
            "model wrote them, or they were cut",
            remedy="Ask the endpoint that wrote the index, or embed it again",
        )
    found = who_wrote(sample.vectors, made, closest)
    step = max(1, -(-sample.rows // PAIRS))
    if quiet:
        click.echo(json.dumps({"space": space.id, "pairs": len(made), **asdict(found)}, indent=2))
    else:
        facts([("space", f"{space.id}   {target}"), *rows(found, len(made), closest, step)])
    sys.exit(0 if found.own else 2 if found.two else 1)


def rows(found: Writers, pairs: int, closest: float, step: int = 1) -> list[tuple[str, str]]:
    """Name and value of each line. Every `step`th row of the file was compared."""
    result = "another model wrote this index, or another prompt"
    if found.two:
        result = (
            f"two models wrote this index: {found.other / pairs:.1%} of it are not by this one "
            f"(at least {found.other_low:.1%})"
        )
    elif found.own and found.close > found.equal:
        result = "this model wrote it, in another precision"
    elif found.own:
        result = "this model wrote it"
    if found.own and min(found.equal, found.close) > pairs * 0.01:
        result += ", in two precisions"
    lines = [
        ("pairs", f"{pairs}"),
        ("equal", f"{found.equal} to the last bits (1 - cosine up to 1e-6)"),
        ("close", f"{found.close} as another precision (1 - cosine up to {closest:.2g})"),
        ("other", f"{found.other}, of mean cosine {found.cosine:.4f}" if found.other else "0"),
    ]
    if found.other:
        worst = ", ".join(f"{row * step + 1} ({cosine:.3f})" for row, cosine in found.farthest if 1 - cosine > closest)
        lines.append(("rows", f"{worst} have the lowest cosines"))
    if not np.isclose(found.length, 1, atol=1e-3):
        lines.append(("length", f"stored vectors have a median length of {found.length:.4g}, so that only cosines fit"))
    return [*lines, ("result", result)]
