"""Reads `/info` of a server given by URL. Only Penstock's is read: other servers use that path for other things."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.hardware import CpuIdentity
from penstock.tasks import TaskName
from penstock_bench.measuring.client import MeasurementFailed

INFO_SECONDS = 10.0


class _Part(BaseModel):
    """What is read of it. There is more, and another version may have more still."""

    model_config = ConfigDict(frozen=True)


class DescribedModel(_Part):
    """The model of the artefact that is served."""

    source: str
    max_tokens: int


class DescribedArtefact(_Part):
    """What is served."""

    model: DescribedModel


class DescribedPlan(_Part):
    """How."""

    summary: str


class DescribedVerdict(_Part):
    """The guard's verdict on it."""

    reason: str


class DescribedHost(_Part):
    """The server's machine."""

    cpu: CpuIdentity


class ServerInfo(_Part):
    """The body of `/info` of a Penstock server. All of it is there, if only as null."""

    task: TaskName
    phase: str
    plan: DescribedPlan | None
    artefact: DescribedArtefact | None
    verdict: DescribedVerdict | None
    host: DescribedHost | None


def authorization(token: str) -> dict[str, str]:
    """The header that brings a bearer token; none without one."""
    return {"authorization": f"Bearer {token}"} if token else {}


def read_info(url: str, *, token: str = "") -> ServerInfo | None:
    """`/info` of a Penstock server; None for another kind of server, which has answered all the same.

    MeasurementFailed when nothing answers there, or not without another token.
    """
    asked = urllib.request.Request(f"{url}/info", headers=authorization(token))
    try:
        with urllib.request.urlopen(asked, timeout=INFO_SECONDS) as answer:
            return ServerInfo.model_validate_json(answer.read())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.UNAUTHORIZED:
            raise MeasurementFailed(
                f"{url}/info {'refuses this token' if token else 'asks for a token'} (401)",
                remedy="Give the server's in PENSTOCK_AUTH_TOKEN, or with --auth-token",
            ) from error
        return None
    except ValidationError:
        return None
    except (OSError, http.client.HTTPException) as error:
        raise MeasurementFailed(
            f"nothing answers at {url}: {_in_words(error)}", remedy="Start the server, or check the host and the port"
        ) from error


def _in_words(error: Exception) -> str:
    """Why a server cannot be reached, such as `connection refused`."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    match cause:
        case socket.gaierror():
            return f"no such host ({cause.strerror})"
        case TimeoutError():
            return f"no answer within {INFO_SECONDS:g} s"
        case http.client.RemoteDisconnected() | ConnectionResetError():
            return "it closed the connection without an answer"
        case http.client.HTTPException():
            return "what answers there does not speak HTTP"
        case OSError() if cause.strerror:
            return cause.strerror[0].lower() + cause.strerror[1:]
        case _:
            return str(cause)
