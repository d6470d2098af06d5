"""What a workload asks for on average, from a sample of its requests.

The steady state and the floors need a few means and the long end of the prompts; the simulator runs
the requests themselves. Knows requests as numbers; no model, no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.search.steady import Demand
from headrace.workload.workload import Workload, summarize

SAMPLE = 1000  # requests; means of lognormal lengths are then within a few percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of all requests of a sample."""

    prompt_tokens: float  # mean
    output_tokens: float  # mean
    longest_tokens: int  # prompt and answer of the longest request
    shared_share: float  # of prompt tokens, those that a prefix cache could have
    prompts: tuple[int, ...]  # in ascending order
    outputs: tuple[int, ...]  # in ascending order
    decode_context_tokens: float  # that an answer token attends to, over all answer tokens
    prefill_context_tokens: float  # that a prompt token attends to, over all prompt tokens
    held_tokens: float  # of KV while a request decodes, over time

    def demand(self, *, prefix_cache: bool) -> Demand:
        """With an ideal prefix cache, which no real one beats, or with none."""
        computed = 1 - self.shared_share if prefix_cache else 1.0
        return Demand(
            prompt_tokens=max(1.0, self.prompt_tokens * computed),
            decode_tokens=max(0.0, self.output_tokens - 1),
            decode_context_tokens=self.decode_context_tokens,
            prefill_context_tokens=self.prefill_context_tokens,
            held_tokens=self.held_tokens * (1 - self.shared_share * prefix_cache),
        )

    def prompt_at_least(self, share: float) -> int:
        """A length that more than 1 - `share` of the prompts reach: an objective for `share` of
        all requests can't be met if these prompts are too slow."""
        return self.prompts[min(int(share * len(self.prompts)), len(self.prompts) - 1)]


def lengths_of(workload: Workload, seed: int) -> Lengths:
    asks = list(workload.asks(seed, SAMPLE))
    summary = summarize(asks)
    decodes = sum(ask.output_tokens - 1 for ask in asks)
    attended = sum((a.output_tokens - 1) * (a.prompt_tokens + a.output_tokens / 2) for a in asks)
    tokens = sum(ask.prompt_tokens for ask in asks)
    pairs = sum(ask.prompt_tokens * (ask.prompt_tokens + 1) / 2 for ask in asks)
    context = attended / decodes if decodes else summary.prompt_tokens
    return Lengths(
        prompt_tokens=summary.prompt_tokens,
        output_tokens=summary.output_tokens,
        longest_tokens=max(ask.total_tokens for ask in asks),
        shared_share=summary.shared_share,
        prompts=_ordered([ask.prompt_tokens for ask in asks]),
        outputs=_ordered([ask.output_tokens for ask in asks]),
        decode_context_tokens=context,
        prefill_context_tokens=pairs / tokens,
        held_tokens=context,
    )


def _ordered(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(values))
