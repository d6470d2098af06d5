"""What can be chosen about a router: frozen, checked once. Knows no sockets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.core.errors import ConfigError, HeadraceError
from headrace.policies.prefixes import UNKNOWN_CACHE_TOKENS
from headrace.policies.routing import BOUND, Routing

# What clients may ask for through the router. Everything else stays inside: replicas have paths for
# operators (metrics, adapters, caches), and the internal key may open them.
FORWARDED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
        *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
        *("/tokenizer_info", "/v1/rerank", "/rerank", "/v1/score", "/score"),
    }
)


class DeadlineError(HeadraceError):
    """A replica did not answer in time."""

    status = 504


class BrokenAnswerError(HeadraceError):
    """A replica answered with something that is not HTTP, or not a whole answer."""

    status = 502


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    routing: Routing = Routing.PREFIX
    bound: float = BOUND  # with sessions, a replica may have so many times the mean of tokens
    prefix_bytes: int = 1 << 16  # of a prompt, that decide where it goes
    cache_tokens: int = UNKNOWN_CACHE_TOKENS  # of a replica that does not tell in GET /load
    session_header: str = "x-session-id"
    heartbeat_s: float = 1.0
    connect_s: float = 2.0
    first_byte_s: float = 300.0
    whole_s: float = 3600.0
    tries: int = 8  # replicas that one request may be sent to
    drain_s: float = 30.0
    max_connections: int = 4096
    max_body_bytes: int = 8 << 20
    max_bodies_bytes: int = 256 << 20
    max_headers_bytes: int = 32 << 10
    client_timeout_s: float = 30.0  # for a request to arrive
    internal_key: str | None = field(default=None, repr=False)
    operator_key: str | None = field(default=None, repr=False)
    paths: frozenset[str] = FORWARDED

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "connect_s", "first_byte_s", "whole_s", "client_timeout_s"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                flag = f"--{name.removesuffix('_s').replace('_', '-')}"
                raise ConfigError(
                    f"{flag} is {value:g}; expected seconds above 0.", "Give a number such as 2."
                )
        if not self.bound >= 1:
            raise ConfigError(
                f"--bound is {self.bound:g}; expected 1 or more.", "Give a number such as 1.25."
            )
