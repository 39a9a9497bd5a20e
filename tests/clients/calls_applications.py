"""Code of applications that packages carry, run by `calls.py`."""

from __future__ import annotations

import json
from typing import Any

TEXTS = ["i like you", "a text"]
QUERY, DOCUMENTS = "what is deep learning ?", ["cheese", "a kind of machine learning"]
VECTORS, LABELS, RANKING = "feature-extraction", "text-classification", "text-ranking"


def sagemaker() -> list[Any]:
    from sagemaker.core.local import local_session

    # It asks docker for the address of its host.
    local_session.get_docker_host = lambda: "127.0.0.1"

    def invoke(url: str, body: dict[str, Any]) -> Any:
        client = local_session.LocalSagemakerRuntimeClient({"local": {"serving_port": int(url.rsplit(":", 1)[1])}})
        found = client.invoke_endpoint(
            Body=json.dumps(body), EndpointName="emotion", ContentType="application/json", Accept="application/json"
        )
        return json.loads(found["Body"].read())

    call = "LocalSagemakerRuntimeClient.invoke_endpoint"
    return [
        ("sagemaker-core", f"{call}, vectors", VECTORS, lambda url: invoke(url, {"inputs": TEXTS})),
        (
            "sagemaker-core", f"{call}, labels", LABELS,
            lambda url: invoke(url, {"inputs": TEXTS[0], "parameters": {"top_k": 1}}),
        ),
        (
            "sagemaker-core", f"{call}, ranking", RANKING,
            lambda url: invoke(url, {"query": QUERY, "texts": DOCUMENTS}),
        ),
    ]  # fmt: skip


def open_webui() -> list[Any]:
    from open_webui.retrieval.models.external import ExternalReranker

    def ranked(url: str) -> Any:
        return ExternalReranker("any", f"{url}/v1/rerank", timeout=60).predict([(QUERY, one) for one in DOCUMENTS])

    return [("open-webui", "ExternalReranker.predict", RANKING, ranked)]


SAGEMAKER, OPEN_WEBUI = (sagemaker,), (open_webui,)
