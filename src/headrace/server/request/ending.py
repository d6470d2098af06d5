"""How an answer ended, in OpenAI's words, of which it has fewer than the engine.

A request whose time passed before its first token was not answered: 503, to be sent again. One
that was cut by it later ended as one cut by its length does: finish_reason "length", with
stop_reason "timeout" beside it for who wants to tell them apart. A stream that fails after it
began ends with an event that says so.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from headrace.core.errors import HeadraceError, QueueTimeoutError
from headrace.core.request import FinishReason, TokenEvent


def ending(reason: str) -> tuple[str, str | None]:
    """A FinishReason, which is a text, as finish_reason and stop_reason."""
    if reason == FinishReason.TIMEOUT:
        return "length", "timeout"
    return str(reason), None


def check_timeout(event: TokenEvent, output_tokens: int) -> None:
    """Refuses a request that ran out of time before anything of it could be answered."""
    if event.finish_reason is FinishReason.TIMEOUT and not output_tokens:
        raise _out_of_time("its first token")


def check_time_left(left_s: float) -> None:
    """Likewise, of one that has several parts to be answered one after the other."""
    if left_s <= 0:
        raise _out_of_time("all of it was answered")


async def with_ending(
    events: AsyncGenerator[bytes], fail: Callable[[HeadraceError], bytes]
) -> AsyncGenerator[bytes]:
    """The events, and where an error ends them, `fail`'s; one that comes before the first is
    raised, as it still has a status of its own."""
    begun = False
    try:
        async with aclosing(events):
            async for chunk in events:
                begun = True
                yield chunk
    except HeadraceError as error:
        if not begun:
            raise
        yield fail(error)


def _out_of_time(what: str) -> QueueTimeoutError:
    return QueueTimeoutError(
        f"The request's timeout_s passed before {what}.",
        "Send it again later, or give it more time.",
        retry_after_s=1.0,
        param="timeout_s",
    )
