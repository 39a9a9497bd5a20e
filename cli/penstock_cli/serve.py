"""`penstock serve`: answer at once with the fp32 plan, optimise meanwhile, change over in the running server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from penstock_cli.folders import models_option, store_option
from penstock_cli.screen import screen_log
from penstock_cli.serving import ServeOptions, Serving
from penstock_cli.settings import setting_options, settings_from
from penstock_runtime.logs import configure_logs
from penstock_runtime.store.daemon_thread import any_left

logger = logging.getLogger("penstock.serve")


@click.command
@click.argument("target", metavar="FILE|ARTEFACT", type=click.Path(path_type=Path))
@store_option
@models_option
@click.option("--cores", type=click.IntRange(min=1), help="Physical cores, instead of the file's.")
@click.option(
    "--optimize/--no-optimize",
    default=True,
    help="Search for a better plan while the fp32 plan serves. --no-optimize serves what there is: a finished "
    "artefact, or fp32.",
)
@setting_options
def command(target: Path, store: Path, models: Path, cores: int | None, *, optimize: bool, **flags: Any) -> None:
    """Serve a ModelEndpoint FILE, or an ARTEFACT folder that penstock optimize has made.

    A finished artefact for this file and machine is served as it is. Otherwise the fp32 model answers within seconds,
    the optimisation runs beside it, and the chosen plan takes over without a failed request.

    Ends in order on SIGTERM or Ctrl-C: what was accepted is answered.
    """
    settings = settings_from(dict(os.environ), flags)
    configure_logs(settings.log.log_level, *screen_log())
    options = ServeOptions(
        target=target,
        store=store,
        models=models.expanduser(),
        cores=cores,
        optimize=optimize,
        token=os.environ.get("HF_TOKEN"),
    )
    # The tokenizers' own thread pool would compete with the engine for its cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import uvloop  # 20 ms that other commands need not pay

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cut = runner.run(Serving(options, settings).run())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if any_left():  # such as a download, of a model that nobody waits for any more
        os._exit(1 if cut else 0)
    if cut:
        sys.exit(1)
