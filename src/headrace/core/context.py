"""Whether a prompt and the requested answer fit the context, and the error if they do not.

One rule for the library, the command line and the server: a requested number of tokens is granted
or refused, never cut silently. The first sentence of the error is OpenAI's, because clients search
for it (litellm, for example, to try a model with a longer context). Knows numbers and words only.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.core.errors import ContextLengthError
from headrace.core.request import SamplingParams


def check_fits_context(
    *,
    prompt_tokens: int,
    context_tokens: int,
    max_tokens: int | None = None,  # of the answer, if the request sets it
    where: str = "prompt",  # what the request calls its prompt
    max_tokens_name: str = "max_tokens",
) -> None:
    """Refuses a prompt that leaves no room for an answer, and a max_tokens that does not fit into
    the room that is left."""
    if prompt_tokens >= context_tokens:
        raise ContextLengthError(
            f"{longest(context_tokens)} However, your {where} resulted in {prompt_tokens} tokens, "
            "and an answer needs at least one.",
            # LangChain searches for the first words of this remedy.
            f"The prompt is too long: shorten the {where} to {context_tokens - 1} tokens or fewer.",
            param=where,
            prompt_tokens=prompt_tokens,
            most_tokens=context_tokens - 1,
        )
    room_tokens = context_tokens - prompt_tokens
    if max_tokens is not None and max_tokens > room_tokens:
        raise ContextLengthError(
            f"{longest(context_tokens)} However, you requested {prompt_tokens + max_tokens} tokens "
            f"({prompt_tokens} in the {where}, {max_tokens} in the completion).",
            f"Lower {max_tokens_name} to {room_tokens} or less, leave it out for an answer up to "
            f"the end of the context, or shorten the {where}.",
            param=max_tokens_name,
            prompt_tokens=prompt_tokens,
            most_tokens=context_tokens - max_tokens,
        )


def default_params(
    usual: SamplingParams, *, prompt_tokens: int, context_tokens: int
) -> SamplingParams:
    """For a request without parameters: the usual max_tokens, or the room that is left if that is
    less."""
    room_tokens = context_tokens - prompt_tokens
    if usual.max_tokens is None or not 0 < room_tokens < usual.max_tokens:
        return usual
    return replace(usual, max_tokens=room_tokens)


def longest(context_tokens: int) -> str:
    return f"This model's maximum context length is {context_tokens} tokens."
