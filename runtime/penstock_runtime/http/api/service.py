"""What the routes may ask of the server: an answer, and what it is serving. Knows no HTTP but the deadline header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock_runtime.errors import InvalidInput, NotReady, UnsupportedRoute
from penstock_runtime.http.api.answers import Predicts
from penstock_runtime.http.transport.message import Request
from penstock_runtime.metrics import Metrics
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.serving.status import Phase, Status
from penstock_runtime.settings import Settings
from penstock_runtime.tasks.fields import printable


class Service:
    """The predictor, and everything about it that is told to clients."""

    def __init__(self, status: Status, settings: Settings, metrics: Metrics, predictor: Predicts | None = None) -> None:
        self.status = status
        self.settings = settings
        self.metrics = metrics
        self.predictor = predictor
        """None while the model loads."""

    async def predict(self, request: Request, inputs: Any, parameters: Mapping[str, Any]) -> Answer:
        """Ask the model. NotReady while there is none; whatever the predictor raises."""
        predictor = self.predictor
        if predictor is None:
            raise NotReady(self.status.message, retry_after_seconds=5)
        answer = await predictor.predict(
            inputs, parameters, deadline_seconds=self.deadline_seconds(request), caller=request.caller
        )
        self.metrics.answered(answer)
        return answer

    def deadline_seconds(self, request: Request) -> float:
        """The client's deadline where it is shorter than the setting's; InvalidInput when it is no positive number."""
        limit = self.settings.queue.deadline_seconds
        text = request.headers.get(b"x-deadline-ms")
        if text is None:
            return limit
        try:
            milliseconds = float(text)
        except ValueError:
            milliseconds = -1.0
        if not milliseconds > 0:
            raise InvalidInput(
                f"the header x-deadline-ms is {text.decode('latin-1')!r}",
                field="x-deadline-ms",
                remedy="Give a positive number of milliseconds",
            )
        return min(limit, milliseconds / 1000)

    def require_name(self, name: str) -> None:
        """UnsupportedRoute unless this is the endpoint's name."""
        if name != self.status.name:
            raise UnsupportedRoute(
                f"there is no model {printable(name)!r} here", remedy=f"This endpoint's model is {self.status.name!r}"
            )

    @property
    def ready(self) -> bool:
        """True when requests are answered and new ones are welcome."""
        return self.status.phase is Phase.READY
