"""Who guesses tokens: the words of `--speculate` and of a request's `speculate`, read and checked.

    auto  off  ngram  suffix  draft:MODEL  synthetic:RATE

Standard library only. Knows no drafter; speculate/ has them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.core.checks import ErrorType
from headrace.core.errors import ConfigError, HeadraceError, InvalidRequestError

MOST_DRAFT_TOKENS = 64  # in one step, for one sequence
KEPT_TOKENS = 262_144  # of past answers, all keys together
KEPT_BYTES_PER_TOKEN = 150  # with the index to find matches in: measured


class Method(StrEnum):
    AUTO = "auto"  # suffix
    OFF = "off"
    NGRAM = "ngram"  # what followed the same tokens in the prompt or the answer
    SUFFIX = "suffix"  # likewise, and in past answers of the same key; the places vote
    DRAFT = "draft"  # a smaller model
    SYNTHETIC = "synthetic"  # a set share of right tokens, for load tests


@dataclass(frozen=True, slots=True)
class Drafter:
    method: Method
    model: str = ""  # of `draft`
    rate: float = 0.0  # of `synthetic`


def read_drafter(text: str, param: str, error: ErrorType) -> Drafter:
    """As written for a whole engine."""
    word, _, rest = text.partition(":")
    try:
        method = Method(word.strip().lower())
    except ValueError:
        raise _unknown(text, param, error) from None
    if method is Method.DRAFT:
        if not rest:
            cause = f"{param} is 'draft' without a model; expected draft:MODEL."
            raise error(cause, "Name a smaller model with the same vocabulary.", param=param)
        return Drafter(method, model=rest)
    if method is Method.SYNTHETIC:
        return Drafter(method, rate=_rate(text, rest, param, error))
    if rest:
        raise error(
            f"{param} is {text!r}; {word} takes nothing behind a colon.",
            f"Write {word}; draft:MODEL names a model.",
            param=param,
        )
    return Drafter(method)


def kept_bytes(drafter: str) -> int:
    """The host's memory, at most, for past answers that tokens are guessed from."""
    method = read_drafter(drafter, "speculate", ConfigError).method
    return KEPT_TOKENS * KEPT_BYTES_PER_TOKEN if method in (Method.AUTO, Method.SUFFIX) else 0


def check_asked(asked: Method | None, engine: str | None, *, is_beam_search: bool) -> None:
    """Refuses a request for a drafter that the engine, whose own setting is `engine` (None: off),
    does not have."""
    if asked in (None, Method.OFF, Method.AUTO):
        return
    if is_beam_search:
        raise InvalidRequestError(
            f"The request asks for a beam search and for speculate={asked}; expected one or the "
            "other: guesses are for one continuation.",
            "Leave speculate out, or sample instead of searching.",
            param="speculate",
        )
    has = read_drafter(engine or Method.OFF, "speculate", ConfigError).method
    if has is Method.OFF:
        raise InvalidRequestError(
            f"speculate is {asked}, and this engine guesses no tokens: its own setting is off.",
            "Leave speculate out, or start the engine with --speculate auto.",
            param="speculate",
        )
    if asked is Method.DRAFT and has is not Method.DRAFT:
        raise InvalidRequestError(
            f"speculate is draft, and this engine has no draft model: its own setting is {has}.",
            "Ask for suffix, or start the engine with --speculate draft:MODEL.",
            param="speculate",
        )


def _rate(text: str, rest: str, param: str, error: ErrorType) -> float:
    try:
        rate = float(rest)
    except ValueError:
        rate = -1.0
    if 0 <= rate <= 1:
        return rate
    raise error(
        f"{param} is {text!r}; expected synthetic:RATE with a rate from 0 to 1.",
        "Write the share of right guesses, as in synthetic:0.8.",
        param=param,
    )


def _unknown(text: str, param: str, error: ErrorType) -> HeadraceError:
    words = ("auto", "off", "ngram", "suffix", "draft:MODEL", "synthetic:RATE")
    if text.strip().isdigit():  # the same flag of Text Generation Inference
        remedy = f"Write ngram, and max_draft_tokens for {text.strip()} tokens at a time."
    elif near := difflib.get_close_matches(text.lower().partition(":")[0], Method, n=1):
        remedy = f"Did you mean {next(word for word in words if word.startswith(near[0]))}?"
    else:
        remedy = f"Use {', '.join(words[:-1])} or {words[-1]}."
    cause = f"{param} is {text!r}; expected one of {', '.join(words)}."
    return error(cause, remedy, param=param)


class DrafterText:
    """The rule of a setting that names a drafter; kept as it was written."""

    def settled(self, param: str, value: Any, error: ErrorType) -> str:
        if not isinstance(value, str):
            raise _unknown(str(value), param, error)
        read_drafter(value, param, error)
        return value


class DrafterWord:
    """The rule of a request's field: which of the engine's drafters to use. A model is named by the
    engine's own setting, so here it is just `draft`."""

    def settled(self, param: str, value: Any, error: ErrorType) -> Method:
        words = [each for each in Method if each is not Method.SYNTHETIC]
        if value in tuple(words):
            return Method(value)
        near = difflib.get_close_matches(str(value).lower(), words, n=1)
        expected = ", ".join(words)
        raise error(
            f"{param} is {str(value)[:40]!r}; expected one of {expected}.",
            f"Did you mean {near[0]}?" if near else f"Use one of {expected}, or leave it out.",
            param=param,
        )
