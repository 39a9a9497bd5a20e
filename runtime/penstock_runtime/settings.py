"""Settings of a serving process: the one source of its flags, environment variables and documentation.

A setting is a field of one of the groups below. Its name gives the flag (`--drain-limit-seconds`) and the environment
variable (`PENSTOCK_DRAIN_LIMIT_SECONDS`); its description gives unit and reason. The command line,
docs/reference/settings.md and the tests are made from `SETTINGS`. What belongs to the model (plan, batching, limits of
the endpoint) comes with the artefact and the ModelEndpoint instead. Other environment variables of a process are fields
of a `Variables`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import SecretStr, field_validator, model_validator

from penstock.errors import SettingError, closest
from penstock.settings import Setting, SettingsGroup, described, load, setting

PREFIX = "PENSTOCK_"
TOKEN_FILE_VARIABLE, TOKEN_FILE_FLAG = f"{PREFIX}AUTH_TOKEN_FILE", "--auth-token-file"
COMMANDS = ("SERVE_", "OPTIMIZE_", "BENCH_", "HOST_")
"""Prefixes of variables of command-line flags that are not settings of the server."""


class HttpSettings(SettingsGroup):
    """The listening socket and its connections."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. Loopback by default, so that a trial exposes nothing; the container image sets 0.0.0.0.",
        min_length=1,
    )
    port: int = setting(8080, "Port to listen on; 0 takes a free one and logs it.", ge=0, le=65535)
    internal_port: int | None = setting(
        None,
        "Second port, for probes and monitoring: /healthz, /readyz, /health, /metrics and /info, without a token. The "
        "first port then answers /metrics with 404, and /info with the model and its limits only. It has its own limit "
        "of connections, so that clients of the first port cannot keep probes out. Leave it closed to clients. None: "
        "one port for everything; 0 takes a free one and logs it.",
        ge=0,
        le=65535,
    )
    grpc_port: int | None = setting(
        None,
        "Port of the Open Inference Protocol v2 over gRPC, in addition to HTTP, with the same tokens, certificate and "
        "limits. Needs the extra `grpc`. None: no gRPC; 0 takes a free one and logs it.",
        ge=0,
        le=65535,
    )
    tls_certificate: Path | None = setting(
        None,
        "PEM file of a certificate with its chain: the port of requests then serves HTTPS (TLS 1.2 or newer) and no "
        "HTTP. Read again within seconds when it changes, for new connections. The internal port stays HTTP.",
    )
    tls_key: Path | None = setting(None, "PEM file of the certificate's key, without a password.")
    backlog: int = setting(
        1024, "Connections that the kernel holds while they wait to be accepted.", unit="connections", ge=1
    )
    max_connections: int = setting(
        4096,
        "Open connections. For one more, an idle connection of the address with the most is closed; if none is found, "
        "the new one is answered with 503. Each costs some 10 KB and an open file: the process raises its limit of "
        "these (ulimit -n) as far as allowed; if that is too low, it accepts fewer connections and logs a warning.",
        unit="connections",
        ge=1,
    )
    per_client_share: float = setting(
        0.9,
        "Largest share of max_connections and of max_held_bytes that one client address may take; the rest is a "
        "reserve for others. When several addresses compete, the one that takes most gives way, whatever this share "
        "is. An IPv6 address counts as its /64 network. A gateway or proxy is one address, so that its clients share "
        "these 90 %. 1: no reserve.",
        unit="share",
        gt=0,
        le=1,
    )
    max_header_bytes: int = setting(
        32_768, "Request line and headers together; more is answered with 431.", unit="bytes", ge=1024
    )
    max_held_bytes: int = setting(
        134_217_728,
        "Bodies of all connections together, being read or answered, and answers that their clients have not read yet; "
        "for more, the slowest body of the address with the most is refused with 429, or the new one if it is that. "
        "Bounds the memory that clients can take.",
        unit="bytes",
        ge=1024,
    )
    header_timeout_seconds: float = setting(
        10.0, "From a request's first byte to the end of its headers; later is answered with 408.", unit="s", gt=0
    )
    body_timeout_seconds: float = setting(
        30.0, "From the end of the headers to the end of the body; later is answered with 408.", unit="s", gt=0
    )
    min_upload_bytes_per_second: float = setting(
        1000.0,
        "A body that arrives more slowly than this over ten seconds is answered with 408. Less than a modem sends, so "
        "only a client that stalls is slower. 0: no limit but the time-out.",
        unit="bytes/s",
        ge=0,
    )
    write_timeout_seconds: float = setting(
        30.0, "A client that reads nothing of its answer for this long is cut off.", unit="s", gt=0
    )
    connection_age_seconds: float = setting(
        60.0,
        "A connection older than this is closed with its next answer (which has `connection: close`); a quarter "
        "less for some, so that clients that came together do not come back together. A client that keeps its "
        "connections would otherwise stay with its replica for ever, whatever replicas were added since. 0: no limit.",
        unit="s",
        ge=0,
    )
    idle_timeout_seconds: float = setting(
        75.0,
        "A connection without a request is closed after this. Over the 60 s of common load balancers, so that they "
        "close first and never send into a closing connection.",
        unit="s",
        gt=0,
    )

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.tls_certificate is None) is not (self.tls_key is None):
            given, missing = ("TLS_KEY", "TLS_CERTIFICATE")
            if self.tls_key is None:
                given, missing = missing, given
            raise ValueError(f"{PREFIX}{given} is set without {PREFIX}{missing}: set both, or neither")
        return self

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.grpc_port and self.grpc_port in {self.port, self.internal_port}:
            raise ValueError(
                f"grpc_port {self.grpc_port} is another port of this server too: set {PREFIX}GRPC_PORT to a free one"
            )
        if self.internal_port and self.internal_port == self.port:
            raise ValueError(
                f"internal_port {self.internal_port} is the port of requests too: set {PREFIX}INTERNAL_PORT or "
                f"{PREFIX}PORT to another one"
            )
        return self


class LimitSettings(SettingsGroup):
    """Limits of one request. Limits in tokens belong to the model."""

    max_body_bytes: int = setting(
        2_000_000, "Longer bodies are answered with 413. 2 MB holds some 500 pages of text.", unit="bytes", ge=1024
    )
    max_inputs: int = setting(
        1024,
        "Texts (or pairs, or documents) in one request; more is answered with 422 before any of them costs anything.",
        unit="texts",
        ge=1,
    )
    max_rows: int = setting(
        1024,
        "Sequences that one request may turn into (windows of long contexts, labels times texts); more is answered "
        "with 422. Not over max_queue_rows, since such a request could never be let in.",
        unit="sequences",
        ge=1,
    )
    max_answer_bytes: int = setting(
        67_108_864,
        "A request whose answer would be longer, as far as its texts, dimensions and top_k tell, is answered with 422 "
        "before it costs anything: a short one may ask for gigabytes (each token's vector, thousands of words for each "
        "mask).",
        unit="bytes",
        ge=1024,
    )


class QueueSettings(SettingsGroup):
    """The queue of rows that wait for a stream."""

    max_queue_rows: int = setting(
        1024,
        "Sequences that may wait. A request that does not fit now is answered with 429 and Retry-After, one with more "
        "sequences than this with 422.",
        unit="sequences",
        ge=1,
    )
    max_queue_tokens: int = setting(
        131_072,
        "Tokens that may wait, which bounds the waiting time whatever the lengths; answers as for max_queue_rows. A "
        "request of one sequence with more tokens than this waits if no other does.",
        unit="tokens",
        ge=1,
    )
    deadline_seconds: float = setting(
        30.0,
        "A request that has not completely started by then is answered with 504. A client sets a shorter deadline with "
        "the header x-deadline-ms.",
        unit="s",
        gt=0,
    )


class CacheSettings(SettingsGroup):
    """Caches between requests. Not used by text generation."""

    answer_cache_bytes: int = setting(
        0,
        "Memory for whole answers by content hash, for each bearer token on its own; 0 turns it off. An answer of two "
        "labels takes 1.3 KB, a vector of 384 numbers 2.4 KB. Off by default: texts stay in memory.",
        unit="bytes",
        ge=0,
    )
    token_cache_bytes: int = setting(
        0,
        "Memory for tokenised requests by content hash, for each bearer token on its own; 0 turns it off. Estimated, "
        "rather too high: 48 bytes a token, 208 where its place in the text is kept (token-classification, "
        "question-answering), and the texts. Worth it where the same long texts come again and again with other "
        "parameters.",
        unit="bytes",
        ge=0,
    )


class GenerationSettings(SettingsGroup):
    """Text generation."""

    max_sequences: int = setting(
        64,
        "Sequences that generate at the same time; others wait. Each one more makes every step a little slower.",
        unit="sequences",
        ge=1,
        le=4096,
    )
    target_gap_milliseconds: float = setting(
        50.0,
        "Prompts are computed in chunks, next to the tokens of running streams. The chunks are as large as this time "
        "between two tokens of a stream allows; a smaller target delays the first tokens of other requests.",
        unit="ms",
        gt=0,
    )
    generation_cache_bytes: int | None = setting(
        None, "Memory for keys and values of tokens. Not set: 4 GiB, or what the limit leaves.", unit="bytes", ge=1
    )
    prefix_reuse: bool = setting(
        True,
        "Keep the cache of finished sequences while its memory is not needed, so that a prompt that begins like an "
        "earlier one of the same token is computed from there. With several tokens, tenants share nothing: a cache is "
        "reused only for requests with the token that filled it.",
    )


class DrainSettings(SettingsGroup):
    """How the process ends on SIGTERM or SIGINT."""

    drain_delay_seconds: float = setting(
        0.0,
        "Go on accepting for this long after the signal, with readiness already false: the time that endpoints and "
        "load balancers need to notice. The operator sets rollout.drainSeconds of the ModelEndpoint (default 20).",
        unit="s",
        ge=0,
    )
    drain_idle_seconds: float = setting(
        0.5,
        "Keep idle connections open for this long after accepting ends, so that a request already under way on one is "
        "still answered (with `connection: close`).",
        unit="s",
        ge=0,
    )
    drain_limit_seconds: float = setting(
        25.0,
        "Exit by then, whatever is unfinished. Under Kubernetes' default grace period of 30 s.",
        unit="s",
        gt=0,
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.drain_delay_seconds + self.drain_idle_seconds >= self.drain_limit_seconds:
            raise ValueError(
                f"drain_delay_seconds {self.drain_delay_seconds:g} and drain_idle_seconds {self.drain_idle_seconds:g} "
                f"leave nothing of drain_limit_seconds {self.drain_limit_seconds:g}: raise the limit"
            )
        return self


class AccessSettings(SettingsGroup):
    """Authentication and cross-origin access."""

    auth_token: SecretStr | None = setting(
        None,
        "Bearer token that every request but health, readiness, metrics and the static pages must bring. None: open. "
        "The flag is deprecated, because every user of the machine can read the arguments of a process: give the "
        "variable, auth_token_file or auth_token_folder.",
    )
    auth_token_file: Path | None = setting(
        None,
        "File with one accepted bearer token a line (several while a token is being replaced). Read again within "
        "seconds when it changes; a pipe is read once.",
    )
    auth_token_folder: Path | None = setting(
        None,
        "Folder of accepted bearer tokens, such as a mounted Secret: each file holds a token, and its name is the name "
        "of the token in the access log. Read again within seconds when a file changes. While the folder is empty, "
        "every request that needs a token is refused.",
    )
    bulk_tokens: tuple[str, ...] = setting(
        (), "Names (files of auth_token_folder) of tokens whose requests all run in the bulk lane, comma-separated."
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Origins whose pages may call this endpoint from a browser, comma-separated; `*` is any. Empty: off."
    )

    @field_validator("auth_token")
    @classmethod
    def _token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().strip():
            raise ValueError("is empty: leave it out to serve without a token")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and ("://" not in origin or origin.endswith("/")):
                raise ValueError(f"{origin!r} is not an origin: write it like https://app.example.com")
        return value

    @property
    def wants_token(self) -> bool:
        """Whether requests need a token."""
        return any((self.auth_token, self.auth_token_file, self.auth_token_folder))

    @property
    def given_tokens(self) -> list[bytes]:
        """The token of the flag or the variable, if there is one."""
        return [self.auth_token.get_secret_value().strip().encode()] if self.auth_token is not None else []

    @cached_property
    def file_tokens(self) -> list[bytes]:
        """The tokens of the file; SettingError, which names the variable, when it cannot be read or has none.

        The file is read once: it may be a pipe. The result is a cached property because those take no part in
        comparisons: the defaults of `Settings` are shared objects, and reading one must not make `Settings()` differ
        from settings that were loaded.
        """
        found: list[str] = []
        if self.auth_token_file is not None:
            try:
                lines = self.auth_token_file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingError(
                    f"{TOKEN_FILE_VARIABLE}: {self.auth_token_file} cannot be read ({error})",
                    field=TOKEN_FILE_VARIABLE,
                    remedy="Mount the secret there, or leave the setting out",
                ) from error
            found = [line.strip() for line in lines if line.strip()]
            if not found:
                raise SettingError(
                    f"{TOKEN_FILE_VARIABLE}: {self.auth_token_file} holds no token",
                    field=TOKEN_FILE_VARIABLE,
                    remedy="Write one token a line, or leave the setting out",
                )
        return [token.encode() for token in found]


class LogSettings(SettingsGroup):
    """Logging to standard error."""

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severity of the messages that are logged."
    )
    access_log: bool = setting(
        False,
        "One line for each request, written once a second. Off: metrics have the same for less.",
    )


class TraceSettings(SettingsGroup):
    """Spans of requests for OpenTelemetry."""

    trace_endpoint: str | None = setting(
        None,
        "Where to send spans of requests by OTLP over HTTP, such as http://collector:4318/v1/traces; needs the extra "
        "`tracing`. None: no spans.",
    )
    trace_share: float = setting(
        0.01,
        "Share of the requests without a `traceparent` that are traced. Those with one are traced if its flag is set.",
        unit="share",
        ge=0,
        le=1,
    )

    @field_validator("trace_endpoint")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(r"https?://[^\s]+", value) is None:
            raise ValueError("it is not a URL: write it like http://collector:4318/v1/traces")
        return value


class ObservationSettings(SettingsGroup):
    """The objective of the metrics, and the comparison of live answers."""

    live_guard_share: float = setting(
        0.0, "CPU time that compares live answers with fp32; try 0.02. 0: off.", unit="share", ge=0, le=1
    )
    objective_p95_milliseconds: float | None = setting(
        None,
        "The latency objective, of text generation of the time to the first token: becomes a bucket of the histograms.",
        unit="ms",
        gt=0,
    )


class Settings(SettingsGroup):
    """All settings, by group."""

    http: HttpSettings = HttpSettings()
    limits: LimitSettings = LimitSettings()
    queue: QueueSettings = QueueSettings()
    caches: CacheSettings = CacheSettings()
    generation: GenerationSettings = GenerationSettings()
    drain: DrainSettings = DrainSettings()
    access: AccessSettings = AccessSettings()
    log: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    observation: ObservationSettings = ObservationSettings()

    @model_validator(mode="after")
    def _largest_request_fits(self) -> Self:
        most, room = self.limits.max_rows, self.queue.max_queue_rows
        if most > room:
            raise ValueError(
                f"max_rows {most} is over max_queue_rows {room}: such a request could never be accepted. "
                f"Set {PREFIX}MAX_ROWS to {room} or less, or {PREFIX}MAX_QUEUE_ROWS to {most} or more"
            )
        return self

    @classmethod
    def load(
        cls, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None, *, others: Iterable[str] = ()
    ) -> Settings:
        """Settings from flags (by name, such as `port`; None is "not given") over environment over defaults.

        `others`: known variables of the process that are not settings of the server.

        SettingError names the variable or flag, the value and what to write instead; also for `PENSTOCK_` variables
        that look like a mistyped setting.
        """
        found = [(one, one.variable, environment[one.variable]) for one in SETTINGS if one.variable in environment]
        refuse_near_misses(environment, [*(one.variable for one in SETTINGS), *others])
        loaded = load(cls, SETTINGS, found, flags or {}, document="docs/reference/settings.md")
        if (flags or {}).get("auth_token_file") is not None:
            # Read here, where it is known that a flag named the file, so that an error names the flag.
            try:
                _ = loaded.access.file_tokens
            except SettingError as error:
                message = error.message.replace(TOKEN_FILE_VARIABLE, TOKEN_FILE_FLAG, 1)
                raise SettingError(message, field=TOKEN_FILE_FLAG, remedy=error.remedy) from error.__cause__
        return loaded


OF_THE_COMMAND = tuple(
    f"{PREFIX}{name}" for name in ("STORE", "MODELS", "PVC_ROOT", "FILE_PREFIX", "FILE_ROOT", "STATE")
)
"""Variables of the `penstock` command that a container image may set."""

SETTINGS: tuple[Setting, ...] = described(Settings, PREFIX)
"""Every setting, in the order of the groups."""


def refuse_near_misses(environment: Mapping[str, str], known: Iterable[str]) -> None:
    """SettingError for a variable that is probably a mistyped setting, or has the command in its name.

    Other unknown variables are ignored.
    """
    names = [variable.removeprefix(PREFIX) for variable in known]
    for variable in environment:
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and (meant := name.removeprefix("SERVE_")) != name and meant in names:
            raise SettingError(
                f"{variable} is not a setting: settings of the server have no command in their names",
                field=variable,
                remedy=f"Set {PREFIX}{meant} instead",
            )
        # PENSTOCK_SERVE_CORES and similar variables are flags of the command line.
        if variable.startswith(PREFIX) and name not in names and not name.startswith(COMMANDS):
            close = closest(name, names, cutoff=0.74)
            if close:
                raise SettingError(
                    f"{variable} is not a setting", field=variable, remedy=f"Did you mean {PREFIX}{close}?"
                )


class Variables(SettingsGroup):
    """Environment variables of a process that are not settings of the server: the field `cores` is PENSTOCK_CORES.

    Frozen: read once, at start. An empty variable counts as not set, as templates of manifests leave it.
    """

    @classmethod
    def described(cls) -> tuple[Setting, ...]:
        """All variables, in order."""
        return tuple(Setting.of(name, field, group="", prefix=PREFIX) for name, field in cls.model_fields.items())

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the variables, including those of the command."""
        return (*(setting.variable for setting in cls.described()), *OF_THE_COMMAND)

    @classmethod
    def read(cls, environment: Mapping[str, str], *, others: Iterable[str] = ()) -> Self:
        """Read the environment. `others`: known variables of the process that are read elsewhere.

        SettingError names the variable, its value and what to write instead.
        """
        refuse_near_misses(environment, [*cls.names(), *others])
        known = cls.described()
        found = [(one, one.variable, text) for one in known if (text := environment.get(one.variable, "")).strip()]
        return load(cls, known, found, {}, document="docs/reference/settings.md")
