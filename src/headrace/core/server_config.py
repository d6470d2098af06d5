"""What can be chosen about the server: frozen, checked once, the same words as the flags.

Like core/config.py, whose `flag` marks the fields that are flags too. Knows no files, sockets or
HTTP library; bounds are on by default and every one of them can be moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import cast

from headrace.core.config import flag
from headrace.core.constraint import MAX_GRAMMAR_BYTES
from headrace.core.errors import ConfigError, remedy_for
from headrace.core.request import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from headrace.core.sizes import parse_bytes

# What lies behind takes no more, whatever is allowed here.
_MOST = {
    "max_n": MAX_N,
    "max_stop": MAX_STOP_STRINGS,
    "max_logprobs": MAX_LOGPROBS,
    "max_schema": MAX_GRAMMAR_BYTES,
}


class LogFormat(StrEnum):
    AUTO = "auto"  # pretty on a terminal, JSON elsewhere
    PRETTY = "pretty"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """After checking, sizes are bytes."""

    host: str = field(default="127.0.0.1", metadata=flag("The address to listen on."))
    port: int = field(default=8000, metadata=flag("The port to listen on; 0 takes a free one."))
    served_model_name: str | None = field(
        default=None, metadata=flag("What clients call the model; default: its own name.")
    )
    api_key: str | None = field(
        default=None,
        repr=False,  # of no use to who reads a log, unless to do harm
        metadata=flag("A key that every client must send as its bearer token."),
    )
    api_keys_file: str | None = field(
        default=None, metadata=flag("A TOML file of keys with names and limits.")
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
    max_headers: int | str = field(default="32KiB", metadata=flag("Largest headers of a request."))
    max_prompt_tokens: int | None = field(
        default=None, metadata=flag("Longest prompt; default: what the context holds.")
    )
    max_n: int = field(default=16, metadata=flag("Most continuations of one request."))
    max_prompts: int = field(default=128, metadata=flag("Most prompts of one completion request."))
    max_stop: int = field(default=16, metadata=flag("Most stop strings of one request."))
    max_logprobs: int = field(default=20, metadata=flag("Most alternatives given with a token."))
    max_schema: int | str = field(
        default="64KiB", metadata=flag("Largest JSON schema, regex or grammar of a request.")
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
        for name in ("max_body", "max_headers", "max_schema"):
            # One shape for all readers; frozen, so through object's own setter.
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        for each in fields(self):
            self._check(each.name, getattr(self, each.name), each.default)
        object.__setattr__(self, "log_format", LogFormat(self.log_format))
        object.__setattr__(self, "log_level", LogLevel(self.log_level))

    def _check(self, name: str, value: object, default: object) -> None:
        if name in ("log_format", "log_level"):
            choices = LogFormat if name == "log_format" else LogLevel
            if value not in tuple(choices):
                raise _refuse(name, value, f"one of {', '.join(choices)}")
        elif name == "port":
            if not _is_count(value, 0) or cast("int", value) > 65_535:
                raise _refuse(name, value, "0 to 65535")
        elif isinstance(default, bool):
            if not isinstance(value, bool):
                raise _refuse(name, value, "true or false")
        elif name.startswith("max_") and not (value is None and default is None):
            least = 0 if name == "max_restarts" else 1
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
    def max_body_bytes(self) -> int:
        return cast("int", self.max_body)

    @property
    def max_headers_bytes(self) -> int:
        return cast("int", self.max_headers)

    @property
    def max_schema_bytes(self) -> int:
        return cast("int", self.max_schema)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: object) -> bool:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return good and math.isfinite(cast("float", value)) and cast("float", value) > 0


def _refuse(param: str, found: object, expected: str) -> ConfigError:
    return ConfigError(
        f"{param} is {found!r}; expected {expected}.", remedy_for(param, expected), param=param
    )
