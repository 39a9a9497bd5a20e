"""`python -m penstock_runtime.store`: list or copy the artefact store, or delete artefacts that nothing refers to.

    python -m penstock_runtime.store list
    python -m penstock_runtime.store report sha256:... >report.html
    python -m penstock_runtime.store copy --to s3://bucket/prefix
    python -m penstock_runtime.store collect --keep sha256:... --older-than-seconds 86400
    python -m penstock_runtime.store collect --keep team-a/sha256:... --older-than-seconds 86400
    python -m penstock_runtime.store collect --keep-file keep.json --older-than-seconds 86400

list, copy and collect include the stores of namespaces within the store. A command that would keep nothing deletes
nothing. The store is PENSTOCK_STORE_URI, or --store. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import PenstockError, SettingError
from penstock_runtime.host.termination import exit_code
from penstock_runtime.store import ArtefactStore, Stored, open_store
from penstock_runtime.store.store import KeepList


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; exit codes as for pods."""
    parser = argparse.ArgumentParser(prog="python -m penstock_runtime.store", description=__doc__.splitlines()[0])
    parser.add_argument("--store", default=os.environ.get("PENSTOCK_STORE_URI", ""), metavar="URI")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all artefacts, and the remains of aborted publishes")
    report = commands.add_parser("report", help="write the report of an artefact to standard output")
    report.add_argument("digest", metavar="DIGEST")
    copy = commands.add_parser("copy", help="copy all complete artefacts into another store; print what was copied")
    copy.add_argument(
        "--to", required=True, metavar="URI", help="what it has is not copied again, and nothing is deleted"
    )
    collect = commands.add_parser(
        "collect", help="delete what is not kept and is older than this; print what was deleted"
    )
    collect.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="DIGESTS",
        help="comma-separated: sha256:..., or at least the first 16 digits; after NAMESPACE/ they are kept in the "
        "store of that namespace, and not in those of others; may be given often",
    )
    collect.add_argument(
        "--keep-file", type=Path, metavar="FILE", help='JSON: {"keep": ["sha256:...", or at least the first 16 digits]}'
    )
    collect.add_argument("--older-than-seconds", type=float, required=True, metavar="S")
    given = parser.parse_args(arguments)
    try:
        keep = KeepList()
        if given.command == "collect":
            keep = KeepList.parse(given.keep) | KeepList.read(given.keep_file)
            if not keep.beginnings:
                raise SettingError(
                    "--keep names no artefact, which would delete the whole store",
                    field="--keep",
                    remedy="Name an artefact to keep; to delete all, delete the folder or the bucket's prefix",
                )
        if given.command == "report":
            sys.stdout.buffer.write(open_store(StoreUri.parse(given.store)).report(Digest.parse(given.digest)))
            return 0
        target = open_store(StoreUri.parse(given.to)) if given.command == "copy" else None
        stores = list(open_store(StoreUri.parse(given.store)).stores())
    except PenstockError as error:
        return _failed(error)
    code = 0
    for namespace, store in stores:
        try:
            if given.command == "collect":
                found = store.collect(keep.in_store(namespace), older_than_seconds=given.older_than_seconds)
            else:
                found = store.entries()
        except PenstockError as error:
            # The jobs of a namespace must not be able to stop the collection of other namespaces.
            failed = _failed(error)
            code = code or failed
            continue
        for stored in found:
            if target is not None:
                failed = _copied(namespace, store, stored, target)
                code = code or failed
            else:
                print(_line(namespace, stored))
    return code


def _copied(namespace: str, store: ArtefactStore, stored: Stored, target: ArtefactStore) -> int:
    """Copy one artefact, unless it is incomplete; 0 or the exit code of its error."""
    if not stored.complete:
        return 0
    try:
        published = store.copy(stored.digest, target.of_namespace(namespace))
    except PenstockError as error:
        return _failed(error)
    if not published.found:
        print(_line(namespace, stored), flush=True)
    return 0


def _failed(error: PenstockError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return exit_code(error)


def _line(namespace: str, stored: Stored) -> str:
    return json.dumps(
        {
            **({"namespace": namespace} if namespace else {}),
            "digest": str(stored.digest),
            "bytes": stored.bytes,
            "modified": stored.modified.isoformat(timespec="seconds"),
            "complete": stored.complete,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
