"""How many tokens a request used, as OpenAI counts them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.server.observe.record import RequestRecord


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    """Tokens that were guessed ahead and checked (speculative decoding): those that became part of
    the answer, and those that were computed in vain. The latter are in no other count."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails = msgspec.field(default_factory=PromptDetails)
    # Only where tokens were guessed.
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, records: Iterable[RequestRecord], completion_tokens: int) -> Usage:
        """The sum over all engine requests of an answer. `completion_tokens` are those sent to the
        client: after a stop string the engine may have sampled one more."""
        usage = cls(completion_tokens=completion_tokens)
        guessed = CompletionDetails()
        for record in records:
            guessed.accepted_prediction_tokens += record.right_guesses
            guessed.rejected_prediction_tokens += record.wrong_guesses
            usage.prompt_tokens += record.prompt_tokens
            usage.prompt_tokens_details.cached_tokens += record.cached_tokens
        if guessed.accepted_prediction_tokens or guessed.rejected_prediction_tokens:
            usage.completion_tokens_details = guessed
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
        return usage
