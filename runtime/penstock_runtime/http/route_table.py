"""The table of all routes of the server."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_runtime.http.api.anthropic import routes as anthropic
from penstock_runtime.http.api.cohere import routes as cohere
from penstock_runtime.http.api.cohere.answers import RESULTS
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.guard import routes as guard
from penstock_runtime.http.api.kserve import routes as kserve
from penstock_runtime.http.api.ollama import routes as ollama
from penstock_runtime.http.api.openai import routes as openai
from penstock_runtime.http.api.openai_responses import routes as openai_responses
from penstock_runtime.http.api.penstock import routes as penstock
from penstock_runtime.http.api.sagemaker import routes as sagemaker
from penstock_runtime.http.api.tei import routes as tei
from penstock_runtime.http.api.tei.answers import tei_info
from penstock_runtime.http.api.tgi import routes as tgi
from penstock_runtime.http.api.vllm import routes as vllm
from penstock_runtime.http.pages.documents import Documents
from penstock_runtime.http.transport.message import Internal, Route
from penstock_runtime.tasks.base import RequestLimits


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """The routes for all tasks. The OpenAPI document describes the routes for the task of the service.

    Of several routes that match a request, the first one answers.
    """
    of_cohere = cohere.Cohere(service, limits)
    of_tei = tei.Tei(service, limits, of_cohere.rerank)
    documents = Documents(service)
    table = (
        *penstock.routes(service, limits, tei_info),
        *tei.routes(of_tei, of_cohere.body, RESULTS),
        *tgi.routes(service),
        *sagemaker.routes(service, limits, of_tei),
        *kserve.routes(service, limits),  # before OpenAI's, where /v1/models/{model} matches its path as well
        *openai.routes(service, limits),
        *openai_responses.routes(service),
        *anthropic.routes(service),
        *ollama.routes(service, limits),
        *cohere.routes(of_cohere),
        *vllm.routes(service, limits),
        *guard.routes(service, limits),
        *documents.table(),
    )
    shown = table if service.settings.http.internal_port is None else public_routes(table)
    documents.routes = tuple(route for route in shown if route.tasks is None or service.status.task in route.tasks)
    return table


def public_routes(table: Iterable[Route]) -> tuple[Route, ...]:
    """The routes of the port for requests, on a server with an internal port."""
    return tuple(route for route in table if route.internal is not Internal.ONLY)


def internal_routes(table: Iterable[Route]) -> tuple[Route, ...]:
    """The routes of the internal port."""
    return tuple(route for route in table if route.internal is not Internal.NO)
