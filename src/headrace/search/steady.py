"""A replica in its steady state, without simulating it: how fast it can be at most, and about.

In the steady state every step ends `q` requests: it computes q prompts, and q * (output - 1) answer
tokens besides (a prompt's step gives the first). A step T(q) seconds long serves q / T(q) requests
a second. Two forms of it:

- the bound spreads prompts evenly over steps. Step times are convex in what a step holds, so any
  other schedule is slower: no replica serves more requests a second than this;
- the estimate has prompts come in chunks, as they do. It only gives the order in which candidates
  are simulated.

Knows step times as a function; no GPU, no clock, no queue: waiting is the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one request asks of a replica on average."""

    prompt_tokens: float  # that must be computed
    decode_tokens: float  # answer tokens but for the first
    decode_context_tokens: float  # that an answer token attends to, over all answer tokens
    prefill_context_tokens: float  # that a prompt token attends to, over all prompt tokens
    held_tokens: float  # of KV that a running sequence holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step holds, on average: it need not be whole."""

    decodes: float
    decode_context_tokens: float
    prefill_tokens: float = 0.0
    prefill_context_tokens: float = 0.0


StepTime = Callable[[Batch], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    sequences: int
    batch_tokens: int
    kv_tokens: int
    tpot_s: float | None = None  # no step may be longer on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The best steady state that was found."""

    requests_s: float
    decodes: float  # sequences that decode in every step
    step_s: float
    limit: str  # what keeps it from being larger: "tpot", "kv", "sequences", "tokens"


def most_requests(demand: Demand, limits: Limits, step_s: StepTime) -> Steady | None:
    """The bound: at most so many requests a second. None where not even one sequence meets the
    time per token."""
    return _best(demand, limits, step_s, lambda q: step_s(_even(demand, q)))


def about_requests(demand: Demand, limits: Limits, step_s: StepTime) -> Steady | None:
    """The estimate, with prompts in chunks."""

    def mean_step_s(q: float) -> float:
        decodes = q * demand.decode_tokens
        room = max(limits.batch_tokens - decodes, 1.0)
        chunk = min(demand.prompt_tokens, room)
        share = q * demand.prompt_tokens / chunk  # of the steps have a chunk
        if share >= 1:  # several prompts in every step
            return step_s(_even(demand, q))
        plain = Batch(decodes=decodes, decode_context_tokens=demand.decode_context_tokens)
        full = Batch(
            decodes=decodes,
            decode_context_tokens=demand.decode_context_tokens,
            prefill_tokens=chunk,
            prefill_context_tokens=demand.prefill_context_tokens,
        )
        return (1 - share) * step_s(plain) + share * step_s(full)

    return _best(demand, limits, step_s, mean_step_s)


def _even(demand: Demand, q: float) -> Batch:
    return Batch(
        decodes=q * demand.decode_tokens,
        decode_context_tokens=demand.decode_context_tokens,
        prefill_tokens=q * demand.prompt_tokens,
        prefill_context_tokens=demand.prefill_context_tokens,
    )


def _best(
    demand: Demand, limits: Limits, step_s: StepTime, mean_step_s: Callable[[float], float]
) -> Steady | None:
    """The fullest step is the best one: it grows more slowly than what it holds."""
    decode_tokens = max(demand.decode_tokens, 1e-9)
    # A sequence holds its KV while it decodes; at least one does, even if a step ends it.
    by_kv = limits.kv_tokens / max(demand.held_tokens, 1.0)
    if by_kv < 1:
        return None
    most, limit = min(
        (limits.batch_tokens / (demand.prompt_tokens + demand.decode_tokens), "tokens"),
        (limits.sequences / decode_tokens, "sequences"),
        (by_kv / decode_tokens, "kv"),
    )
    low, high = 0.0, most
    if limits.tpot_s is not None and demand.decode_tokens > 0:
        alone = Batch(decodes=1.0, decode_context_tokens=demand.decode_context_tokens)
        if step_s(alone) > limits.tpot_s:
            return None
        if mean_step_s(high) > limits.tpot_s:
            limit = "tpot"
            while high - low > 0.005 * high:
                middle = (low + high) / 2
                if mean_step_s(middle) <= limits.tpot_s:
                    low = middle
                else:
                    high = middle
    # `high` and not `low`: a bound must not be cut short by where the halving stops.
    length_s = mean_step_s(high)
    return Steady(
        requests_s=high / length_s,
        decodes=high * demand.decode_tokens,
        step_s=length_s,
        limit=limit,
    )
