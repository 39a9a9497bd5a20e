"""HAProxy's configuration from the gateway's settings. Pure; the same for HAProxy 2.6 (Debian 12) and 3.0 (13).

It contains no servers: they are added and removed over HAProxy's socket, so that the file is never reloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock_gateway.certificate import CERTIFICATE
from penstock_gateway.settings import GatewaySettings

BACKEND = "replicas"
LONG, ALL_LONG = "long_requests", "all_long_requests"
"""Names of the tables that count the long requests of each client and of all; they are backends without servers."""
SCRIPT = Path(__file__).with_name("hold.lua")
BUFFER_BYTES = 40_960
"""Requests of up to this size, headers and body, can be retried; longer ones only if nothing of them was sent. The
headers that the runtime accepts (32 KiB) fit. Each waiting request has one: the operator sizes the pod's memory for a
full buffer of each connection."""
STATUS_CONNECTIONS, STATUS_CONNECTIONS_PER_CLIENT = 256, 16
"""Of the status port. A scraper keeps one connection, the operator one more while it waits for demand, and the kubelet
opens one for each probe."""
SPARE_CONNECTIONS = 64
"""Of the process beyond those of both ports, so that neither port can use up those of the other."""
CONNECTION_RATE = 1_000
"""New connections of one client address per second, averaged over ten seconds; further ones are closed."""
QUEUE_MILLISECONDS = 10
"""A request is queued as if it had come this much later for each open connection of its client address: a client with
one connection does not wait behind hundreds of requests of another."""
TABLE_ENTRIES = 16_384
"""Client addresses that are counted. Addresses without a connection are dropped first."""
RETRIES = 2
"""Each retry goes to another replica if there is one. A request that crashes replicas crashes three at most."""
IDLE_SECONDS = 75
"""Idle timeout of client connections, the same as the runtime's."""
BODY_SECONDS = 30
"""Timeout for the body, the same as the runtime's."""
PROBES = ("/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready")
"""Requests to these paths must not start a replica."""
PUBLIC = (*PROBES, "/", "/docs", "/health", "/ping")
"""GET and HEAD of these paths need no key, as at the replicas; nor does OPTIONS, of any path."""
PUBLIC_PATTERN = "^/v2/models/[^/]+/(versions/[^/]+/)?ready$"
"""Likewise."""
RETRY_FULL_SECONDS = 2
RETRY_LATE_SECONDS = 5


def configuration(settings: GatewaySettings, *, socket: Path, script: Path = SCRIPT) -> str:
    """The complete file. `socket`: path of HAProxy's command socket."""
    held, hold = settings.max_held, settings.hold_seconds
    connections = settings.max_connections + STATUS_CONNECTIONS + SPARE_CONNECTIONS
    # In milliseconds. Random, so that clients that connected together do not reconnect together.
    least_age = settings.connection_age_seconds * 750
    spread = settings.connection_age_seconds * 250
    return f"""\
global
    log stdout format raw local0 notice
    maxconn {connections}
    nbthread 1
    tune.bufsize {BUFFER_BYTES}
    tune.maxrewrite 1024
    stats socket {socket} mode 600 level admin
    setenv HOLD_BACKEND {BACKEND}
    setenv HOLD_MOST {held}
    setenv HOLD_SECONDS {hold}
    setenv CANARY_MOST {settings.concurrency}
    lua-load {script}
    # The key of tls.crt is in tls.key.
    ssl-load-extra-del-ext
    hard-stop-after {settings.finish_seconds}s

defaults
    mode http
    log global
    option dontlognull
    option dontlog-normal
    # A request is cancelled when its client disconnects, in the queue and at the replica.
    option abortonclose
    # When stopping, idle connections are closed with their next response: a request may already have been sent.
    option idle-close-on-response
    # Each piece of a response is sent at once. Without this, HAProxy keeps the tokens of a stream for 200 ms.
    option http-no-delay
    option redispatch 1
    retries {RETRIES}
    # Retried: requests that no replica accepted (no connection, 503), and those whose connection was cut off before
    # the first byte of the response. The second is safe because requests have no side effects.
    retry-on conn-failure empty-response 503
    timeout connect 1s
    timeout http-request 15s
    timeout http-keep-alive {IDLE_SECONDS}s
    timeout client {hold + IDLE_SECONDS}s
    timeout server {settings.answer_seconds}s
    timeout queue {hold}s
    # Errors of requests. Data that is not a request gets a page that is built into HAProxy.
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
            f"the replica did not answer within {settings.answer_seconds} s",
            "Send less in one request, or look at the replicas",
        )
    }

frontend requests
    bind {settings.host}:{settings.port}{_tls(settings)}
    maxconn {settings.max_connections}
    {_limit(settings.max_connections_per_client)}
    tcp-request connection set-var(sess.since) date(0,ms)
    tcp-request connection set-var(sess.age) rand({spread}),add({least_age})
    http-request set-var(txn.until) date(0,ms),sub(sess.since),sub(sess.age)
    http-after-response set-header connection close if {{ var(txn.until) -m int ge 0 }} || {{ lua.draining 1 }}
    http-after-response set-header x-held-time %[var(txn.held_time)] if {{ var(txn.held_time) -m found }}
{_key_check(settings)}    # Only complete requests can be retried. Longer ones are forwarded when the buffer is full.
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
    } if !up {{ path {" ".join(PROBES)} }} || !up {{ var(txn.open) -m found }}
    default_backend {BACKEND}

backend {BACKEND}
    balance {_balance(settings)}
    option httpchk GET /readyz
    timeout check 5s
    # Keep-alives end connections to a replica whose node is gone, after about ten seconds.
    option srvtcpka
    srvtcpka-idle 5s
    srvtcpka-intvl 2s
    srvtcpka-cnt 3
    http-request lua.count_open if {{ var(txn.open) -m found }}
    http-request lua.hold if !{{ nbsrv({BACKEND}) gt 0 }}
    http-request reject if {{ var(txn.held) -m str gone }}
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
    http-request set-priority-offset sc_conn_cur(0),mul({QUEUE_MILLISECONDS})
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

    {_limit_of_long_requests(settings)}
{_canary(settings)}
backend {LONG}
    stick-table type ipv6 size {TABLE_ENTRIES} expire 30s store conn_cur

backend {ALL_LONG}
    stick-table type integer size 16 expire 30s store conn_cur

# A question of the operator waits here until a request is held. HAProxy notices in a backend that its client has left.
backend demand
    http-request lua.demand
    http-request return status 200 content-type "text/plain; charset=utf-8" lf-string "%[var(txn.demand)]\\n"

frontend status
    bind {settings.host}:{settings.status_port}
    maxconn {STATUS_CONNECTIONS}
    {_limit(STATUS_CONNECTIONS_PER_CLIENT)}
    option dontlog-normal
    # Scrapers keep their connections open between scrapes: these must not delay the end of the pod.
    no option idle-close-on-response
    timeout client 330s
    http-request use-service prometheus-exporter if {{ path /metrics/haproxy }}
    http-request use-service lua.status if !{{ path /demand }}
    default_backend demand
"""


def _tls(settings: GatewaySettings) -> str:
    """The arguments of the listening socket for HTTPS."""
    if not settings.tls_folder:
        return ""
    return f" ssl crt {Path(settings.tls_folder) / CERTIFICATE} ssl-min-ver TLSv1.2 alpn http/1.1"


def _key_check(settings: GatewaySettings) -> str:
    """Lines of the frontend that refuse requests without a key before their body is read, whether or not a replica is
    up: they start no replica, and the autoscaler does not count them. The replicas check keys once more."""
    if not settings.keys_folder:
        return ""
    refusal = _return(
        401,
        "unauthorized",
        f"{settings.endpoint} wants a token",
        "Send the header authorization: Bearer <token>",
    )
    return f"""\
    http-request set-var(txn.open) bool(true) if METH_OPTIONS || METH_GET {{ path {" ".join(PUBLIC)} }}
    http-request set-var(txn.open) bool(true) if METH_GET {{ path_reg {PUBLIC_PATTERN} }}
    http-request lua.check_key if !{{ var(txn.open) -m found }}
    {refusal} if {{ var(txn.key) -m str refused }}
"""


def _balance(settings: GatewaySettings) -> str:
    """Where a canary may come, the least loaded of eight random servers: after a request that names a server without a
    weight, HAProxy 2.6 takes that server for one of those that `leastconn` chooses from."""
    return "random(8)" if settings.canary else "leastconn"


def _canary(settings: GatewaySettings) -> str:
    """Lines of the backend that send the canary's share to its servers. A request that such a server does not accept is
    sent again to one of the others: `option redispatch`."""
    if not settings.canary:
        return ""
    return """\
    http-request set-var(txn.canary) lua.canary
    use-server %[var(txn.canary)] if { var(txn.canary) -m len gt 0 }
"""


def _limit(connections: int) -> str:
    """Lines of a frontend that close connections of a client address beyond this number, or above the rate."""
    return f"""\
stick-table type ipv6 size {TABLE_ENTRIES} expire 30s store conn_cur,conn_rate(10s)
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc_conn_cur(0) gt {connections} }}
    tcp-request connection reject if {{ sc_conn_rate(0) gt {10 * CONNECTION_RATE} }}"""


def _limit_of_long_requests(settings: GatewaySettings) -> str:
    """Lines of the backend: a body that is longer than the buffer occupies a place of a replica while it arrives, also
    if that is slow. One client gets twice its share of the connections of these places, and all clients together get
    three quarters, so that shorter requests always find one. No limits for a proxy that may have most connections."""
    places = 2 * settings.concurrency * settings.max_connections_per_client // settings.max_connections
    if places >= settings.concurrency:
        return "# One client may use all places of the replicas."
    refusal_of_all = _return(
        429,
        "overloaded",
        f"as many requests over {BUFFER_BYTES // 1024} KiB arrive from all clients as may at a time",
        f"Try again in {RETRY_FULL_SECONDS} s, or add replicas",
        retry_after=RETRY_FULL_SECONDS,
    )
    refusal = _return(
        429,
        "overloaded",
        f"this client sends as many requests over {BUFFER_BYTES // 1024} KiB at a time as it may",
        f"Try again in {RETRY_FULL_SECONDS} s, with fewer at a time",
        retry_after=RETRY_FULL_SECONDS,
    )
    return f"""\
http-request set-var(txn.received) req.body_len
    http-request set-var(txn.places) nbsrv({BACKEND}),mul({max(1, places)})
    acl partial req.body_size,sub(txn.received) gt 0
    acl partial_chunked req.body_len gt {BUFFER_BYTES * 3 // 4}
    acl chunked req.hdr(transfer-encoding) -m found
    http-request track-sc1 src table {LONG} if partial or chunked partial_chunked
    {refusal} if {{ sc_conn_cur(1),sub(txn.places) gt 0 }}
    http-request set-var(txn.all_places) nbsrv({BACKEND}),mul({max(1, settings.concurrency * 3 // 4)})
    http-request track-sc2 int(0) table {ALL_LONG} if partial or chunked partial_chunked
    {refusal_of_all} if {{ sc_conn_cur(2),sub(txn.all_places) gt 0 }}"""


def error_body(kind: str, message: str, remedy: str) -> str:
    """An error in the runtime's format."""
    return json.dumps({"error": message, "error_type": kind, "remedy": remedy})


def _quoted(text: str) -> str:
    """Quote text as one argument of a line: within single quotes everything but these is literal."""
    return "'" + text.replace("'", "") + "'"


def _error(status: int, kind: str, message: str, remedy: str, *, retry_after: int | None = None) -> str:
    again = "" if retry_after is None else f" hdr retry-after {retry_after}"
    body = _quoted(error_body(kind, message, remedy))
    return f"http-error status {status} content-type application/json string {body}{again}"


def _return(status: int, kind: str, message: str, remedy: str, *, retry_after: int | None = None) -> str:
    body = _quoted(error_body(kind, message, remedy))
    header = "www-authenticate Bearer" if retry_after is None else f"retry-after {retry_after}"
    return f"http-request return status {status} content-type application/json string {body} hdr {header}"
