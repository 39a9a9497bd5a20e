"""The commands of "A first day with a device" in docs/how-to/inferentia.md, each executed with the stand-in."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.resources.base import API_VERSION
from tests.cli.endpoints import run
from tests.endtoend.process import Served
from tests.neuron_standin_env import SECONDS, StandIn
from tests.optimizer.end_to_end.small_model import write_small_bert
from tests.runtime.pod.pods import Pod

pytestmark = [pytest.mark.parity, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "inferentia.md"


def commands() -> list[tuple[str, str]]:
    """Each command with what it prints."""
    block = PAGE.read_text("utf-8").partition("<!-- first day -->\n\n")[2].partition("\n\n")[0]
    return [(line.partition("#")[0].strip(), line.partition("#")[2].strip()) for line in block.splitlines()]


def of_standin(tmp_path: Path) -> StandIn:
    """A machine with a device, and an interpreter of its own in `neuron/bin`."""
    standin = StandIn.make(tmp_path, "inf2")
    standin.machine()
    (tmp_path / "neuron").symlink_to(standin.folder)
    python = standin.folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -W ignore "$@"\n')
    python.chmod(0o755)
    return standin


def write_endpoint(tmp_path: Path) -> Path:
    spec = {
        "model": f"file://{write_small_bert(tmp_path / 'model')}",
        "task": "feature-extraction",
        "hardwareClass": "inf2",
        "cores": 2,
        "workload": {"sequenceLengths": [12]},
        "serving": {"maxInputTokens": 24},
    }
    file = tmp_path / "endpoint.yaml"
    value = {"apiVersion": API_VERSION, "kind": "ModelEndpoint", "metadata": {"name": "small"}, "spec": spec}
    file.write_text(json.dumps(value))
    return file


def test_each_command_prints_what_the_page_has(tmp_path: Path) -> None:
    standin = of_standin(tmp_path)
    known = {"neuron/bin": str(tmp_path / "neuron" / "bin"), "endpoint.yaml": str(write_endpoint(tmp_path))}
    environment = standin.environment(devices=True)
    own = {name: environment[name] for name in ("PYTHONPATH", "PATH", "STANDIN_MACHINE", "OMP_NUM_THREADS")}
    done = []
    with ExitStack() as stack:
        for command, expected in commands():
            for name, path in known.items():
                command = re.sub(rf"(?<![\w-]){re.escape(name)}\b", path, command)  # noqa: PLW2901
            words = shlex.split(command)
            if words[:2] == ["penstock", "serve"]:
                served = stack.enter_context(Served(Path(words[2]), environment=own))
                served.ready()
                known["127.0.0.1:8080"] = f"127.0.0.1:{served.port}"
                output = served.output
            elif words[0] == "penstock":
                to = ["--store", tmp_path / "store"] if words[1] == "optimize" else ["--output", tmp_path / "bench"]
                ended = run(*words[1:], *to, environment=own)
                assert ended.returncode == 0, ended.stderr
                output = ended.stdout + ended.stderr + " ".join(path.name for path in (tmp_path / "bench").glob("*"))
                if found := re.search(r"penstock serve (\S+)", output):
                    known |= {"./artefact": found[1], "artefact": found[1]}
            elif words[-1].startswith("penstock_optimizer"):
                # The server has ended: it had the cores.
                stack.close()
                artefact = words[0].partition("=")[2]
                with Pod(tmp_path / "pod", words[-1], artefact=artefact, neuron_capacity_seconds=30, **own) as pod:
                    pod.wait_for(expected, SECONDS)
                    output = pod.output
            else:
                text = command.replace("STANDIN=0 ", "")
                ended = subprocess.run(
                    ["sh", "-c", text], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS,
                    check=False,
                )  # fmt: skip
                assert ended.returncode == 0, ended.stderr
                output = ended.stdout
            assert (not output.strip()) if expected == "nothing" else expected in output, (command, output)
            done.append(words[0])

    assert len(done) == 7
