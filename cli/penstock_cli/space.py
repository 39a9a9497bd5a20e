"""`penstock space`: the vector space of a server or an artefact, and what differs from another one."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from penstock.errors import PenstockError
from penstock.manifest import Manifest
from penstock.vector_space import VectorSpace
from penstock_cli.terminal import facts

SECONDS = 10.0
LARGEST_ANSWER = 2**20
SHOWN_PROMPTS = 60
"""Characters of a prompt."""


def space_at(target: str, token: str = "") -> VectorSpace:
    """The space of a server at a URL, or of an artefact's folder. PenstockError if there is none, or not reachable."""
    if target.startswith(("http://", "https://")):
        return _of_server(target.rstrip("/"), token)
    manifest = Manifest.load(Path(target))
    if manifest.vector_space is None:
        raise PenstockError(
            f"{target} states no vector space: its task is {manifest.task.value}, or an older version made it",
            remedy="For embeddings, run penstock optimize again with this version",
        )
    return manifest.vector_space


def _of_server(url: str, token: str) -> VectorSpace:
    asked = urllib.request.Request(f"{url}/info", headers={"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            info: Any = json.loads(answer.read(LARGEST_ANSWER))
    except urllib.error.HTTPError as error:
        error.close()
        unauthorised = error.code == http.client.UNAUTHORIZED
        raise PenstockError(
            f"{url}/info is answered with status {error.code}",
            remedy="Give the endpoint's token in PENSTOCK_AUTH_TOKEN" if unauthorised else "Check the address",
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise PenstockError(
            f"{url}/info is not answered by a Penstock server: {reason}", remedy="Check host and port, and that it runs"
        ) from error
    stated = info.get("vector_space") if isinstance(info, dict) else None
    if not isinstance(stated, dict):
        raise PenstockError(
            f"{url} states no vector space: it serves another task, or its artefact is of an older version",
            remedy="For embeddings, optimise the model again with this version of Penstock",
        )
    try:
        return VectorSpace.model_validate(stated.get("fields"))
    except ValidationError as error:
        raise PenstockError(
            f"{url} states a vector space that this version does not read ({error.error_count()} errors)",
            remedy="Use the version of penstock that serves there",
        ) from error


def rows(space: VectorSpace) -> list[tuple[str, str]]:
    """Name and value of each part, for people."""
    prompts = [f"{name}: {text[:SHOWN_PROMPTS]!r}" for name, text in sorted(space.prompts.items())]
    length = "as they come" if not space.normalised else "scaled to length 1"
    return [
        ("space", space.id),
        ("vectors", f"{space.kind}, {space.dimensions or 'by the vocabulary'} values, {length}"),
        ("pooling", space.pooling or "none"),
        ("limit", f"{space.max_tokens} tokens, cut on the {space.truncate_side}"),
        ("prompts", "\n".join(prompts) or "none"),
        ("default", repr(space.default_prompt[:SHOWN_PROMPTS]) if space.default_prompt else "no prompt"),
        ("weights", space.weights[:16]),
        ("tokenizer", space.tokenizer[:16]),
        ("modules", space.modules[:16]),
    ]


@click.command
@click.argument("target")
@click.option("--against", default="", help="Another server or artefact. Exit status 1 if the spaces differ.")
@click.option(
    "--auth-token",
    envvar="PENSTOCK_AUTH_TOKEN",
    default="",
    help="The token that the servers want. Better in the variable: every user of this machine can read arguments.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(target: str, against: str, auth_token: str, *, as_json: bool) -> None:
    """Show the vector space of TARGET: the URL of a server, or the folder of an artefact.

    Vectors belong into one index, and queries fit an index, if their space is the same: weights, tokenizer, pooling,
    normalisation, prompts, limit and dimensions. Precision is not part of it: an int8 plan has the space of its model.
    """
    space = space_at(target, auth_token)
    other = space_at(against, auth_token) if against else None
    differ = () if other is None else space.differences(other)
    if as_json:
        found: dict[str, Any] = {"id": space.id, "fields": space.model_dump(mode="json")}
        if other is not None:
            found["against"] = {"id": other.id, "fields": other.model_dump(mode="json")}
            found["differences"] = list(differ)
        click.echo(json.dumps(found, indent=2))
    elif other is None:
        facts(rows(space))
    else:
        same = "the same space" if not differ else f"other spaces: {', '.join(differ)} differ"
        facts([("space", f"{space.id}   {target}"), ("against", f"{other.id}   {against}"), ("result", same)])
        if differ:
            changed = zip(rows(space), rows(other), strict=True)
            facts([(name, f"{own}\n{theirs}") for (name, own), (_, theirs) in changed if own != theirs][1:])
    if differ:
        sys.exit(1)
