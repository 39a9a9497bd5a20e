"""The gateway's log: its events, and lines that carry event, object and reason as fields.

The same as `penstock.logs`, which the gateway cannot import: its image has the standard library only.
"""

from __future__ import annotations

import json
import logging

LOG_EVENTS: dict[str, tuple[str, str, str]] = {
    "GatewayCertificateChanged": ("info", "The certificate changed; new connections get the new one.", "Nothing."),
    "GatewayCertificateUnusable": (
        "warning",
        "HAProxy refused the changed certificate or its key; the one before stays in use.",
        "Compare the two files of the Secret: `openssl x509 -noout -pubkey` and `openssl pkey -pubout`.",
    ),
    "KeysChanged": ("info", "The gateway read the keys that held requests need, or read them again.", "Nothing."),
    "CanaryShare": (
        "info",
        "The pods of a canary (`object`) get another share of the requests, or there is no such pod any more.",
        "Nothing.",
    ),
    "GatewayReady": ("info", "The gateway has its first list of replicas and accepts requests.", "Nothing."),
    "GatewayDraining": (
        "info",
        "The gateway got SIGTERM and finishes the requests that it has accepted.",
        "Nothing.",
    ),
    "GatewayDrained": ("info", "The gateway ended after its last request.", "Nothing."),
    "GatewayFailed": (
        "error",
        "The gateway cannot start or its HAProxy ended; the kubelet restarts the pod.",
        "If it repeats, follow the remedy in the message and read HAProxy's own lines before it.",
    ),
    "HAProxyRefused": (
        "warning",
        "HAProxy refused a command that adds or changes a replica; the gateway reads HAProxy's state and tries again.",
        "If it repeats, delete the gateway's pod, and report the message as a defect.",
    ),
    "HAProxyUnavailable": (
        "warning",
        "HAProxy does not answer on its socket; the gateway tries again.",
        "If it repeats, look at the CPU throttling and the memory of the gateway's pod.",
    ),
    "ReplicaChanged": ("info", "A replica accepts requests (`Ready`) or gets no new ones (`Draining`).", "Nothing."),
    "ReplicaListFailed": (
        "warning",
        "The gateway cannot read the EndpointSlices of the replicas and keeps the replicas that it knows.",
        "If it repeats, check that the API server answers and that the gateway's RoleBinding and ClusterRole exist.",
    ),
    "RequestsCutOff": (
        "warning",
        "Requests were still running when the time to drain was over, and were cut off.",
        "If it repeats with every rollout, look for requests that take minutes, or replicas that do not become ready.",
    ),
    "ServiceDeleted": (
        "info",
        "The Service of the replicas does not exist any more; the gateway keeps the last known replicas.",
        "Nothing if the endpoint was deleted; otherwise look in the operator's log why the Service is missing.",
    ),
}
"""Name: level, meaning, and what the operator on call does."""


def log_event(name: str, *, object: str = "", reason: str | BaseException = "") -> dict[str, str]:  # noqa: A002
    """The fields of a line, for `extra=` of a logging call. `reason` of an error is the name of its class."""
    why = type(reason).__name__ if isinstance(reason, BaseException) else reason
    return {"event": name, "object": object, "reason": why}


class LineFormatter(logging.Formatter):
    """Level, logger and message, then the fields that are not empty."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the standard library's name
        """The line without a traceback."""
        text = super().formatMessage(record)
        for name in ("event", "object", "reason"):
            if value := record.__dict__.get(name):
                text += f" {name}={json.dumps(value) if ' ' in value else value}"
        return text


def configure_logs() -> None:
    """Log to standard error from level info on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
