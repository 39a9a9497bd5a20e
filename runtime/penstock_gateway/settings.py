"""What the environment of the gateway's pod says: written by the operator's plan, read here, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

PREFIX = "PENSTOCK_GATEWAY_"


class GatewayError(Exception):
    """The gateway cannot go on; the message is a whole sentence with what to do."""


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
    """Requests."""
    status_port: int = 8404
    """Metrics, probes, and whether anything is held."""
    max_held: int = 512
    """Requests that may wait while no replica is up, and as many while all are busy; the next is answered with 429."""
    hold_seconds: int = 120
    """How long one may wait for a replica; then it is answered with 503."""
    concurrency: int = 64
    """Requests that one replica is given at a time; more wait here, and go to whichever replica is free first."""
    answer_seconds: int = 300
    """A replica that says nothing for so long about a request is given up (504). Not sent again: it is at work."""
    connection_age_seconds: int = 60
    """A client's connection is closed after the first answer beyond this, so that clients spread over gateway pods."""
    drain_seconds: int = 20
    """After SIGTERM: how long connections are still taken, while the Service forgets this pod."""
    finish_seconds: int = 300
    """After that: how long what has been accepted may take."""

    def __post_init__(self) -> None:
        """Refuse what HAProxy would refuse later, or understand in another way."""
        for name in ("endpoint", "service", "namespace", "host"):
            value = getattr(self, name)
            if not value or any(character.isspace() or character in "\"'\\#$%" for character in value):
                raise GatewayError(f"{variable(name)} is {value!r}: it is to be a name, without spaces or quotes.")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not _least(field.name) <= value <= _most(field.name):
                raise GatewayError(
                    f"{variable(field.name)} is {value}: it is to be within "
                    f"{_least(field.name)} and {_most(field.name)}."
                )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> GatewaySettings:
        """GatewayError names the variable that is missing or no number."""
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
                    raise GatewayError(f"{variable(field.name)} is {text!r}: it is to be a whole number.") from None
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
            "answer_seconds",
            "hold_seconds",
            "finish_seconds",
            "connection_age_seconds",
        }
        else 0
    )


def _most(name: str) -> int:
    return 65_535 if "port" in name else 1_000_000
