"""The table of routes: every path of the server, in one place."""

from __future__ import annotations

from penstock_runtime.http.health import Health
from penstock_runtime.http.predict import Predict
from penstock_runtime.http.routes import Route
from penstock_runtime.http.service import Service


def routes(service: Service) -> tuple[Route, ...]:
    """All routes, those of other tasks included."""
    health = Health(service)
    predict = Predict(service, frozenset())
    return (
        Route("POST", "/predict", predict.pipeline, "Ask the model", "model", inference=True),
        Route("POST", "/", predict.pipeline, "Ask the model", "model", inference=True),
        Route("GET", "/healthz", health.alive, "Is the process alive?", "operation", public=True),
        Route("GET", "/readyz", health.ready, "Are requests welcome?", "operation", public=True),
        Route("GET", "/metrics", health.metrics, "Metrics for Prometheus", "operation", public=True),
        Route("GET", "/info", health.info, "What is served, how, on what", "operation"),
    )
