"""A port of an object in a cluster on this machine, by `kubectl port-forward`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError
from penstock_cli.cluster.kubectl import ClusterReader

_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")


@contextmanager
def forwarded(kubectl: ClusterReader, what: str, port: int) -> Iterator[str]:
    """The URL at which this port of an object (`service/emotion`) answers during the block.

    PenstockError with kubectl's message when it fails.
    """
    words = kubectl.command("port-forward", what, f":{port}", "--address=127.0.0.1")
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    except FileNotFoundError:
        raise PenstockError("there is no kubectl here", remedy="Install kubectl and put it into the PATH") from None
    try:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        seen: list[str] = []
        for line in process.stdout:
            found = _FORWARDING.match(line)
            if found is not None:
                yield f"http://127.0.0.1:{found[1]}"
                return
            seen.append(line.strip())
        raise PenstockError(
            f"kubectl port-forward {what}: {' '.join(seen) or 'it ended without a message'}",
            remedy="Check that a pod is ready, and your rights: kubectl auth can-i create pods/portforward",
        )
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
