"""A real Prometheus on this machine, with a configuration of the test."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testbed.build import binary
from testbed.ports import some_free_ports
from testbed.tools import PROMETHEUS
from tests.charts.helm import Manifest

Series = dict[str, Any]


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API; OSError if it does not answer, or answers with an error."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}{query}", timeout=30) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[Series]:
        """The series that an expression gives now."""
        found: list[Series] = self.get("query", query=expression)["result"]
        return found


@contextmanager
def running_prometheus(folder: Path, config: Manifest) -> Iterator[Prometheus]:
    """Prometheus with this configuration, once it answers; its data is in the folder. It ends with the block."""
    (port,) = some_free_ports(1)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [binary(PROMETHEUS), *words, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, stdout=log
        )
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 60
        while True:
            try:
                found.get("status/runtimeinfo")
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.1)
        yield found
    finally:
        process.kill()
        process.wait(30)
