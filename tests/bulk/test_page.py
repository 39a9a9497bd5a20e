"""The commands of docs/how-to/embed-a-corpus.md: a corpus in Parquet, searched with the served endpoint, verified."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cli.endpoints import clean_environment
from tests.runtime.models.s3_server import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/embed-a-corpus.md"
PROGRAMS = {
    ".venv/bin/penstock": [sys.executable, "-m", "penstock_cli.main"],
    ".venv/bin/python": [sys.executable],
}
SECONDS = 500.0


def commands(corpus: Path) -> list[list[str]]:
    """Those of the first section, on a part of docs."""
    lines = re.findall(r"^\.venv/bin/\S+ .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    names = {"docs": "docs/tutorial", "corpus": str(corpus)}
    found = []
    for program, *words in map(shlex.split, lines):
        found.append([*PROGRAMS[program], *(names.get(word, word) for word in words)])
    return found


def test_a_corpus_is_embedded_searched_and_verified(tmp_path: Path) -> None:
    port = free_port()
    variables = {"PENSTOCK_STORE": str(tmp_path / "store"), "PENSTOCK_MODELS": str(tmp_path / "models")}
    environment = clean_environment(**variables, PENSTOCK_PORT=str(port))
    embed, serve, search, verify = commands(tmp_path / "corpus")

    def run(words: list[str]) -> str:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "state      complete" in run(embed)
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(serve, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as server:
        try:
            wait(server, url)
            shown = run([*search, url])
        finally:
            server.terminate()
    space = re.match(r"space (vs1-[0-9a-f]{16}), [\d,]+ rows\n", shown)
    assert space is not None, shown
    assert len(shown.splitlines()) == 6
    assert re.search(r"[1-9]\d+ were computed again: equal bits", run(verify)) is not None


def wait(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=SECONDS):
                return
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
