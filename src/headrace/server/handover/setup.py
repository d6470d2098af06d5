"""What an engine's process is told about hand-overs. Knows settings; imports nothing heavy, because
the HTTP process needs it too."""

from __future__ import annotations

import msgspec

from headrace.core.server_config import Role, ServerConfig
from headrace.server.handover.session import secret_of


class HandoverSetup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    role: Role = Role.BOTH
    secret: bytes = b""
    host: str = "127.0.0.1"
    port: int = 0
    least_tokens: int = 1
    patience_s: float = 30.0

    @classmethod
    def from_config(cls, config: ServerConfig) -> HandoverSetup:
        if config.role is Role.BOTH or config.api_key is None:
            return cls()
        return cls(
            role=config.role,
            secret=secret_of(config.api_key),
            host=config.handover_host,
            port=config.handover_port,
            least_tokens=config.handover_tokens,
            patience_s=config.handover_timeout_s,
        )
