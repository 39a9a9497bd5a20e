"""The lifecycle of a serving process: listen, load a model, replace it, drain.

The serving pod and `penstock serve` differ in how they get a model: both pass a coroutine that loads it to
`serve_while`, and give each loaded model to the running server with `start_model` or `replace_model`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.errors import PenstockError
from penstock_runtime.app.server import Server, request_limits
from penstock_runtime.engines.base import HasDevice
from penstock_runtime.errors import NotReady
from penstock_runtime.http.api.guard.verdicts import check_policy
from penstock_runtime.serving.generation_model import GenerationModel
from penstock_runtime.serving.generator import Generator
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.tasks.classification.text_classification import TextClassification

AnyModel = LoadedModel | GenerationModel
AnyPredictor = Predictor | Generator


async def serve_while(
    server: Server, loading: Coroutine[Any, Any, None], on_late_failure: Callable[[BaseException], None] | None = None
) -> int:
    """Serve until a signal or `Server.stop`, while `loading` runs; returns how many connections were cut off.

    `loading` is cancelled when the server has drained. If it fails before the server has a model, the server stops, and
    its error is raised. If it fails later, `on_late_failure` is called, and the server goes on with the model it has.
    Raises the error of a device that has failed while it served.
    """
    working = asyncio.create_task(loading)

    def end_without_model(_: object) -> None:
        if working.cancelled() or (error := working.exception()) is None:
            return
        if not server.has_model:
            server.status.message = str(error)
            server.stop()
        elif on_late_failure is not None:
            on_late_failure(error)

    working.add_done_callback(end_without_model)
    try:
        cut = await server.serve()
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # raised below, or given to on_late_failure
            await working
    if not server.has_model and not working.cancelled() and (error := working.exception()) is not None:
        raise error
    if server.failure is not None:
        raise server.failure
    return cut


async def start_model(server: Server, model: AnyModel) -> AnyPredictor:
    """Warm up the first model and answer with it from then on.

    InferenceFailed if it does not run, CorruptModel if its outputs are not finite numbers, ArtefactError if its vectors
    are not those of the artefact.
    """
    settings = server.settings
    if isinstance(model, GenerationModel):
        generator = Generator(
            model,
            server.metrics.generation,
            queue=settings.queue,
            settings=settings.generation,
            limits=request_limits(settings),
            share=server.share,
        )
        freeze_garbage_collector()
        server.status.limits = {"max_total_tokens": generator.longest}
        server.serve_with(generator, model.plan, model.manifest)
        return generator
    _check_policy(server, model)
    predictor = Predictor(
        model,
        server.metrics,
        queue=settings.queue,
        caches=settings.caches,
        live_guard_share=settings.observation.live_guard_share,
        share=server.share,
    )
    await predictor.warm_up()
    freeze_garbage_collector()
    server.status.limits = {"max_input_tokens": model.max_tokens}
    server.status.labels, server.status.pooling = model.labels, model.pooling
    server.status.space = model.space
    server.status.truncate = model.truncate
    server.serve_with(predictor, model.plan, model.manifest)
    _watch_device(server, model)
    return predictor


async def replace_model(server: Server, predictor: AnyPredictor, model: AnyModel) -> bool:
    """Warm up another model and answer with it from then on; false if the server is draining.

    Requests in progress are finished by the old model. Errors as `start_model`: the old model stays.
    """
    try:
        match predictor, model:
            case Generator() as generator, GenerationModel() as fresh:
                await generator.replace(fresh)
            case Predictor() as encoder, LoadedModel() as loaded:
                await encoder.replace(loaded)
            case _:
                raise TypeError(f"a model of another task cannot take over from {type(predictor).__name__}")
    except NotReady:
        return False
    server.serve_with(predictor, model.plan, model.manifest)
    if isinstance(model, LoadedModel):
        server.status.space = model.space
        _watch_device(server, model)
    freeze_garbage_collector()
    return True


def _check_policy(server: Server, model: LoadedModel) -> None:
    """SpecError if the model cannot follow the endpoint's policy for gateways."""
    policy, task = server.status.guard_policy, model.task
    if policy is not None:
        room = model.max_tokens - task.tokenizer.single.specials
        gives_shares = not isinstance(task, TextClassification) or task.gives_shares
        check_policy(policy, task.name, model.labels, room=room, gives_shares=gives_shares)


def _watch_device(server: Server, model: LoadedModel) -> None:
    """End the server once the device of its model has failed: where it is started again, it may find it working."""
    engine, loop = model.engine, asyncio.get_running_loop()

    def fail(error: PenstockError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(server.fail, error)

    if isinstance(engine, HasDevice):
        engine.when_lost(fail)


def freeze_garbage_collector() -> None:
    """Exempt all existing objects from future garbage collections.

    A full collection stops all threads. With the libraries that a server has loaded one took 26 ms, as long as thirty
    short texts.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
