"""The table of all routes of the server."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_runtime.http.api import classify, cohere, hosting, openai, openai_text, predict, responses, tei, tgi, v2
from penstock_runtime.http.api.health import HealthRoutes
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.pages.documents import Documents
from penstock_runtime.http.transport.message import Internal, Route
from penstock_runtime.tasks.base import RequestLimits

OPERATION = "Operation"
PAGES = "Pages"


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """All routes, including those of other tasks; the OpenAPI document describes the routes of this task."""
    health = HealthRoutes(service)
    documents = Documents(service)
    plain = {"type": "string"}
    table = (
        *predict.routes(service, limits),
        *tei.routes(service, limits),
        *tgi.routes(service),
        *hosting.routes(service, health, limits),  # before the models of OpenAI, whose pattern has its path as well
        *openai.routes(service, limits),
        *openai_text.routes(service, limits),
        *responses.routes(service),
        *cohere.routes(service, limits),
        *classify.routes(service, limits),
        *v2.routes(service, health, limits),
        Route(
            "GET", "/healthz", health.alive, "Is the process alive?", OPERATION, public=True, internal=Internal.TOO,
            content_type="text/plain", response=plain,
        ),
        Route(
            "GET", "/readyz", health.ready, "Are requests welcome?", OPERATION, public=True, internal=Internal.TOO,
            content_type="text/plain", response=plain,
        ),
        Route(
            "GET", "/health", health.ready, "The same, as huggingface_hub's client asks", OPERATION, public=True,
            internal=Internal.TOO, content_type="text/plain", response=plain,
        ),
        Route(
            "GET", "/metrics", health.metrics, "Metrics for Prometheus", OPERATION, public=True, internal=Internal.ONLY,
            content_type="text/plain", response=plain,
        ),
        Route(
            "GET", "/info", health.tei_info, "The model and its limits, as of text-embeddings-inference", tei.TAG,
            response={"type": "object"},
        ),
        # Without an internal port this is the one that answers: it has the fields of the other one, too.
        Route(
            "GET", "/info", health.info, "What is served, how, on what, with which evidence", OPERATION,
            internal=Internal.ONLY, response={"type": "object"},
        ),
        Route(
            "GET", "/openapi.json", documents.openapi, "This document", OPERATION, response={"type": "object"},
        ),
        Route(
            "GET", "/", documents.playground, "The playground", PAGES, public=True,
            content_type="text/html", response=plain,
        ),
        Route(
            "GET", "/docs", documents.reference, "The reference", PAGES, public=True,
            content_type="text/html", response=plain,
        ),
    )  # fmt: skip
    shown = table if service.settings.http.internal_port is None else public_routes(table)
    documents.routes = tuple(route for route in shown if route.tasks is None or service.status.task in route.tasks)
    return table


def public_routes(table: Iterable[Route]) -> tuple[Route, ...]:
    """The routes of the port for requests, on a server with an internal port."""
    return tuple(route for route in table if route.internal is not Internal.ONLY)


def internal_routes(table: Iterable[Route]) -> tuple[Route, ...]:
    """The routes of the internal port."""
    return tuple(route for route in table if route.internal is not Internal.NO)
