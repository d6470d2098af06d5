"""When requests (or the first turns of sessions) come.

Open loop: at times that do not depend on the server. `gamma` has a coefficient of variation of its
gaps: 1 is Poisson, above 1 comes in bursts, below 1 is more regular. Closed loop: a number of
clients, each of which sends its next request when the answer is there. As people write them:
"constant", "poisson", "gamma:2" (with a rate beside it), "closed:16". Knows no lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from headrace.core.checks import refusal
from headrace.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """`cv` is the gaps' standard deviation divided by their mean: 0 is constant, 1 Poisson."""

    rate_s: float  # arrivals a second
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.rate_s < math.inf:
            raise refusal(ConfigError, "rate", self.rate_s, "a number above 0")
        if not 0 <= self.cv <= 100:
            raise refusal(ConfigError, "cv", self.cv, "0 to 100")

    def times_s(self, random: Random) -> Iterator[float]:
        """Never goes back. The first is a gap after 0, except that constant arrivals begin at 0."""
        if self.cv < 1e-6:  # too regular for a gamma distribution to be drawn
            number = 0
            while True:
                yield number / self.rate_s
                number += 1
        at_s, shape = 0.0, 1 / self.cv**2
        while True:
            at_s += random.gammavariate(shape, 1 / (self.rate_s * shape))
            yield at_s

    def at_rate(self, rate_s: float) -> OpenLoop:
        return replace(self, rate_s=rate_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    clients: int

    def __post_init__(self) -> None:
        if not 1 <= self.clients <= 1_000_000:
            raise refusal(ConfigError, "clients", self.clients, "1 to 1000000")


Arrivals = OpenLoop | ClosedLoop

EXPECTED = "constant, poisson, gamma:CV or closed:CLIENTS"


def parse_arrivals(text: str, rate_s: float | None, param: str = "arrivals") -> Arrivals:
    """`rate_s` is needed for all but a closed loop, which has none."""
    word, _, rest = text.strip().partition(":")
    if word == "closed":
        if not rest.isdecimal():
            raise refusal(ConfigError, param, text, "closed:CLIENTS, such as closed:16")
        if rate_s is not None:
            raise ConfigError(
                f"{param} is {text} and a rate is given; a closed loop sends when answers come.",
                "Leave the rate out, or use poisson.",
                param=param,
            )
        return ClosedLoop(clients=int(rest))
    try:
        cv = {"constant": 0.0, "poisson": 1.0}[word] if not rest else float(rest)
        if rest and word != "gamma":
            raise ValueError
    except (KeyError, ValueError):
        raise refusal(ConfigError, param, text, EXPECTED) from None
    if rate_s is None:
        raise ConfigError(
            f"{param} is {text} and no rate is given; expected requests a second.",
            "Give a rate, or use closed:CLIENTS.",
            param="rate",
        )
    return OpenLoop(rate_s=rate_s, cv=cv)
