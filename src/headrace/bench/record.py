"""One request of a run, as a client saw it, and the figures that follow from it.

Every latency counts from the time at which the request was to be sent; the service time, from the
time at which it was sent, stands beside it. Gaps are per token: a chunk that carries several tokens
shares its gap among them, and tokens that came with the first one have a gap of 0, so that the
gaps' sum is the time from the first token to the last and their mean is TPOT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from headrace.client.answer import Answer
from headrace.workload.ask import Ask


class CountedBy(StrEnum):
    """Who counted a request's output tokens."""

    USAGE = "usage"
    TOKENIZER = "tokenizer"
    CHUNKS = "chunks"


@dataclass(slots=True, kw_only=True)
class Record:
    """Times are seconds from the start of the run."""

    ask: Ask
    scheduled_s: float
    began_s: float  # the client turned to it: later than scheduled if the client is late
    sent_s: float | None = None  # its bytes were written: later still if it had to connect
    end_s: float = 0.0  # the last bytes of the answer arrived, or it failed
    answer: Answer = field(default_factory=Answer)
    retokenized: int | None = None  # the answer's tokens by a tokenizer, where there is one
    is_warm_up: bool = False

    @property
    def is_good(self) -> bool:
        return self.answer.failure is None and bool(self.answer.times_s)

    @property
    def counted_by(self) -> CountedBy:
        if self.answer.output_tokens:
            return CountedBy.USAGE
        return CountedBy.CHUNKS if self.retokenized is None else CountedBy.TOKENIZER

    @property
    def tokens(self) -> int:
        """Of the answer: by the endpoint, else by the tokenizer, else one a chunk."""
        return self.answer.output_tokens or self.retokenized or len(self.answer.times_s)

    @property
    def prompt_tokens(self) -> int:
        """By the endpoint, else what was asked for."""
        found = self.answer.prompt_tokens
        return self.ask.prompt_tokens if found is None else found

    @property
    def first_s(self) -> float:
        return self.answer.times_s[0]

    @property
    def last_s(self) -> float:
        return self.answer.times_s[-1]

    @property
    def ttft_s(self) -> float:
        """To the first token that is not empty, visible or not."""
        return self.first_s - self.scheduled_s

    @property
    def visible_s(self) -> float | None:
        """To the first visible text."""
        found = self.answer.visible_s
        return None if found is None else found - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.scheduled_s

    @property
    def service_ttft_s(self) -> float:
        return self.first_s - (self.began_s if self.sent_s is None else self.sent_s)

    @property
    def service_s(self) -> float:
        return self.last_s - (self.began_s if self.sent_s is None else self.sent_s)

    @property
    def late_s(self) -> float:
        """How late the client was by itself."""
        return self.began_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """None: one token has none."""
        later = self.tokens - 1
        return (self.last_s - self.first_s) / later if later > 0 else None

    @property
    def chunk_gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.answer.times_s)]

    @property
    def gaps_s(self) -> list[float]:
        """One for each token but the first."""
        if not self.answer.times_s:
            return []
        counts = chunk_tokens(self.answer.counts, self.answer.chars, self.tokens)
        gaps = [0.0] * (counts[0] - 1)
        waited_s = 0.0  # for chunks to which no token was counted
        for count, gap_s in zip(counts[1:], self.chunk_gaps_s, strict=True):
            waited_s += gap_s
            if count:
                gaps += [waited_s / count] * count
                waited_s = 0.0
        if waited_s and gaps:
            gaps[-1] += waited_s
        return gaps


def chunk_tokens(told: list[int], chars: list[int], total: int) -> list[int]:
    """How many tokens each chunk has: as it said, else `total` shared out by its text.

    The first chunk has at least one token. Their sum is `total`, if the chunks leave room for that.
    """
    chunks = len(chars)
    if total == chunks:
        return [1] * chunks
    if all(told) and sum(told) == total:
        return list(told)
    if total < chunks:  # chunks without a token of their own, such as parts of a character
        every = sum(chars)
        shares, passed = [], 0
        for number in chars:
            before = passed * total // every
            passed += number
            shares.append(passed * total // every - before)
        if not shares[0]:  # whatever came first was a token
            shares[next(place for place, share in enumerate(shares) if share)] -= 1
            shares[0] = 1
        return shares
    rest, every = total - chunks, sum(chars)
    shares, passed = [], 0
    for number in chars:
        before = passed * rest // every
        passed += number
        shares.append(1 + passed * rest // every - before)
    return shares
