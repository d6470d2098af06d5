"""One answer on its way from a model to a screen: streamed, timed, stoppable.

Knows an LLM only by the methods it calls, and a screen only as something to write to. The history
of a conversation is in chat.py.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Protocol

from headrace.core.context import check_fits_context
from headrace.core.errors import InvalidRequestError
from headrace.core.request import FinishReason, SamplingParams, TokenEvent

Message = dict[str, str]

# A model's text may hold terminal control sequences; on a terminal they are shown, not obeyed.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_SHOWN = str.maketrans({c: t for c, t in _CONTROL.items() if chr(c) not in "\n\t"})


class Encodes(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Templates(Protocol):
    def encode(self, messages: Sequence[Mapping[str, object]]) -> list[int]: ...


class Answers(Protocol):
    """The part of headrace.LLM that an answer needs."""

    @property
    def tokenizer(self) -> Encodes: ...

    @property
    def chat_template(self) -> Templates | None: ...

    @property
    def context_tokens(self) -> int: ...

    def stream(
        self, prompt_token_ids: list[int], params: SamplingParams, *, stopped: Callable[[], bool]
    ) -> Iterator[TokenEvent]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    prompt_tokens: int
    answer_tokens: int
    first_token_s: float
    total_s: float
    finish_reason: FinishReason | None  # None: stopped by the reader

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None where there were too few tokens to measure."""
        rest_tokens, rest_s = self.answer_tokens - 1, self.total_s - self.first_token_s
        return rest_tokens / rest_s if rest_tokens > 0 and rest_s > 0 else None

    def summary(self) -> str:
        """One line of numbers for a person."""
        per_s = self.tokens_per_s
        speed = "" if per_s is None else f", then {per_s:.1f} tokens/s"
        return (
            f"prompt {self.prompt_tokens} tokens, answer {self.answer_tokens} tokens, "
            f"first token after {self.first_token_s:.2f} s{speed}"
        )


def printable(text: str) -> str:
    """Text safe to write to a terminal."""
    return text.translate(_SHOWN)


def encode_messages(llm: Answers, messages: Sequence[Message]) -> list[int]:
    if llm.chat_template is None:
        raise InvalidRequestError(
            "This model has no chat template, so it can't be given messages.",
            "Continue plain text instead: `headrace run --raw PROMPT`.",
        )
    return llm.chat_template.encode(messages)


def fit_params(
    params: SamplingParams,
    *,
    prompt_tokens: int,
    context_tokens: int,
    default_tokens: int,
    is_session: bool = False,
) -> SamplingParams:
    """The parameters with max_tokens set: the number asked for, else the default, limited by the
    room left in the context. For a single answer, a number that does not fit is refused; in a
    session it is an upper limit, and an answer that is cut earlier says so."""
    asked = params.max_tokens
    check_fits_context(
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
        max_tokens=None if is_session else asked,
        max_tokens_name="--max-tokens",
    )
    room_tokens = context_tokens - prompt_tokens
    if asked is not None and asked <= room_tokens:
        return params
    return replace(params, max_tokens=min(asked or default_tokens, room_tokens))


def stream_answer(
    llm: Answers,
    prompt_token_ids: list[int],
    params: SamplingParams,
    write: Callable[[str], object],
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Writes text as it arrives; ends early, between two steps, once `stopped()` is true."""
    start_s = time.perf_counter()
    first_token_s = 0.0
    finish_reason = None
    texts: list[str] = []
    tokens = 0
    events = llm.stream(prompt_token_ids, params, stopped=stopped)
    try:
        for event in events:
            tokens += 1
            if tokens == 1:
                first_token_s = time.perf_counter() - start_s
            if event.text:
                texts.append(event.text)
                write(event.text)
            finish_reason = event.finish_reason
            if stopped():
                break
    finally:
        close = getattr(events, "close", None)
        if close is not None:  # closing the generator ends the request
            close()
    return Answer(
        text="".join(texts),
        prompt_tokens=len(prompt_token_ids),
        answer_tokens=tokens,
        first_token_s=first_token_s,
        total_s=time.perf_counter() - start_s,
        finish_reason=finish_reason,
    )


@contextmanager
def catching_interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, a first Ctrl-C only makes the yielded function return True; a second one raises.

    An exception raised at an arbitrary point could leave the engine in an inconsistent state; a
    flag that is checked between tokens can't.
    """
    caught = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        if caught:
            raise KeyboardInterrupt
        caught = True

    if threading.current_thread() is not threading.main_thread():
        yield (
            lambda: False
        )  # only the main thread may set signal handlers, and only it gets the interrupt
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: caught
    finally:
        signal.signal(signal.SIGINT, before)
