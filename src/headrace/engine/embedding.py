"""Requests for an embedding of their prompt: the mean of its tokens' last hidden states.

They run like any other, draw nothing and end with their prompt. Each chunk returns the sum over its
tokens; after a preemption the sum starts over, as the sequence does. Knows no arrays.
"""

from __future__ import annotations

from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import FinishReason, GenerateRequest, SampledToken
from headrace.engine.sequence import Sequence


def check_embed(request: GenerateRequest) -> None:
    """Refuses parameters of draws: an embedding draws nothing."""
    params = request.params
    asked = {
        "n": params.n > 1,
        "best_of": params.best_of is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "beam": request.beam is not None,
        "grammar": request.grammar is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidRequestError(
                f"The request asks for an embedding and for {name}; expected one or the other.",
                f"Leave {name} out.",
                param=name,
            )


def add_pooled(sequence: Sequence, start: int, sums: list[float] | None) -> SampledToken | None:
    """Add the sum of a chunk that began at `start`. Returns the embedding after the last chunk."""
    rare = sequence.rare
    if sums is None or rare is None:
        raise HeadraceError(
            "The runner returned no hidden states for a row that asked for them.",
            "This is a mistake in Headrace: please report it.",
        )
    if start == 0:
        rare.pooled = sums
    else:
        rare.pooled = [a + b for a, b in zip(rare.pooled, sums, strict=True)]
    if sequence.computed_tokens < sequence.prompt_tokens:
        return None
    return SampledToken(
        request_id=sequence.request.request_id,
        token_id=-1,
        logprob=0.0,
        finish_reason=FinishReason.STOP,
        embedding=[value / sequence.prompt_tokens for value in rare.pooled],
    )
