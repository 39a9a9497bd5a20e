"""`penstock embed` and `penstock bulk` as users run them: output, exit statuses, signals, what they refuse."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.endpoints import ROOT, SECONDS, clean_environment, invoke
from tests.cli.test_missing_package import assert_names, run_without

pytestmark = pytest.mark.slow


@pytest.fixture
def words(tiny: Path, tmp_path: Path) -> list[str]:
    """Of a command that embeds in.jsonl to out."""
    folders = ["--store", str(tmp_path / "store"), "--models", str(tmp_path / "models")]
    return ["embed", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--model", f"file://{tiny}", "--plan", "fp32",
            *folders]  # fmt: skip


def write(tmp_path: Path, rows: list[Any]) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_corpus_is_embedded_verified_and_completed(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, [{"id": number, "text": f"row {number}"} for number in range(50)] + [{"id": 50, "text": None}])
    output = str(tmp_path / "out")

    planned = json.loads(invoke(*words, "--dry-run", "--price-per-hour", "3600", "--json").stdout)
    assert (planned["rows"], planned["sampled"], planned["shards"]) == (51, 51, 1)
    assert planned["cost"] == pytest.approx(planned["seconds"])
    assert not Path(output).exists()

    done = invoke(*words)
    assert done.exit_code == 3, done.output
    assert "rows       50 of 51" in done.stdout
    assert "dead       1 rows have no result" in done.stdout
    status = json.loads(invoke("bulk", "status", output, "--json").stdout)
    assert (status["rows"], status["dead"], status["complete"], status["shards"]) == (50, 1, True, 1)
    verified = invoke("bulk", "verify", output, "--sample", "10")
    assert verified.exit_code == 0, verified.output
    assert "10 were computed again: equal bits" in verified.stdout

    write(tmp_path, [{"id": number, "text": f"row {number}"} for number in range(51)])
    changed = invoke(*words)
    assert changed.exit_code == 1
    assert "error: " in changed.stderr
    assert "in.jsonl is " in changed.stderr
    again = invoke("bulk", "retry", output)
    assert again.exit_code == 0, again.output
    assert "1 rows have a result now" in again.stdout

    part = next(Path(output).glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    damaged = invoke("bulk", "verify", output, "--json")
    assert damaged.exit_code == 1
    assert "its bytes have changed" in json.loads(damaged.stdout)["different"][0]


def test_other_options_are_refused_with_both_values(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, [{"text": "a"}])
    assert invoke(*words).exit_code == 0

    refused = invoke(*words, "--dtype", "float16")

    assert refused.exit_code == 1
    assert "dtype is float32 there, and float16 now" in refused.stderr


def test_an_interrupted_command_goes_on(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, [{"text": f"row {number} " * 20} for number in range(5000)])
    command = [sys.executable, "-m", "penstock_cli.main", *words, "--shard-rows", "20"]
    with subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + SECONDS
        while not any((tmp_path / "out").glob("part-*")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=SECONDS)

    assert process.returncode == 130
    assert "ended      interrupted: the same command goes on from there" in shown
    assert not (tmp_path / "out/_SUCCESS").exists()
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    assert 0 < len(there) < 250
    done = invoke(*words, "--shard-rows", "20")
    assert done.exit_code == 0, done.output
    assert {path: path.stat().st_mtime_ns for path in there} == there


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--keep", "nothing"], "has no column nothing"),
        (["--text-column", "body"], "has no column body"),
        (["--id-column", "id", "--keep", "text"], "the column of ids, id, is not kept"),
        (["--prompt-name", "query"], "this model cannot embed a corpus"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    more: list[str], message: str, words: list[str], tmp_path: Path
) -> None:
    write(tmp_path, [{"text": "a", "id": 1}])

    refused = invoke(*words, *more)

    assert refused.exit_code == 1
    assert message in refused.stderr
    assert "Traceback" not in refused.output
    assert not list((tmp_path / "out").glob("part-*"))


def test_without_pyarrow_the_error_names_the_extra(words: list[str]) -> None:
    done = run_without("pyarrow", *words)

    assert_names(done, "pyarrow", "pip install 'penstock[index]'")
