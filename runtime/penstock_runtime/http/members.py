"""A server of several models: which of them a request is for, and what all of them answer together.

Each model has its own routes and its own `Application`. A request names its model in its path (`/models/NAME/...`, or
where the API has it in its paths), or in the field `model` of its body. One that names none goes to the model that has
its route, if only one has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput, NotReady, RequestError, UnknownModel
from penstock_runtime.http.api.core.bodies import PLAIN, json_response, parse_json, refuse_compressed
from penstock_runtime.http.api.core.service import PLACEHOLDERS, ModelService
from penstock_runtime.http.api.openai.routes import listed_model
from penstock_runtime.http.api.penstock.answers import info
from penstock_runtime.http.api.tei.answers import tei_info
from penstock_runtime.http.application import Application, Router, Suspended
from penstock_runtime.http.transport.message import ErrorFormat, Request, Response, Route
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.settings import Settings
from penstock_runtime.tasks.fields import shortened_name

BELOW = "/models/"
"""Before the name of a model and one of its paths."""
NAMES = ("name", "model")
"""Parameters of paths that are names of models."""
OF_THE_PROCESS = frozenset(
    {"penstock_connections", "penstock_cores", "penstock_cpu_throttled_seconds", "penstock_server_crashes"}
)
"""Metrics that the server has once."""
OF_REQUESTS = frozenset({"penstock_requests", "penstock_rejected", "penstock_ready"})
"""Metrics that the server has, too: of the requests that were for no model."""


class Member:
    """One of the models."""

    def __init__(self, service: ModelService, application: Application) -> None:
        self.service = service
        self.application = application
        self.name = service.status.name

    def is_called(self, name: str) -> bool:
        """Whether a request means this model: by its name, or by the repository that it is from."""
        try:
            self.service.require_model(name)
        except UnknownModel:
            return False
        return True


def unknown_model(members: Mapping[str, Member], name: str, field: str = "") -> UnknownModel:
    """The error of a request that names another model."""
    return UnknownModel(
        f"there is no model {shortened_name(name)!r} here", field=field, remedy=f"Served are {_names(members)}"
    )


def _names(members: Mapping[str, Member]) -> str:
    return ", ".join(map(repr, sorted(members)))


class MembersRouter(Router):
    """Finds the route of a request before its body is read: the server's own, or that of the first model that has one.
    The model that a path names is noted in the request."""

    def __init__(self, own: Sequence[Route], members: Mapping[str, Member], task: TaskName) -> None:
        super().__init__(own, task)
        self._members = members

    def methods(self, path: str) -> tuple[dict[str, Route], dict[str, str]]:
        """See `Router`."""
        member, rest = self._of_path(path)
        if member is not None:
            return member.application.router.methods(rest)
        found = super().methods(path)
        if found[0]:
            return found
        for one in self._members.values():
            found = one.application.router.methods(path)
            if found[0]:
                break
        return found

    def resolve(self, request: Request) -> None:
        """See `Router`. UnknownModel if the path names another model."""
        member, rest = self._of_path(request.path)
        if member is not None:
            request.model, request.path = member.name, rest
            member.application.router.resolve(request)
            return
        if request.path.startswith(BELOW):
            name = request.path.removeprefix(BELOW).partition("/")[0]
            request.path = rest  # for the format of the error
            raise unknown_model(self._members, name)
        routers = [one.application.router for one in self._having(request)]
        is_own = _has(super().methods(request.path)[0], request.method)
        if is_own or not routers:
            super().resolve(request)
            return
        routers[0].resolve(request)
        named = next((request.parameters[key] for key in NAMES if key in request.parameters), None)
        if named is not None:
            if named not in self._members:
                raise unknown_model(self._members, named)
            request.model = named

    def member_of(self, request: Request) -> Member:
        """The model that a request with its body is for. UnknownModel; InvalidInput if it names none of several."""
        if request.model:
            return self._members[request.model]
        name = _model_in(request)
        having = self._having(request)
        if request.route is not None and request.route.guards and name not in {one.name for one in having}:
            # Gateways send the name of the language model that a text is for.
            name = None
        if name is not None:
            found = self._members.get(name) or self._members.get(name.removesuffix(":latest"))
            found = found or next((one for one in self._members.values() if one.is_called(name)), None)
            if found is None:
                raise unknown_model(self._members, name, "model")
            return found
        if len(having) == 1:
            return having[0]
        raise InvalidInput(
            f"this server has {len(having)} models for {request.path}, and the request names none",
            field="model",
            remedy=f"Name one of {', '.join(repr(one.name) for one in having)} in the field `model` of the body, or "
            f"send the request to {BELOW}NAME{request.path}",
        )

    def _having(self, request: Request) -> list[Member]:
        """The models with a route for a request; those with its path, if none takes its method."""
        found = [(one, one.application.router.methods(request.path)[0]) for one in self._members.values()]
        with_path = [(one, methods) for one, methods in found if methods]
        return [one for one, methods in with_path if _has(methods, request.method)] or [one for one, _ in with_path]

    def _of_path(self, path: str) -> tuple[Member | None, str]:
        if not path.startswith(BELOW):
            return None, path
        name, _, rest = path.removeprefix(BELOW).partition("/")
        return self._members.get(name), f"/{rest}"


def _has(methods: Mapping[str, Route], method: str) -> bool:
    return method in methods or (method == "HEAD" and "GET" in methods)


def _model_in(request: Request) -> str | None:
    """The model that the body of a request names; None: it has no such field, or a placeholder of a client."""
    if not request.body:
        return None
    content_type = request.headers.get(b"content-type", b"application/json")
    if b"json" not in content_type:
        return None
    refuse_compressed(request)
    body = parse_json(request.body)
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) and name not in PLACEHOLDERS else None


class MembersApplication(Application):
    """Answers requests with the application of their model."""

    router: MembersRouter

    def __init__(
        self, members: Mapping[str, Member], settings: Settings, metrics: ServerMetrics, task: TaskName
    ) -> None:
        routes = Together(members, metrics).routes()
        router = MembersRouter(routes, members, task)
        super().__init__(router, settings, metrics)
        self.router = router
        self._own = frozenset(map(id, routes))
        for member in members.values():
            # One log, in the order of the requests.
            member.application.access_lines = self.access_lines

    def answer(self, request: Request) -> Response | Suspended[Response]:
        """See `Application`."""
        if request.route is None or id(request.route) in self._own:
            return super().answer(request)
        try:
            member = self.router.member_of(request)
            member.application.router.resolve(request)
        except RequestError as error:
            return self.refuse(request, error)
        return member.application.answer(request)


class Together:
    """What the models answer together."""

    def __init__(self, members: Mapping[str, Member], metrics: ServerMetrics) -> None:
        self._members = members
        self._metrics = metrics
        metrics.families = self.families

    def ready(self, _: Request) -> Response:
        """`/readyz`: 200 when all models accept requests."""
        waiting = []
        for member in self._members.values():
            try:
                member.service.require_ready()
            except NotReady as error:
                waiting.append(f"{member.name}: {error.message}")
        if waiting:
            raise NotReady("; ".join(waiting), remedy=f"{BELOW}NAME/readyz is that of one model")
        return Response(b"ready\n", content_type=PLAIN)

    def ready_v2(self, request: Request) -> Response:
        """`/v2/health/ready`."""
        self.ready(request)
        return json_response({"ready": True})

    @staticmethod
    def alive(_: Request) -> Response:
        """`/healthz`."""
        return Response(b"ok\n", content_type=PLAIN)

    def models(self, _: Request) -> Response:
        """`/v1/models`."""
        data = [listed_model(member.service) for member in self._members.values()]
        return json_response({"object": "list", "data": data, "models": list(self._members)})

    def info(self, _: Request) -> Response:
        """`/info`."""
        found = {member.name: {**tei_info(member.service), **info(member.service)} for member in self._members.values()}
        return json_response({"models": found})

    def metrics(self, request: Request) -> Response:
        """`/metrics`: those of each model have the label `model`."""
        text, content_type = self._metrics.exposition(request.headers.get(b"accept", b"").decode("latin-1"))
        return Response(text, content_type=content_type)

    def families(self) -> Iterator[Metric]:
        """The metrics of all models, and of the server with an empty `model`."""
        found: dict[str, Metric] = {}
        for name, metrics in (
            ("", self._metrics),
            *((one.name, one.service.metrics) for one in self._members.values()),
        ):
            for family in metrics.collect_own():
                is_of_process = family.name in OF_THE_PROCESS
                if is_of_process is bool(name) and not (family.name in OF_REQUESTS and not name):
                    continue
                whole = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [_labelled(sample, name) for sample in family.samples]
        yield from found.values()

    def routes(self) -> tuple[Route, ...]:
        """The table."""
        text, tag = {"type": "string"}, "Operation"
        plain = Route(
            "GET", "/healthz", self.alive, "Is the process alive?", tag, public=True, content_type="text/plain",
            response=text,
        )  # fmt: skip
        ready = replace(plain, path="/readyz", handler=self.ready, summary="Are requests to all models welcome?")
        listed = Route("GET", "/v1/models", self.models, "The models", "OpenAI", error_format=ErrorFormat.OPENAI)
        return (
            plain,
            ready,
            replace(ready, path="/health"),
            Route("GET", "/v2/health/live", lambda _: json_response({"live": True}), plain.summary, tag, public=True),
            Route("GET", "/v2/health/ready", self.ready_v2, ready.summary, tag, public=True),
            replace(plain, path="/metrics", handler=self.metrics, summary="Metrics for Prometheus"),
            Route("GET", "/info", self.info, "What is served", tag, response={"type": "object"}),
            listed,
            replace(listed, path="/"),
        )


def _labelled(sample: Sample, model: str) -> Sample:
    return sample._replace(labels={**sample.labels, "model": model})
