"""One simulated request: what was asked, and when things happened to it. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.workload.ask import Ask


@dataclass(slots=True, kw_only=True, eq=False)
class Served:
    """Times are in virtual seconds, as the client sees them. Until something has happened, its time
    is None; a request that was refused has neither a first token nor a last."""

    ask: Ask
    arrival_s: float  # when it was sent; for a turn of a session that depends on the turn before
    replica: int = 0
    started_s: float | None = None  # when the engine first gave it a slot
    first_s: float | None = None  # first token
    end_s: float | None = None  # last token, or when it was refused
    tokens: int = 0  # generated
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    refused: str | None = None  # why

    @property
    def is_done(self) -> bool:
        return self.end_s is not None and self.refused is None

    @property
    def ttft_s(self) -> float:
        """From its arrival."""
        return (self.first_s if self.first_s is not None else float("inf")) - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return (self.end_s if self.end_s is not None else float("inf")) - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """(last token - first token) / (tokens - 1); 0 with a single token."""
        if self.first_s is None or self.end_s is None or self.tokens < 2:
            return 0.0
        return (self.end_s - self.first_s) / (self.tokens - 1)

    @property
    def queue_s(self) -> float:
        """From its arrival until the engine had a slot for it."""
        return (self.started_s if self.started_s is not None else float("inf")) - self.arrival_s
