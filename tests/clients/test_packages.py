"""The real packages of clients make their calls, and send what is recorded.

With PENSTOCK_RECORD_CLIENTS=1 the recording is written instead of compared; then `make docs`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.recording import FOLDER, RECORDED, Sent, load, recorder, save

pytestmark = pytest.mark.extended

UV = Path(sys.executable).with_name("uv")


def comparable(sent: Sent) -> tuple[Any, ...]:
    """What must be as recorded: not the headers, and not the random id of a request."""
    body: Any = sent.body
    if sent.body.startswith(b"{") and sent.body.endswith(b"}"):
        body = {name: value for name, value in json.loads(sent.body).items() if name != "id"}
    return sent.client, sent.call, sent.method, sent.path, body


def test_every_client_is_served_and_sends_what_is_recorded(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"], check=True)
    packages = ["pip", "install", "--quiet", "--python", python, "--requirement", FOLDER / "requirements.txt"]
    subprocess.run([UV, *map(str, packages)], check=True)

    with recorder(tmp_path / "models") as made:
        sent, results = made.run(python)

    assert [one for one in results if "error" in one] == []
    vectors = [one["result"] for one in results if "embed" in one["call"].lower() and "dimensions" not in one["call"]]
    assert len(vectors) >= 8
    for found in vectors:
        np.testing.assert_allclose(np.asarray(found).reshape(-1, 16)[0], np.asarray(vectors[0])[0], atol=1e-6)
    generated = [one for one in results if one["task"] == "text-generation"]
    assert len(generated) >= 15
    assert [one for one in generated if not one["result"]] == []
    if os.environ.get("PENSTOCK_RECORD_CLIENTS") == "1":
        save(RECORDED, sent)
    assert [comparable(one) for one in sent] == [comparable(one) for one in load(RECORDED)]
