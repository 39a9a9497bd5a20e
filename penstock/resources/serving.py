"""The server of an endpoint: limits of inputs, caches, prompts, gRPC."""

from __future__ import annotations

from pydantic import Field

from penstock.resources.base import CLUSTER, NO_SCHEMA_DEFAULT, Spec
from penstock.resources.prompts import Prompts


class Caches(Spec):
    """Memory of a pod for what it computed before. It is added to the memory of the pods."""

    answers_mebibytes: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description="For answers, by the content of the request; MiB. Requests with the same content that are in "
        "progress at the same time are then computed once. 0: off. Texts stay in memory.",
    )
    tokens_mebibytes: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description="For tokenised requests; MiB. For long texts that come again with other parameters. 0: off.",
    )

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return (self.answers_mebibytes + self.tokens_mebibytes) * 2**20

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the runtime for the caches that are on."""
        sizes = {
            "PENSTOCK_ANSWER_CACHE_BYTES": self.answers_mebibytes,
            "PENSTOCK_TOKEN_CACHE_BYTES": self.tokens_mebibytes,
        }
        return {name: str(size * 2**20) for name, size in sizes.items() if size}


class ServingLimits(Spec):
    """Limits of inputs, which the optimisation depends on too."""

    max_input_tokens: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Longer inputs are cut or refused. None: the model's."
    )
    truncate: bool = Field(default=True, description="Cut over-long inputs; false answers them with 422.")


class Serving(ServingLimits):
    """Properties of the server that depend on the endpoint rather than on the process."""

    caches: Caches | None = Field(
        default=None,
        description="Memory for answers and tokens of earlier requests. None: nothing is kept. A change replaces the "
        "pods and does not optimise again.",
    )
    prompts: Prompts | None = Field(
        default=None,
        description="Prompts for feature-extraction, sentence-similarity and text-ranking (there, before the query).",
    )
    grpc: bool = Field(
        default=False,
        description="Serve the Open Inference Protocol v2 over gRPC as well, on port 8082 of the Service. Not through "
        "a gateway.",
        json_schema_extra=CLUSTER | NO_SCHEMA_DEFAULT,
    )
