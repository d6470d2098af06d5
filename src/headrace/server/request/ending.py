"""How an answer ended, in OpenAI's terms, which are fewer than the engine's.

A request that timed out before its first token gets a 503 and may be sent again. One that timed out
later ends with finish_reason "length", as at max_tokens, and stop_reason "timeout" to tell the two
apart. A stream that fails after it began ends with an error event.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from headrace.core.errors import HeadraceError, QueueTimeoutError
from headrace.core.request import FinishReason, TokenEvent


def ending(reason: str) -> tuple[str, str | None]:
    """A FinishReason as OpenAI's finish_reason and our stop_reason."""
    if reason == FinishReason.TIMEOUT:
        return "length", "timeout"
    return str(reason), None


def check_timeout(event: TokenEvent, output_tokens: int) -> None:
    """Raises for a request that timed out before its first token."""
    if event.finish_reason is FinishReason.TIMEOUT and not output_tokens:
        raise _out_of_time("its first token")


def check_time_left(left_s: float) -> None:
    """The same for a request with several parts that are answered one after the other."""
    if left_s <= 0:
        raise _out_of_time("all of it was answered")


async def with_ending(
    events: AsyncGenerator[bytes], fail: Callable[[HeadraceError], bytes]
) -> AsyncGenerator[bytes]:
    """The events; if an error ends them, `fail` makes the last one. An error before the first event
    is raised, since it can still have its own status."""
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
        "Send it again later, or with a larger timeout_s.",
        retry_after_s=1.0,
        param="timeout_s",
    )
