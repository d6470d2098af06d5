"""Where the engine's loop meets hand-overs: it gives blocks, takes blocks, or does neither.

One object with the same calls in each role, so that the loop does not ask which one it has. Knows
the two sides; no frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.core.request import GenerateRequest, SampledToken
from headrace.core.server_config import Role
from headrace.engine.loop import Engine
from headrace.server.handover.session import parse_peer
from headrace.server.handover.setup import HandoverSetup

if TYPE_CHECKING:  # most engines need neither side
    from headrace.server.handover.counts import HandoverCounts
    from headrace.server.handover.giver import Giver
    from headrace.server.handover.taker import Taker


class Desk:
    def __init__(
        self, setup: HandoverSetup, engine: Engine, fingerprint: str, vocab_size: int
    ) -> None:
        """Raises ConfigError where this engine can't take part."""
        self._giver: Giver | None = None
        self._taker: Taker | None = None
        self.fingerprint = fingerprint
        if setup.role is Role.BOTH:
            return
        if engine.moves is None:
            raise ConfigError(
                f"The role is {setup.role}, and this engine's blocks can't be handed over: the "
                "prefix cache is off, or what computes can't move blocks.",
                "Leave --no-prefix-cache out, use one process per engine, or drop --role.",
                param="role",
            )
        if setup.role is Role.PREFILL:
            self._giver = _start_giver(setup, engine, fingerprint, vocab_size)
        else:
            from headrace.server.handover.taker import Taker

            self._taker = Taker(
                engine,
                secret=setup.secret,
                fingerprint=fingerprint,
                least_tokens=setup.least_tokens,
                patience_s=setup.patience_s,
            )

    @property
    def port(self) -> int:
        """Where others ask for blocks; 0: nowhere."""
        return 0 if self._giver is None else self._giver.port

    @property
    def counts(self) -> HandoverCounts | None:
        side = self._giver or self._taker
        return None if side is None else side.counts

    def filenos(self) -> list[int]:
        """Readable where `turn` has something to do."""
        side = self._giver or self._taker
        return [] if side is None else [side.waker.fileno()]

    def fetch(self, request: GenerateRequest, prefill: str) -> bool:
        """Whether the request waits for blocks, and `turn` returns it later. `prefill` is where to
        ask, HOST:PORT; empty: nowhere."""
        if self._taker is None or not prefill or (peer := parse_peer(prefill)) is None:
            return False
        return self._taker.fetch(request, peer)

    def turn(self) -> list[GenerateRequest]:
        """Between two steps. Returns requests that are to be added now."""
        if self._giver is not None:
            self._giver.turn()
        return [] if self._taker is None else self._taker.turn()

    def heard(self, tokens: list[SampledToken]) -> None:
        if self._giver is not None and self._giver.is_busy:
            self._giver.heard(tokens)

    def forget(self, request_id: str) -> None:
        if self._taker is not None:
            self._taker.forget(request_id)

    def close(self) -> None:
        for side in (self._giver, self._taker):
            if side is not None:
                side.close()


def _start_giver(setup: HandoverSetup, engine: Engine, fingerprint: str, vocab_size: int) -> Giver:
    from headrace.server.handover.giver import Giver

    try:
        return Giver(
            engine,
            secret=setup.secret,
            fingerprint=fingerprint,
            vocab_size=vocab_size,
            host=setup.host,
            port=setup.port,
        )
    except OSError as error:
        raise ConfigError(
            f"Hand-overs can't be offered at {setup.host}, port {setup.port}: "
            f"{error.strerror or error}.",
            "Choose another --handover-host or --handover-port; port 0 takes a free one.",
            param="handover_port",
        ) from error
