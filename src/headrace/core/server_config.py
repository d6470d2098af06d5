"""What can be chosen about the server: frozen, checked once, the same words as the flags.

Like core/config.py, whose `flag` marks the fields that are flags too. Knows no files, sockets or
HTTP library. Limits are on by default, and every one of them can be changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from headrace.core import bounds
from headrace.core.checks import RULE, ErrorType, check_fields, refusal, within
from headrace.core.config import flag
from headrace.core.constraint import MAX_GRAMMAR_BYTES
from headrace.core.errors import ConfigError
from headrace.core.modes import Mode
from headrace.core.sizes import Size

ANY = "*"  # of lists of origins or hosts

_DEFAULT_PORT = re.compile(r"(?<=^http)(://.*):80$|(?<=^https)(://.*):443$")


class LogFormat(StrEnum):
    AUTO = "auto"  # pretty on a terminal, JSON elsewhere
    PRETTY = "pretty"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class UnknownFields(StrEnum):
    """What happens to a field in a body that the endpoint does not know."""

    WARN = "warn"  # ignored, and the answer's x-headrace-warning names it
    REFUSE = "refuse"  # 400


class Role(StrEnum):
    """Which part of a request this server computes, where a router has others for the rest."""

    BOTH = "both"
    PREFILL = "prefill"  # prompts, whose blocks others fetch
    DECODE = "decode"  # answers, with the blocks of long prompts from elsewhere


@dataclass(frozen=True, slots=True)
class Listed:
    """The rule of a list of names: each as browsers write it, so that they can be compared."""

    pattern: re.Pattern[str]
    wanted: str

    def settled(self, param: str, value: Any, error: ErrorType) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            raise refusal(error, param, value, "a list")
        for each in value:
            if not isinstance(each, str) or not (each == ANY or self.pattern.fullmatch(each)):
                raise refusal(error, param, each, self.wanted)
        settled = (each.lower().removesuffix("/") for each in value)
        return tuple(_DEFAULT_PORT.sub(r"\1\2", each) for each in settled)


_ORIGINS = Listed(
    re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#,*@]+/?"),
    "an origin such as https://app.example or http://localhost:3000 (no path), or *",
)
_HOSTS = Listed(
    re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"),
    "a host name without a port, such as llm.example.com or *.example.com, or *",
)
_PORT = within(at_least=0, at_most=65_535)
_SIZE = {RULE: Size()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """After checking, sizes are bytes."""

    host: str = field(default="127.0.0.1", metadata=flag("The address to listen on."))
    port: int = field(
        default=8000, metadata=flag("The port to listen on; 0 takes a free one.") | _PORT
    )
    served_model_name: str | None = field(
        default=None,
        metadata=flag(
            "What clients call the model; default: its own name. Several with commas: answers say "
            "the first."
        ),
    )
    api_key: str | None = field(
        default=None,
        repr=False,  # so that it does not appear in logs
        metadata=flag("A key that every client must send as its bearer token."),
    )
    api_keys_file: str | None = field(
        default=None, metadata=flag("A TOML file of keys with names and limits.")
    )
    # For endpoints that show numbers of all requests (server/access/operators.py).
    metrics_key: str | None = field(
        default=None,
        repr=False,
        metadata=flag(
            "A key for /metrics, /load, /history, /diagnosis, /fit and /version; API keys are "
            "then refused there."
        ),
    )
    admin_port: int | None = field(
        default=None,
        metadata=flag(
            "A separate port for operators: probes, the page, /metrics, /load, /history, "
            "/diagnosis, /fit and /version. Needs no key except --metrics-key; if API keys are "
            "set, the main port has only probes and the page of these."
        )
        | _PORT,
    )
    admin_host: str = field(
        default="127.0.0.1", metadata=flag("The address that --admin-port is on.")
    )
    replicas: int | None = field(
        default=None,
        metadata=flag(
            "Several engines behind one router process, with disjoint shares of cores, GPUs and "
            "memory; `headrace restart` restarts or changes them one by one."
        )
        | within(at_least=1, at_most=64),
    )
    # Requests from web pages, and the names they may use for this server: server/edge/browsers.py.
    cors_origin: tuple[str, ...] = field(
        default=(),
        metadata=flag("A web page's origin that may use this server, https://app.example; *: any.")
        | {RULE: _ORIGINS},
    )
    allowed_host: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "A name this server is reached by (Host header); *.example.com, *: any. Needed for "
            "names in public DNS if no key is set."
        )
        | {RULE: _HOSTS},
    )
    # Admission. Requests above these limits get 429 (or 400 or 413 if waiting would not help).
    max_waiting_requests: int = field(
        default=256, metadata=flag("Most requests that may wait for a place.") | within(at_least=1)
    )
    max_waiting_tokens: int = field(
        default=262_144,
        metadata=flag("Most prompt tokens that may wait together.") | within(at_least=1),
    )
    max_connections: int = field(
        default=1024, metadata=flag("Most connections at one time.") | within(at_least=1)
    )
    max_body: int | str = field(default="8MiB", metadata=flag("Largest body of a request.") | _SIZE)
    max_bodies: int | str = field(
        default="64MiB",
        metadata=flag("Largest size of all bodies being read, together; never below --max-body.")
        | _SIZE,
    )
    max_headers: int | str = field(
        default="32KiB", metadata=flag("Largest headers of a request.") | _SIZE
    )
    max_prompt_tokens: int | None = field(
        default=None,
        metadata=flag("Longest prompt; default: what the context holds.") | within(at_least=1),
    )
    max_n: int = field(
        default=16,
        metadata=flag("Most continuations of one request.")
        | within(at_least=1, at_most=bounds.CONTINUATIONS.most),
    )
    max_prompts: int = field(
        default=bounds.PROMPTS.most,
        metadata=flag("Most prompts of one completion request.") | within(at_least=1),
    )
    max_embedding_tokens: int = field(
        default=bounds.INPUT_TOKENS.most,
        metadata=flag("Most tokens of one embeddings request, all inputs together.")
        | within(at_least=1),
    )
    max_stop: int = field(
        default=16,
        metadata=flag("Most stop strings of one request.")
        | within(at_least=1, at_most=bounds.STOP_STRINGS.most),
    )
    max_logprobs: int = field(
        default=20,
        metadata=flag("Most alternatives given with a token.")
        | within(at_least=1, at_most=bounds.LOGPROBS.most),
    )
    max_schema: int | str = field(
        default="64KiB",
        metadata=flag("Largest JSON schema, regex or grammar of a request.")
        | {RULE: Size(at_most=MAX_GRAMMAR_BYTES)},
    )
    max_grammars: int | str = field(
        default="1GiB", metadata=flag("Most memory of all grammars' processes together.") | _SIZE
    )
    unknown_fields: UnknownFields = field(
        default=UnknownFields.WARN,
        metadata=flag("Unknown fields of a body: ignore them with a warning, or answer 400."),
    )
    # Stored answers of /v1/responses, which clients may continue or retrieve.
    max_stored_responses: int = field(
        default=1000,
        metadata=flag("Most responses kept for previous_response_id; 0: none.")
        | within(at_least=0),
    )
    max_stored: int | str = field(
        default="64MiB",
        metadata=flag("Largest size of the responses that are kept, together.") | _SIZE,
    )
    response_lifetime_s: float = field(
        default=86_400.0, metadata=flag("How long a response is kept.") | within(above=0)
    )
    # Times.
    timeout_s: float | None = field(
        default=None,
        metadata=flag("The timeout of requests that do not set timeout_s.") | within(above=0),
    )
    client_timeout_s: float = field(
        default=30.0,
        metadata=flag("Disconnect a client that stops sending its request or reading its answer.")
        | within(above=0),
    )
    drain_timeout_s: float = field(
        default=30.0,
        metadata=flag("After SIGTERM: how long running requests may continue.") | within(above=0),
    )
    hang_timeout_s: float = field(
        default=5.0,
        metadata=flag("Restart an engine that makes no progress for this long.") | within(above=0),
    )
    max_restarts: int = field(
        default=5,
        metadata=flag("Failed engine restarts in a row before the server exits.")
        | within(at_least=0),
    )
    mode: Mode | None = field(
        default=None,
        metadata=flag("Settings that suit this traffic, where they are not set (--dry-run shows)."),
    )
    # Prompts and answers computed apart (docs/prefill-decode.md).
    role: Role = field(
        default=Role.BOTH,
        metadata=flag(
            "Behind `headrace route --prefill`: compute prompts for others (prefill), fetch the "
            "blocks of long prompts from those (decode), or neither (both). Needs --api-key."
        ),
    )
    handover_host: str = field(
        default="127.0.0.1",
        metadata=flag("With --role prefill: the address where others fetch blocks."),
    )
    handover_port: int = field(
        default=0,
        metadata=flag("With --role prefill: the port for that; 0 takes a free one.") | _PORT,
    )
    handover_tokens: int = field(
        default=256,
        metadata=flag(
            "With --role decode: a prompt is fetched if at least this many of its tokens are not "
            "cached; shorter ones are computed here."
        )
        | within(at_least=1),
    )
    handover_timeout_s: float = field(
        default=30.0,
        metadata=flag("With --role decode: compute a prompt here if it takes longer than this.")
        | within(above=0),
    )
    # What is fast enough; workload/slo.py reads it.
    slo: str | None = field(
        default=None,
        metadata=flag("Count requests within this objective: ttft=500ms,tpot=50ms,share=99%."),
    )
    profile: str | None = field(
        default=None,
        metadata=flag(
            "A profile that `headrace calibrate` wrote: the peaks that MFU and bandwidth use are "
            "shares of; default: those of the GPU's data sheet."
        ),
    )
    # Logs and traces.
    log_format: LogFormat = field(default=LogFormat.AUTO, metadata=flag("How logs are written."))
    log_level: LogLevel = field(default=LogLevel.INFO, metadata=flag("What is logged."))
    log_content: bool = field(
        default=False, metadata=flag("Log prompts and answers: they may hold secrets.")
    )
    trace: bool = field(
        default=False,
        metadata=flag("Export OpenTelemetry traces, as the OTEL_* variables say (extra: otel)."),
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.admin_port and self.admin_port == self.port:
            raise refusal(ConfigError, "admin_port", self.admin_port, "another port than --port")
        if self.role is not Role.BOTH and not self.api_key:
            raise ConfigError(
                f"--role {self.role} is given without --api-key: engines hand blocks only to those "
                "that have the same key.",
                "Set the same --api-key on all of them, and give it to the router by "
                "--internal-key-variable.",
                param="role",
            )
        if self.served_model_name is not None and not self.served_names:
            raise refusal(
                ConfigError,
                "served_model_name",
                self.served_model_name,
                "one name, or several with commas",
            )

    @property
    def served_names(self) -> tuple[str, ...]:
        return _split(self.served_model_name or "")

    @property
    def max_body_bytes(self) -> int:
        return cast("int", self.max_body)

    @property
    def max_bodies_bytes(self) -> int:
        """At least max_body, so that every allowed body fits."""
        return max(cast("int", self.max_bodies), self.max_body_bytes)

    @property
    def max_stored_bytes(self) -> int:
        return cast("int", self.max_stored)

    @property
    def max_headers_bytes(self) -> int:
        return cast("int", self.max_headers)

    @property
    def max_grammars_bytes(self) -> int:
        return cast("int", self.max_grammars)

    @property
    def max_schema_bytes(self) -> int:
        return cast("int", self.max_schema)


def _split(names: str) -> tuple[str, ...]:
    """The names without duplicates, in order."""
    return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
