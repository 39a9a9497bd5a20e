"""The predictor as the routes see it: structural, so that tests can bring a small one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Timed(Protocol):
    """See `penstock_runtime.predictor.Timings`."""

    @property
    def queue_milliseconds(self) -> float: ...
    @property
    def tokenization_milliseconds(self) -> float: ...
    @property
    def inference_milliseconds(self) -> float: ...
    @property
    def compute_milliseconds(self) -> float: ...


class Answered(Protocol):
    """See `penstock_runtime.predictor.Answer`."""

    @property
    def value(self) -> Any: ...
    @property
    def timings(self) -> Timed: ...
    @property
    def tokens(self) -> int: ...
    @property
    def truncated(self) -> int: ...


class Predicts(Protocol):
    """See `penstock_runtime.predictor.Predictor`."""

    async def predict(
        self, inputs: Any, parameters: Mapping[str, Any], *, deadline_seconds: float | None = None
    ) -> Answered: ...

    async def drain(self) -> None: ...

    def facts(self) -> Any: ...
