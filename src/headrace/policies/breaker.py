"""Whether a replica that fails gets requests: a circuit breaker as values.

Closed: requests go. Several failures in a row open it, and none go. After a while one request may
try (half-open): its success closes the circuit, its failure opens it again for twice as long. A
breaker never changes: what happens to it gives a new one. Knows no network and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Circuit(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    failures: int = 3  # in a row, that open it
    open_s: float = 2.0  # the first time; each failed trial doubles it
    most_open_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    rules: BreakerRules = BreakerRules()
    state: Circuit = Circuit.CLOSED
    failures: int = 0  # in a row, while closed
    open_s: float = 0.0  # how long it is open this time
    until_s: float = 0.0  # when a trial may go, while open

    def may_send(self, now_s: float) -> bool:
        """While half-open, the one trial is under way and nothing else goes."""
        if self.state is Circuit.OPEN:
            return now_s >= self.until_s
        return self.state is Circuit.CLOSED

    def sent(self, now_s: float) -> Breaker:
        """A request goes; only call it where `may_send`."""
        if self.state is Circuit.OPEN and now_s >= self.until_s:
            return replace(self, state=Circuit.HALF_OPEN)
        return self

    def succeeded(self) -> Breaker:
        if self.state is Circuit.CLOSED and not self.failures:
            return self
        return Breaker(rules=self.rules)

    def failed(self, now_s: float) -> Breaker:
        """Requests that were sent before it opened may fail later: they don't prolong it."""
        if self.state is Circuit.OPEN:
            return self
        if self.state is Circuit.HALF_OPEN:
            return self._opened(now_s, min(2 * self.open_s, self.rules.most_open_s))
        if self.failures + 1 < self.rules.failures:
            return replace(self, failures=self.failures + 1)
        return self._opened(now_s, self.rules.open_s)

    def unknown(self, now_s: float) -> Breaker:
        """A request ended without saying anything about the replica: its client left. If it was the
        trial, another may go at once."""
        if self.state is not Circuit.HALF_OPEN:
            return self
        return replace(self, state=Circuit.OPEN, until_s=now_s)

    def _opened(self, now_s: float, open_s: float) -> Breaker:
        return Breaker(rules=self.rules, state=Circuit.OPEN, open_s=open_s, until_s=now_s + open_s)
