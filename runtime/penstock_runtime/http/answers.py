"""The predictor as the routes see it: structural, so that tests can bring a small one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Timed(Protocol):
    """See `penstock_runtime.predictor.Timings`."""

    @property
    def queue_milliseconds(self) -> float:
        """Waiting for a core."""
        ...

    @property
    def tokenization_milliseconds(self) -> float:
        """Tokenising."""
        ...

    @property
    def inference_milliseconds(self) -> float:
        """Forward passes."""
        ...

    @property
    def compute_milliseconds(self) -> float:
        """Pre-processing, forward passes and post-processing."""
        ...


class Answered(Protocol):
    """See `penstock_runtime.predictor.Answer`."""

    @property
    def value(self) -> Any:
        """In the shape of the task."""
        ...

    @property
    def timings(self) -> Timed:
        """Of this request."""
        ...

    @property
    def tokens(self) -> int:
        """Computed for this request."""
        ...

    @property
    def truncated(self) -> int:
        """Inputs that were cut."""
        ...


class Predicts(Protocol):
    """See `penstock_runtime.predictor.Predictor`."""

    async def predict(
        self, inputs: Any, parameters: Mapping[str, Any], *, deadline_seconds: float | None = None
    ) -> Answered:
        """The answer, or a RequestError; stops when cancelled."""
        ...

    async def drain(self) -> None:
        """Returns when nothing is under way."""
        ...

    def facts(self) -> Any:
        """For `/info`, as JSON."""
        ...
