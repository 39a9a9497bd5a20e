"""The model as the routes use it: predictions and status. Of HTTP it knows the deadline header only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from penstock.resources.core import ModelSource
from penstock.vector_space import EXPECTED
from penstock_runtime.admission import client_of
from penstock_runtime.errors import InvalidInput, NotReady, OtherVectorSpace, UnknownModel
from penstock_runtime.http.transport.message import Request
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.serving.status import ServerPhase, ServerStatus
from penstock_runtime.settings import Settings
from penstock_runtime.tasks.fields import shortened_name
from penstock_runtime.tokens import Tokenizer

T = TypeVar("T")

PLACEHOLDERS = frozenset({"", "-", "any", "default", "dummy", "local", "model", "none", "tgi", "x"})
"""What clients of servers with one model send as its name: huggingface_hub dummy, text-generation-inference tgi, SGLang
default."""

BACKGROUND = re.compile(rb"(?:^|[,;\s])u=7(?![0-9])")
"""The lowest urgency of RFC 9218."""


class PredictorLike(Protocol):
    """`penstock_runtime.serving.predictor.Predictor`, or a smaller one in tests."""

    async def predict(
        self,
        inputs: Any,
        parameters: Mapping[str, Any],
        *,
        deadline_seconds: float | None = None,
        caller: int = 0,
        client: str = "",
        tenant: str = "",
        is_bulk: bool = False,
    ) -> Answer:
        """The answer, or a RequestError. May be cancelled. `client`: the address; `tenant`: the name of the bearer
        token; `is_bulk`: it runs in the bulk lane."""
        ...

    async def with_tokenizer(self, work: Callable[[Tokenizer], T], size: int, client: str) -> T:
        """What `work` makes of the model's tokenizer and texts of `size` characters; or a RequestError. `client`: see
        `admission.client_of`."""
        ...

    async def drain(self) -> None:
        """Returns when no request is in progress."""
        ...

    def queue_depth(self) -> tuple[int, int]:
        """Waiting rows and tokens."""
        ...

    def facts(self) -> dict[str, Any]:
        """For `/info`, as JSON."""
        ...


def require_space(expected: str, found: str) -> None:
    """OtherVectorSpace unless `found`, the identifier of a space or empty, is the one of the header
    x-expect-vector-space, which may be a whole value of x-vector-space."""
    wanted = expected.partition(";")[0].strip()
    if found and wanted == found:
        return
    shown = shortened_name(wanted)
    if not found:
        raise OtherVectorSpace(
            f"the request expects the vector space {shown}, and this endpoint's artefact states none",
            field=EXPECTED,
            remedy="Optimise the model again with this version of Penstock, or send the request without the header",
        )
    raise OtherVectorSpace(
        f"the request expects the vector space {shown}, and this endpoint's is {found}",
        field=EXPECTED,
        remedy="Compare both with `penstock space`; vectors of two spaces do not belong into one index",
    )


class ModelService:
    """The predictor, with the status that clients can read."""

    def __init__(self, status: ServerStatus, settings: Settings, metrics: ServerMetrics) -> None:
        self.status = status
        self.settings = settings
        self.metrics = metrics
        self._bulk_tokens = frozenset(settings.access.bulk_tokens)
        self.predictor: PredictorLike | None = None
        """None while the model loads."""

    async def predict(
        self,
        request: Request,
        inputs: Any,
        parameters: Mapping[str, Any],
        *,
        deadline_seconds: float | None = None,
    ) -> Answer:
        """Run the model. NotReady while it loads; otherwise the errors of the predictor. `deadline_seconds`: if not the
        one of the request."""
        predictor = self.predictor
        if predictor is None:
            raise NotReady(self.status.message, retry_after_seconds=5)
        if self.status.route_prompts and parameters.get("prompt_name") is None and request.route is not None:
            prompt = self.status.route_prompts.get(request.route.path)
            parameters = parameters if prompt is None else {**parameters, "prompt_name": prompt}
        expected = request.headers.get(EXPECTED.encode())
        if expected is not None:
            require_space(expected.decode("latin-1"), "" if self.status.space is None else self.status.space.id)
        is_bulk = self.is_bulk(request)
        answer = await predictor.predict(
            inputs,
            parameters,
            deadline_seconds=self.deadline_seconds(request) if deadline_seconds is None else deadline_seconds,
            caller=request.caller,
            client=request.client,
            tenant=request.token,
            is_bulk=is_bulk,
        )
        self.metrics.answered(answer, is_bulk=is_bulk)
        if expected is not None and answer.fingerprint:
            # The model may have been replaced meanwhile.
            require_space(expected.decode("latin-1"), answer.fingerprint.partition("/")[0])
        return answer

    def is_bulk(self, request: Request) -> bool:
        """Whether a request runs in the bulk lane, and is counted as such: its body or the header `priority` asks for
        that, or all requests with its token do."""
        if not request.is_bulk and (
            request.asks_for_bulk
            or request.token in self._bulk_tokens
            or BACKGROUND.search(request.headers.get(b"priority", b""))
        ):
            request.is_bulk = True
            self.metrics.in_flight -= 1
            self.metrics.bulk_in_flight += 1
        return request.is_bulk

    async def with_tokenizer(self, request: Request, work: Callable[[Tokenizer], T], size: int) -> T:
        """`Predictor.with_tokenizer`. NotReady while the model loads."""
        if self.predictor is None:
            raise NotReady(self.status.message, retry_after_seconds=5)
        return await self.predictor.with_tokenizer(work, size, client_of(request.token, request.client))

    def deadline_seconds(self, request: Request) -> float:
        """The client's deadline if shorter than the setting's; InvalidInput if it is not a positive number."""
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

    def require_name(self, name: str, field: str = "") -> None:
        """UnknownModel unless `name` is the endpoint's. `field`: where the request has it."""
        if name != self.status.name:
            raise UnknownModel(
                f"there is no model {shortened_name(name)!r} here",
                field=field,
                remedy=f"This endpoint's model is {self.status.name!r}",
            )

    def require_model(self, name: str | None) -> None:
        """UnknownModel if the field `model` of a request names another model: neither the endpoint, nor the repository
        that its model is from. Placeholders of clients and no name are accepted."""
        if name is None or name in PLACEHOLDERS:
            return
        source = None if self.status.manifest is None else self.status.manifest.model.source
        if source is not None and source.startswith("hf://"):
            source = ModelSource.parse(source).repository
        if name != source:
            self.require_name(name, "model")

    def require_ready(self) -> None:
        """NotReady unless new requests are accepted."""
        if self.status.phase is ServerPhase.DRAINING:
            raise NotReady(self.status.failure or "the server is draining", remedy="Ask another replica")
        if not self.ready:
            raise NotReady(self.status.message)
        if self.status.tokens == 0:
            raise NotReady(
                "no bearer token is known, so every request would be refused",
                remedy="Put one into the folder of --auth-token-folder, or into the Secret that is mounted there",
            )

    @property
    def ready(self) -> bool:
        """True when new requests are accepted."""
        return self.status.phase is ServerPhase.READY
