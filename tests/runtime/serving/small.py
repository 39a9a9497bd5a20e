"""A small task and models of it, for what is not about real models: each number is a row of that many tokens."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.recipe import Batching, Plan
from penstock.tasks import TaskName
from penstock_runtime.engines.base import Engine
from penstock_runtime.errors import InvalidInput
from penstock_runtime.rows import Outputs, Row
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.tasks.base import Prepared
from tests.runtime.batching.echo import IO, EchoEngine, plan


@dataclass(eq=False)
class SumTask:
    """Inputs: a list of lengths. Answer: the length of each, and the task's own mark."""

    mark: str = "first"
    name: TaskName = TaskName.FEATURE_EXTRACTION
    prepared_in: list[str] = field(default_factory=list)
    """Names of the threads that tokenised."""
    token: int = 1
    tokenizer: Any = None

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> Any:
        if not isinstance(inputs, list) and not isinstance(inputs, str):
            raise InvalidInput("not a list", field="inputs")
        return [len(inputs) % 50 + 1] if isinstance(inputs, str) else inputs

    def prepare(self, request: Any) -> Prepared:
        self.prepared_in.append(threading.current_thread().name)
        return Prepared([Row([self.token] * length) for length in request], memo=request, truncated=1)

    def reduce(self, row: Row, outputs: Outputs) -> float:
        return float(outputs["sum"])

    def assemble(self, prepared: Prepared, reduced: Sequence[Any]) -> Any:
        return {"mark": self.mark, "sums": list(reduced), "of": prepared.memo}


def small_model(engine: Engine | None = None, task: SumTask | None = None, served: Plan | None = None) -> LoadedModel:
    engine = engine or EchoEngine(streams=2)
    streams = engine.facts.threads.streams
    return LoadedModel(
        task=task or SumTask(), engine=engine, plan=served or plan(Batching.EQUAL_LENGTH, streams=streams), io=IO
    )
