"""`python -m penstock_runtime.store`: look into the artefact store, and delete what nobody refers to any more.

    python -m penstock_runtime.store list
    python -m penstock_runtime.store collect --keep sha256:... --older-than-seconds 86400
    python -m penstock_runtime.store collect --keep-file keep.json --older-than-seconds 86400

The store is PENSTOCK_STORE_URI, or --store. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import PenstockError
from penstock_runtime.pod.termination import exit_code
from penstock_runtime.store import Stored, open_store
from penstock_runtime.store.keep_list import Kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; exit codes as those of the pods."""
    parser = argparse.ArgumentParser(prog="python -m penstock_runtime.store", description=__doc__.splitlines()[0])
    parser.add_argument("--store", default=os.environ.get("PENSTOCK_STORE_URI", ""), metavar="URI")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all artefacts, and what is left of publishers that gave up")
    collect = commands.add_parser("collect", help="delete what is not kept and older than this; say what it was")
    collect.add_argument("--keep", action="append", default=[], metavar="DIGEST", help="may be given often")
    collect.add_argument(
        "--keep-file", type=Path, metavar="FILE", help='JSON: {"keep": ["sha256:...", or at least the first 16 digits]}'
    )
    collect.add_argument("--older-than-seconds", type=float, required=True, metavar="S")
    given = parser.parse_args(arguments)
    try:
        store = open_store(StoreUri.parse(given.store))
        if given.command == "list":
            found = store.entries()
        else:
            keep = Kept.of([str(Digest.parse(text)) for text in given.keep]) | Kept.read(given.keep_file)
            found = store.collect(keep, older_than_seconds=given.older_than_seconds)
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    for stored in found:
        print(_line(stored))
    return 0


def _line(stored: Stored) -> str:
    return json.dumps(
        {
            "digest": str(stored.digest),
            "bytes": stored.bytes,
            "modified": stored.modified.isoformat(timespec="seconds"),
            "complete": stored.complete,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
