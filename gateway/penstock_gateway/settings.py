"""Settings of the gateway: environment variables of its pod, set by the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

PREFIX = "PENSTOCK_GATEWAY_"


class GatewayError(Exception):
    """The gateway cannot continue; the message is a complete sentence with a remedy."""


@dataclass(frozen=True)
class GatewaySettings:
    """Each field is the variable of its name in capitals, with the prefix: `PENSTOCK_GATEWAY_HOLD_SECONDS`."""

    endpoint: str
    """The ModelEndpoint's name, for messages."""
    service: str
    """The headless Service whose EndpointSlices list the replicas."""
    namespace: str
    host: str = "0.0.0.0"
    """Address to listen on, for requests and for the status."""
    port: int = 8080
    """Port of requests."""
    status_port: int = 8404
    """Port of metrics, probes and the number of held requests."""
    max_held: int = 512
    """Requests that may wait while no replica is up, and as many while all are busy; the next is answered with 429."""
    max_connections: int = 2048
    """Connections of clients; further ones wait until one is closed."""
    max_connections_per_client: int = 512
    """Connections of one client address; further ones are closed at once."""
    hold_seconds: int = 120
    """How long a request may wait for a replica; then it is answered with 503."""
    concurrency: int = 64
    """Concurrent requests of one replica; more wait here, and go to the first free replica."""
    answer_seconds: int = 300
    """Timeout for the response of a replica (504). Such a request is not retried."""
    connection_age_seconds: int = 60
    """A client's connection is closed after the first response past this age, to spread clients over gateway pods."""
    drain_seconds: int = 20
    """After SIGTERM: how long new connections are accepted, while the Service removes this pod."""
    finish_seconds: int = 300
    """After that: how long accepted requests may take."""
    canary: str = ""
    """Name of the canary's Deployment, with which the names of its pods begin; empty: there is no canary."""
    keys_folder: str = ""
    """Folder of the keys that requests need, a mounted Secret; empty: none. The replicas check them once more."""
    tls_folder: str = ""
    """Folder of `tls.crt` and `tls.key`, a mounted Secret: HTTPS from clients and to the replicas. Empty: HTTP."""

    def __post_init__(self) -> None:
        """Refuse values that HAProxy would refuse or misinterpret."""
        for name in ("endpoint", "service", "namespace", "host", "canary", "keys_folder", "tls_folder"):
            value = getattr(self, name)
            if (not value and name not in {"canary", "keys_folder", "tls_folder"}) or any(
                character.isspace() or character in "\"'\\#$%" for character in value
            ):
                raise GatewayError(f"{variable(name)} is {value!r}: it must be a name without spaces or quotes.")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not _least(field.name) <= value <= _most(field.name):
                raise GatewayError(
                    f"{variable(field.name)} is {value}: it must be within "
                    f"{_least(field.name)} and {_most(field.name)}."
                )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> GatewaySettings:
        """Read the settings; GatewayError names a variable that is missing or not a number."""
        given: dict[str, str | int] = {}
        for field in fields(cls):
            text = environment.get(variable(field.name))
            if text is None:
                if field.name in {"endpoint", "service", "namespace"}:
                    raise GatewayError(f"{variable(field.name)} is not set: the operator sets it in the gateway's pod.")
                continue
            if field.type == "int":
                try:
                    given[field.name] = int(text)
                except ValueError:
                    raise GatewayError(f"{variable(field.name)} is {text!r}: it must be a whole number.") from None
            else:
                given[field.name] = text
        return cls(**given)  # type: ignore[arg-type]  # by name and type of the fields, above


def variable(name: str) -> str:
    """The environment variable of a field."""
    return f"{PREFIX}{name.upper()}"


def _least(name: str) -> int:
    return (
        1
        if name
        in {
            "concurrency",
            "max_connections",
            "max_connections_per_client",
            "answer_seconds",
            "hold_seconds",
            "finish_seconds",
            "connection_age_seconds",
        }
        else 0
    )


def _most(name: str) -> int:
    return 65_535 if "port" in name else 1_000_000
