"""The operator's log: levels of its own lines and of libraries' lines, and the format that the setting names."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, sys
from penstock.logs import OBJECT, log_event
from penstock_operator.logs import configure

configure("info", sys.argv[1])
own, library = logging.getLogger("penstock_operator.x"), logging.getLogger("library")
own.debug("too detailed")
library.info("too detailed")
library.warning("unusual")
OBJECT.set("ns/name")
own.info("plain", extra=log_event("ReplicasChanged", reason="Load"))
"""


def written(form: str) -> list[str]:
    """The lines of a separate process: `configure` replaces all handlers of the root logger."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_json_lines_have_the_fields() -> None:
    other, own = (json.loads(line) for line in written("json"))

    assert (other["level"], other["logger"], other["message"]) == ("warning", "library", "unusual")
    assert (own["message"], own["event"], own["object"]) == ("plain", "ReplicasChanged", "ns/name")
    assert own["reason"] == "Load"
    assert "endpoint" not in own


def test_text_lines_have_the_fields() -> None:
    other, own = written("text")

    assert other.endswith(" warning unusual")
    assert own.endswith(" info    plain event=ReplicasChanged object=ns/name reason=Load")
