"""What can be chosen about the server: frozen, checked once, the same words as the flags.

Like core/config.py, whose `flag` marks the fields that are flags too. Knows no files, sockets or
HTTP library; bounds are on by default and every one of them can be moved.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import cast

from headrace.core import bounds
from headrace.core.config import flag
from headrace.core.constraint import MAX_GRAMMAR_BYTES
from headrace.core.errors import ConfigError, remedy_for
from headrace.core.sizes import parse_bytes

# What lies behind takes no more, whatever is allowed here.
_MOST = {
    "max_n": bounds.CONTINUATIONS.most,
    "max_stop": bounds.STOP_STRINGS.most,
    "max_logprobs": bounds.LOGPROBS.most,
    "max_schema": MAX_GRAMMAR_BYTES,
}


# Settings that may be written as 8MiB.
_SIZES = ("max_body", "max_bodies", "max_headers", "max_schema", "max_grammars", "max_stored")

ANY = "*"  # of lists of origins or hosts

# What an item of a list looks like. An origin has no path.
_LISTED = {
    "cors_origin": (
        re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#,*@]+/?"),
        "an origin such as https://app.example or http://localhost:3000 (no path), or *",
    ),
    "allowed_host": (
        re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"),
        "a host name without a port, such as llm.example.com or *.example.com, or *",
    ),
}
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
    """What becomes of a field in a body that is none of the endpoint's."""

    WARN = "warn"  # ignored, and the answer's x-headrace-warning names it
    REFUSE = "refuse"  # 400


# Settings that are one of a few words.
_CHOICES: dict[str, type[StrEnum]] = {
    "log_format": LogFormat,
    "log_level": LogLevel,
    "unknown_fields": UnknownFields,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """After checking, sizes are bytes."""

    host: str = field(default="127.0.0.1", metadata=flag("The address to listen on."))
    port: int = field(default=8000, metadata=flag("The port to listen on; 0 takes a free one."))
    served_model_name: str | None = field(
        default=None,
        metadata=flag(
            "What clients call the model; default: its own name. Several with commas: answers say "
            "the first."
        ),
    )
    api_key: str | None = field(
        default=None,
        repr=False,  # of no use to who reads a log, unless to do harm
        metadata=flag("A key that every client must send as its bearer token."),
    )
    api_keys_file: str | None = field(
        default=None, metadata=flag("A TOML file of keys with names and limits.")
    )
    # What tells of everybody's requests (server/access/operators.py): /metrics, /load, most of
    # /version.
    metrics_key: str | None = field(
        default=None,
        repr=False,
        metadata=flag("A key for /metrics, /load and /version, where others' keys shall not do."),
    )
    admin_port: int | None = field(
        default=None,
        metadata=flag(
            "A port of its own for operators: probes, /metrics, /load and /version. Needs no key "
            "but --metrics-key; where keys are set the main port has these no more."
        ),
    )
    admin_host: str = field(
        default="127.0.0.1", metadata=flag("The address that --admin-port is on.")
    )
    # Web pages, and names that they may have brought: server/edge/browsers.py.
    cors_origin: tuple[str, ...] = field(
        default=(),
        metadata=flag("A web page's origin that may use this server, https://app.example; *: any."),
    )
    allowed_host: tuple[str, ...] = field(
        default=(),
        metadata=flag(
            "A name this server is reached by (Host header); *.example.com, *: any. Needed for "
            "names in public DNS, where no key is set."
        ),
    )
    # Admission. What is beyond is answered 429 (or 400, 413 where waiting would not help).
    max_waiting_requests: int = field(
        default=256, metadata=flag("Most requests that may wait for a place.")
    )
    max_waiting_tokens: int = field(
        default=262_144, metadata=flag("Most prompt tokens that may wait together.")
    )
    max_connections: int = field(default=1024, metadata=flag("Most connections at one time."))
    max_body: int | str = field(default="8MiB", metadata=flag("Largest body of a request."))
    max_bodies: int | str = field(
        default="64MiB",
        metadata=flag("Largest size of all bodies being read, together; never below --max-body."),
    )
    max_headers: int | str = field(default="32KiB", metadata=flag("Largest headers of a request."))
    max_prompt_tokens: int | None = field(
        default=None, metadata=flag("Longest prompt; default: what the context holds.")
    )
    max_n: int = field(default=16, metadata=flag("Most continuations of one request."))
    max_prompts: int = field(
        default=bounds.PROMPTS.most, metadata=flag("Most prompts of one completion request.")
    )
    max_embedding_tokens: int = field(
        default=bounds.INPUT_TOKENS.most,
        metadata=flag("Most tokens of one embeddings request, all inputs together."),
    )
    max_stop: int = field(default=16, metadata=flag("Most stop strings of one request."))
    max_logprobs: int = field(default=20, metadata=flag("Most alternatives given with a token."))
    max_schema: int | str = field(
        default="64KiB", metadata=flag("Largest JSON schema, regex or grammar of a request.")
    )
    max_grammars: int | str = field(
        default="1GiB", metadata=flag("Most memory of all grammars' processes together.")
    )
    unknown_fields: UnknownFields = field(
        default=UnknownFields.WARN,
        metadata=flag("Fields of a body that are not known: ignore them with a warning, or 400."),
    )
    # Answers of /v1/responses that clients may come back to.
    max_stored_responses: int = field(
        default=1000, metadata=flag("Most responses kept for previous_response_id; 0: none.")
    )
    max_stored: int | str = field(
        default="64MiB", metadata=flag("Largest size of the responses that are kept, together.")
    )
    response_lifetime_s: float = field(
        default=86_400.0, metadata=flag("How long a response is kept.")
    )
    # Times.
    timeout_s: float | None = field(
        default=None, metadata=flag("Ends a request that brings no timeout_s of its own.")
    )
    client_timeout_s: float = field(
        default=30.0,
        metadata=flag("Drops a client that neither sends what it began nor reads for so long."),
    )
    drain_timeout_s: float = field(
        default=30.0, metadata=flag("After SIGTERM: how long running requests may go on.")
    )
    hang_timeout_s: float = field(
        default=5.0, metadata=flag("An engine that makes no progress for so long is restarted.")
    )
    max_restarts: int = field(
        default=5, metadata=flag("Engine restarts in a row, none of them serving, before exit.")
    )
    # What is said.
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
        for name in _SIZES:
            # One shape for all readers; frozen, so through object's own setter.
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        for name in ("cors_origin", "allowed_host"):
            object.__setattr__(self, name, _checked_list(name, getattr(self, name)))
        for each in fields(self):
            self._check(each.name, getattr(self, each.name), each.default)
        if self.admin_port and self.admin_port == self.port:
            raise _refuse("admin_port", self.admin_port, "another port than --port")
        if self.served_model_name is not None and not self.served_names:
            raise _refuse("served_model_name", self.served_model_name, "a name, or several")
        for name, choices in _CHOICES.items():
            object.__setattr__(self, name, choices(getattr(self, name)))

    def _check(self, name: str, value: object, default: object) -> None:
        if name in _CHOICES:
            choices = _CHOICES[name]
            if value not in tuple(choices):
                raise _refuse(name, value, f"one of {', '.join(choices)}")
        elif name in ("port", "admin_port"):
            if value is None and default is None:
                return
            if not _is_count(value, 0) or cast("int", value) > 65_535:
                raise _refuse(name, value, "0 to 65535")
        elif isinstance(default, bool):
            if not isinstance(value, bool):
                raise _refuse(name, value, "true or false")
        elif name.startswith("max_") and not (value is None and default is None):
            least = 0 if name in ("max_restarts", "max_stored_responses") else 1
            if not _is_count(value, least):
                raise _refuse(name, value, f"{least} or more")
            if name in _MOST and cast("int", value) > _MOST[name]:
                raise _refuse(name, value, f"at most {_MOST[name]}")
        elif name.endswith("_s") and not (value is None and default is None):
            if not _is_positive(value):
                raise _refuse(name, value, "a number of seconds above 0")
        elif (value is not None or default is not None) and isinstance(default, str | None):
            wanted = not name.endswith("_s") and not name.startswith("max_")
            if wanted and (not isinstance(value, str) or not value):
                raise _refuse(name, value, "some text")

    @property
    def served_names(self) -> tuple[str, ...]:
        return _split(self.served_model_name or "")

    @property
    def max_body_bytes(self) -> int:
        return cast("int", self.max_body)

    @property
    def max_bodies_bytes(self) -> int:
        """One that is allowed must fit."""
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


def _checked_list(name: str, values: object) -> tuple[str, ...]:
    """Each as browsers write it, so that they can be compared as they are."""
    if not isinstance(values, (list, tuple)):
        raise _refuse(name, values, "a list")
    pattern, wanted = _LISTED[name]
    for value in values:
        if not isinstance(value, str) or not (value == ANY or pattern.fullmatch(value)):
            raise _refuse(name, value, wanted)
    return tuple(_DEFAULT_PORT.sub(r"\1\2", value.lower().removesuffix("/")) for value in values)


def _split(names: str) -> tuple[str, ...]:
    """Each once, in their order."""
    return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: object) -> bool:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return good and math.isfinite(cast("float", value)) and cast("float", value) > 0


def _refuse(param: str, found: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{param} is {found!r}; expected {expected}.", remedy_for(param, expected), param=param
    )
