"""From a loaded model to a server that answers, in a process that does nothing else."""

from __future__ import annotations

import gc

from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.predictor import Limits, Predictor
from penstock_runtime.serving.server import Server


async def launch(server: Server, model: LoadedModel) -> Predictor:
    """Warm the model up and answer with it from then on.

    InferenceFailed when it does not run, CorruptModel when what it gives is not a number.
    """
    queue, caches = server.settings.queue, server.settings.caches
    limits = Limits(
        max_queue_rows=queue.max_queue_rows,
        max_queue_tokens=queue.max_queue_tokens,
        deadline_seconds=queue.deadline_seconds,
        answer_cache_bytes=caches.answer_cache_bytes,
        token_cache_bytes=caches.token_cache_bytes,
    )
    predictor = Predictor(model, limits, server.metrics)
    await predictor.warm_up()
    spare_the_collector()
    server.status.limits = {"max_input_tokens": model.max_tokens}
    server.serve_with(predictor, model.plan, model.manifest)
    return predictor


def spare_the_collector() -> None:
    """What is there by now stays: full garbage collections need not look at it again.

    They stop all threads. With the libraries that a server has loaded one took 26 ms, as long as thirty short texts.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
