"""The table of all routes of the server."""

from __future__ import annotations

from penstock_runtime.http.api import cohere, openai, predict, tei, v2
from penstock_runtime.http.api.health import HealthRoutes
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.pages.documents import Documents
from penstock_runtime.http.transport.message import Route
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
        *openai.routes(service, limits),
        *cohere.routes(service, limits),
        *v2.routes(service, health, limits),
        Route(
            "GET", "/healthz", health.alive, "Is the process alive?", OPERATION, public=True,
            content_type="text/plain", response=plain,
        ),
        Route(
            "GET", "/readyz", health.ready, "Are requests welcome?", OPERATION, public=True,
            content_type="text/plain", response=plain,
        ),
        Route(
            "GET", "/health", health.ready, "The same, as huggingface_hub's client asks", OPERATION, public=True,
            content_type="text/plain", response=plain,
        ),
        Route(
            "GET", "/metrics", health.metrics, "Metrics for Prometheus", OPERATION, public=True,
            content_type="text/plain", response=plain,
        ),
        Route(
            "GET", "/info", health.info, "What is served, how, on what, with which evidence", OPERATION,
            response={"type": "object"},
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
    documents.routes = tuple(route for route in table if route.tasks is None or service.status.task in route.tasks)
    return table
