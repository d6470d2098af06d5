"""What a caller asks for and what comes back: sampling parameters, requests, events, outputs.

Standard library only. Knows nothing of sequences, blocks or models; values are checked here, at
the edge, so that nothing behind it needs to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_SEED = 2**64 - 1


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's words."""

    STOP = "stop"  # an end-of-text token, a stop string or a stop id
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # this sequence failed; SampledToken.error says how


def _refuse(param: str, found: object, expected: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} is {found!r}; expected {expected}.", f"Set {param} accordingly.", param=param
    )


def _number(param: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _refuse(param, value, "a finite number")
    return float(value)


def _integer(param: str, value: object, low: int, high: int | None = None) -> None:
    wanted = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise _refuse(param, value, wanted)
    if high is not None and value > high:
        raise _refuse(param, value, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop. Named as vLLM and OpenAI users know them."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 (or -1) keeps all
    min_p: float = 0.0
    max_tokens: int | None = 256  # None: up to the context length
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if _number("temperature", self.temperature) < 0:
            raise _refuse("temperature", self.temperature, "0 (greedy) or more")
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise _refuse("top_p", self.top_p, "a number in (0, 1]")
        if not 0 <= _number("min_p", self.min_p) <= 1:
            raise _refuse("min_p", self.min_p, "a number in [0, 1]")
        _integer("top_k", self.top_k, -1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in stops):
            raise _refuse("stop", self.stop, f"at most {MAX_STOP_STRINGS} non-empty strings")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        # One shape for all readers; frozen, so through object's own setter.
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "top_k", max(self.top_k, 0))


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, already token ids, and how to continue it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """What the engine gives: a token of a request, and the end where it is the last."""

    request_id: str
    token_id: int
    logprob: float
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What streams out to a caller: a token and the text that it completed."""

    request_id: str
    token_id: int
    text: str  # may be empty while a UTF-8 character or a possible stop string is incomplete
    logprob: float
    finish_reason: FinishReason | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One finished continuation."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    finish_reason: str | None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its continuations, shaped as vLLM's: `out.outputs[0].text`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
