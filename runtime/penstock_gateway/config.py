"""HAProxy's configuration out of the gateway's settings. Pure, and the same for HAProxy 2.6 (Debian 12) and 3.0 (13).

Servers are not in it: they come and go over HAProxy's socket while it runs, so that it is never reloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock_gateway.settings import GatewaySettings

BACKEND = "replicas"
SCRIPT = Path(__file__).with_name("hold.lua")
BUFFER_BYTES = 65_536
"""Requests that fit in here, headers and body, can be sent again; longer ones only while nothing of them was sent."""
RETRIES = 2
"""Each retry goes to another replica, if there is one. A request that kills whoever answers it kills three at most."""
IDLE_SECONDS = 75
"""A client's idle connection is kept for as long as the runtime keeps one."""
BODY_SECONDS = 30
"""For the body to arrive, as the runtime has it."""
PROBES = ("/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready")
"""Whoever asks these wants to know, and wants no replica started for it."""
RETRY_FULL_SECONDS = 2
RETRY_LATE_SECONDS = 5


def configuration(settings: GatewaySettings, *, socket: Path, script: Path = SCRIPT) -> str:
    """The whole file. `socket`: where HAProxy is to listen for commands."""
    held, hold = settings.max_held, settings.hold_seconds
    connections = 2 * held + 4096
    # In milliseconds, and not the same for all: clients that came together need not go together.
    least_age = settings.connection_age_seconds * 750
    spread = settings.connection_age_seconds * 250
    return f"""\
global
    log stdout format raw local0 notice
    maxconn {connections}
    nbthread 1
    tune.bufsize {BUFFER_BYTES}
    # Headers may be longer than the default by as much as the runtime takes (PENSTOCK_MAX_HEADER_BYTES).
    tune.maxrewrite 1024
    stats socket {socket} mode 600 level admin
    setenv HOLD_BACKEND {BACKEND}
    setenv HOLD_MOST {held}
    setenv HOLD_SECONDS {hold}
    lua-load {script}
    hard-stop-after {settings.finish_seconds}s

defaults
    mode http
    log global
    option dontlognull
    option dontlog-normal
    # A client that goes away takes its request with it, out of the queue and from the replica.
    option abortonclose
    # At the end, idle connections are closed with their next answer: closed at once, one would lose what is on its way.
    option idle-close-on-response
    option redispatch 1
    retries {RETRIES}
    # Sent again: what no replica has taken (no connection, 503), and what was cut off before the first byte of its
    # answer. The second is safe because answers depend on nothing but the request and change nothing.
    retry-on conn-failure empty-response 503
    timeout connect 1s
    timeout http-request 15s
    timeout http-keep-alive {IDLE_SECONDS}s
    timeout client {hold + IDLE_SECONDS}s
    timeout server {settings.answer_seconds}s
    timeout queue {hold}s
    # Of requests. What never becomes one gets a page that HAProxy was built with, and no setting of it changes that.
    {_error(400, "bad_request", "this is not an HTTP/1.1 request that can be passed on", "Look at its headers")}
    {_error(408, "timeout", "the request did not arrive in time", "Send its headers and its body at once")}
    {_error(500, "inference", "the gateway failed on this request", "Try again; the gateway's log has more")}
    {_error(502, "bad_gateway", "a replica broke off its answer", "Try again")}
    {
        _error(
            503,
            "not_ready",
            "no replica took the request",
            f"Try again in {RETRY_LATE_SECONDS} s",
            retry_after=RETRY_LATE_SECONDS,
        )
    }
    {
        _error(
            504,
            "deadline",
            f"the replica said nothing for {settings.answer_seconds} s",
            "Send less in one request, or look at the replicas",
        )
    }

frontend requests
    bind {settings.host}:{settings.port}
    tcp-request connection set-var(sess.since) date(0,ms)
    tcp-request connection set-var(sess.age) rand({spread}),add({least_age})
    http-request set-var(txn.until) date(0,ms),sub(sess.since),sub(sess.age)
    http-after-response set-header connection close if {{ var(txn.until) -m int ge 0 }} || {{ lua.draining 1 }}
    http-after-response set-header x-held-time %[var(txn.held_time)] if {{ var(txn.held_time) -m found }}
    # Only what is here as a whole can be sent again. What is longer than the buffer goes on when that is full.
    http-request wait-for-body time {BODY_SECONDS}s
    acl up nbsrv({BACKEND}) gt 0
    {
        _return(
            503,
            "not_ready",
            "no replica runs",
            "Send a request: it starts one, and this does not",
            retry_after=RETRY_LATE_SECONDS,
        )
    } if !up {{ path {" ".join(PROBES)} }}
    default_backend {BACKEND}

backend {BACKEND}
    balance leastconn
    option httpchk GET /readyz
    timeout check 5s
    # A replica whose node is gone says nothing at all: its connections end after some ten seconds instead of never.
    option srvtcpka
    srvtcpka-idle 5s
    srvtcpka-intvl 2s
    srvtcpka-cnt 3
    http-request lua.hold if !{{ nbsrv({BACKEND}) gt 0 }}
    {
        _return(
            429,
            "overloaded",
            f"{held} requests wait for the first replica of {settings.endpoint} already",
            f"Try again in {RETRY_FULL_SECONDS} s",
            retry_after=RETRY_FULL_SECONDS,
        )
    } if {{ var(txn.held) -m str full }}
    {
        _return(
            503,
            "not_ready",
            f"no replica of {settings.endpoint} came up within {hold} s",
            f"Ask for the reason with: kubectl describe modelendpoint {settings.endpoint}",
            retry_after=RETRY_LATE_SECONDS,
        )
    } if {{ var(txn.held) -m str late }}
    http-request lua.refuse if {{ queue({BACKEND}) ge {held} }}
    {
        _return(
            429,
            "overloaded",
            f"{held} requests wait for a replica of {settings.endpoint} already",
            f"Try again in {RETRY_FULL_SECONDS} s, or add replicas",
            retry_after=RETRY_FULL_SECONDS,
        )
    } if {{ queue({BACKEND}) ge {held} }}

frontend status
    bind {settings.host}:{settings.status_port}
    option dontlog-normal
    # Whoever reads figures now and then keeps a connection in between: it must not keep a pod that is to go.
    no option idle-close-on-response
    timeout client 330s
    http-request use-service prometheus-exporter if {{ path /metrics/haproxy }}
    http-request use-service lua.status
"""


def error_body(kind: str, message: str, remedy: str) -> str:
    """An error in the runtime's shape."""
    return json.dumps({"error": message, "error_type": kind, "remedy": remedy})


def _quoted(text: str) -> str:
    """As one argument of a line: single quotes take everything literally but themselves."""
    return "'" + text.replace("'", "") + "'"


def _error(status: int, kind: str, message: str, remedy: str, *, retry_after: int | None = None) -> str:
    again = "" if retry_after is None else f" hdr retry-after {retry_after}"
    body = _quoted(error_body(kind, message, remedy))
    return f"http-error status {status} content-type application/json string {body}{again}"


def _return(status: int, kind: str, message: str, remedy: str, *, retry_after: int) -> str:
    body = _quoted(error_body(kind, message, remedy))
    return (
        f"http-request return status {status} content-type application/json string {body} hdr retry-after {retry_after}"
    )
