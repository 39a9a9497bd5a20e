"""The predictor as the server sees it: structural, so that tests can bring a small one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from penstock_runtime.serving.predictor import Answer


class Predicts(Protocol):
    """`penstock_runtime.serving.predictor.Predictor`, or what stands in for it."""

    async def predict(
        self, inputs: Any, parameters: Mapping[str, Any], *, deadline_seconds: float | None = None, caller: int = 0
    ) -> Answer:
        """The answer, or a RequestError; stops when cancelled."""
        ...

    async def drain(self) -> None:
        """Returns when nothing is under way."""
        ...

    def queue_depth(self) -> tuple[int, int]:
        """Rows and tokens that wait."""
        ...

    def facts(self) -> dict[str, Any]:
        """For `/info`, as JSON."""
        ...
