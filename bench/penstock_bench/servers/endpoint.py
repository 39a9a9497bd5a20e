"""The server that is measured, when a ModelEndpoint file is given: optimised here for the given cores, and served by
`penstock serve` as a user would, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.process import python_module
from penstock.resources.endpoint import ModelEndpoint
from penstock.settings import hugging_face_token
from penstock_bench.results.results import OURS
from penstock_bench.servers.server import MeasuredServer, free_port
from penstock_optimizer.job.optimise import optimise
from penstock_optimizer.job.progress import DownloadReporter, ProgressEvent, Stage

COMMAND = tuple(python_module("penstock_cli.main"))
READY_PATH = "/readyz"
READY_SECONDS = 120.0
TRANSFER_SECONDS = 10.0
"""Between two lines about a download."""


def find_or_make(
    endpoint: ModelEndpoint, cores: int, *, store: Path, models: Path, on_line: Callable[[str], None]
) -> Path:
    """The artefact of the endpoint for this number of cores: found, or made now, with a line for each event.

    PenstockErrors as `optimise`.
    """

    def tell(progress: ProgressEvent) -> None:
        on_line(progress.message if progress.stage is Stage.DOWNLOAD else f"{progress.short}: {progress.message}")

    return optimise(
        endpoint,
        store=store,
        models=models,
        cores=cores,
        token=hugging_face_token(os.environ),
        on_progress=tell,
        on_transfer=DownloadReporter(tell, every_seconds=TRANSFER_SECONDS),
    )


def serve(
    file: Path, cores: int, *, cpus: Sequence[int], store: Path, models: Path, seconds: float = READY_SECONDS
) -> MeasuredServer:
    """Serve the finished artefact of an endpoint's file; ready when it returns. MeasurementFailed when it does not."""
    port = free_port()
    words = [
        *COMMAND,
        "serve",
        str(file),
        *("--port", str(port)),
        *("--cores", str(cores)),
        *("--store", str(store)),
        *("--models", str(models)),
        "--no-optimize",
    ]
    server = MeasuredServer.start(OURS, words, port=port, cpus=cpus)
    try:
        server.wait_until_ready(READY_PATH, seconds=seconds)
    except BaseException:
        server.stop()
        raise
    return server
