"""What a caller asks for and what comes back: sampling parameters, requests, events, outputs.

Standard library only. Knows nothing of sequences, blocks or models; values are checked here, at
the edge, so that nothing behind it needs to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from headrace.core import bounds
from headrace.core.bounds import Bound, shown
from headrace.core.constraint import GrammarSpec
from headrace.core.errors import InvalidRequestError, remedy_for
from headrace.core.habits import NEUTRAL, Habits

MAX_LOGPROBS = bounds.LOGPROBS.most
MAX_N = bounds.CONTINUATIONS.most
MAX_SEED = 2**64 - 1


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's words."""

    STOP = "stop"  # an end-of-text token, a stop string or a stop id
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller went away
    TIMEOUT = "timeout"  # timeout_s passed
    ERROR = "error"  # this sequence failed; SampledToken.error says how
    REFUSED = "refused"  # likewise, by the request's own fault, which showed only on the way


def _refuse(param: str, found: object, expected: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} is {shown(found)}; expected {expected}.", remedy_for(param, expected), param=param
    )


def _number(param: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _refuse(param, value, "a finite number")
    return float(value)


def _integer(param: str, value: object, low: int, high: int | None = None) -> None:
    wanted = f"{low} or more" if high is None else f"{low} to {high}"
    if not isinstance(value, int):
        wanted = f"a whole number, {wanted}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise _refuse(param, value, wanted)
    if high is not None and value > high:
        raise _refuse(param, value, wanted)


def _strings(param: str, values: Sequence[str], most: Bound, longest: Bound) -> None:
    most.check(param, len(values))
    if not all(isinstance(value, str) and value for value in values):
        raise _refuse(param, values, "non-empty strings")
    longest.check(param, max(map(len, values), default=0))


def _ids(param: str, ids: Collection[int], most: Bound) -> None:
    """Checked without a step of Python's for each: there may be a vocabulary of them."""
    most.check(param, len(ids))
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0):
        return
    for token in ids:
        _integer(param, token, 0)


def _biases(values: Collection[float]) -> None:
    if set(map(type, values)) <= {int, float} and all(map(math.isfinite, values)):
        value = max(values, key=abs, default=0)
        if not -100 <= value <= 100:
            raise _refuse("logit_bias", value, "values from -100 to 100")
        return
    for value in values:
        if not -100 <= _number("logit_bias", value) <= 100:
            raise _refuse("logit_bias", value, "values from -100 to 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop. Named as vLLM and OpenAI users know them.

    None in temperature, top_p, top_k or repetition_penalty is the model's own (core/habits.py),
    each by itself: SamplingParams(temperature=1.0) keeps the model's top_p.
    """

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None  # 0 (or -1) keeps all
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float | None = None  # over prompt and output; above 1 discourages
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output, by count
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    max_tokens: int | None = 256  # None: up to the context length
    min_tokens: int = 0
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # false: control tokens are part of the text
    include_stop_str_in_output: bool = False  # keep the stop string, or a stop token's text
    logprobs: int | None = None  # alternatives to give with each token of the output
    prompt_logprobs: int | None = None  # likewise for the prompt
    n: int = 1
    best_of: int | None = None  # generate so many, give the n likeliest

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        _integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        if self.top_k is not None:
            object.__setattr__(self, "top_k", max(self.top_k, 0))
        self._check_lists()

    def _check_lists(self) -> None:
        """Each is bounded before it is walked, and one shape for all readers afterwards."""
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        _strings("stop", stops, bounds.STOP_STRINGS, bounds.STOP_CHARACTERS)
        _strings("bad_words", self.bad_words, bounds.BAD_WORDS, bounds.BAD_WORD_CHARACTERS)
        _ids("stop_token_ids", self.stop_token_ids, bounds.STOP_TOKENS)
        _ids("logit_bias", self.logit_bias, bounds.BIASED_TOKENS)
        _biases(self.logit_bias.values())
        # Frozen, so through object's own setter.
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        if (allowed := self.allowed_token_ids) is not None:
            if not allowed:
                raise _refuse("allowed_token_ids", allowed, "at least one id")
            _ids("allowed_token_ids", allowed, bounds.ALLOWED_TOKENS)
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(allowed)))

    @property
    def chosen(self) -> Habits:
        """The four that a model may have habits of, as numbers: neutral where nobody chose."""
        return _overlaid(self, NEUTRAL)

    def settled(self, habits: Habits) -> SamplingParams:
        """The same with nothing left open: `habits` where this says nothing."""
        settled = copy(self)  # its lists were checked when this was made, and are the same
        found = _overlaid(self, habits)
        for name in ("temperature", "top_p", "top_k", "repetition_penalty"):
            object.__setattr__(settled, name, getattr(found, name))
        return settled

    def _check_numbers(self) -> None:
        if self.temperature is not None and _number("temperature", self.temperature) < 0:
            raise _refuse("temperature", self.temperature, "0 (greedy) or more")
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            if (value is not None or name != "top_p") and not 0 < _number(name, value) <= 1:
                raise _refuse(name, value, "above 0 and at most 1")
        if not 0 <= _number("min_p", self.min_p) <= 1:
            raise _refuse("min_p", self.min_p, "0 to 1")
        penalty = self.repetition_penalty
        if penalty is not None and not 0 < _number("repetition_penalty", penalty) <= 100:
            raise _refuse("repetition_penalty", penalty, "above 0 and at most 100")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _number(name, getattr(self, name)) <= 2:
                raise _refuse(name, getattr(self, name), "-2 to 2")
        if self.top_k is not None:
            _integer("top_k", self.top_k, -1)


def _overlaid(params: SamplingParams, habits: Habits) -> Habits:
    return Habits(
        temperature=habits.temperature if params.temperature is None else params.temperature,
        top_p=habits.top_p if params.top_p is None else params.top_p,
        top_k=habits.top_k if params.top_k is None else params.top_k,
        repetition_penalty=(
            habits.repetition_penalty
            if params.repetition_penalty is None
            else params.repetition_penalty
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search: the likeliest whole continuations rather than one token at a time."""

    beam_width: int
    max_tokens: int = 256
    length_penalty: float = 1.0  # score = logprob / length ** length_penalty
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, MAX_N)
        _integer("max_tokens", self.max_tokens, 1)
        _number("length_penalty", self.length_penalty)


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, already token ids, and how to continue it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    beam: BeamParams | None = None  # search instead of sampling; of `params` nothing is used
    bad_token_ids: Sequence[Sequence[int]] = ()  # params.bad_words, tokenized
    priority: int = 0  # lower goes first, where the policy looks at it
    cache_salt: str = ""  # prefixes are shared only among requests with the same salt
    timeout_s: float | None = None  # from arrival; ends the request wherever it is
    # Whose it is, for turns to be shared by; "" is everybody who did not say. Tells nothing else.
    tenant: str = ""
    weight: int = 1  # of that tenant: twice the weight, twice the turns
    grammar: GrammarSpec | None = None  # what the output must match; goes with a Constraint
    # Compute the prompt and nothing more: one SampledToken comes, with an `embedding` and no token.
    embed: bool = False


# A prompt's token: its logprob, and the likeliest in its place with theirs.
PromptScore = tuple[float, Sequence[tuple[int, float]]]


class TokenExtras(Protocol):
    """What few tokens have; see SampledToken."""

    @property
    def top(self) -> Sequence[tuple[int, float]]: ...

    @property
    def error(self) -> str | None: ...

    @property
    def prompt_scores(self) -> Sequence[PromptScore] | None: ...

    @property
    def embedding(self) -> list[float] | None: ...


@dataclass(slots=True, kw_only=True)  # not frozen: there is one for every token
class SampledToken:
    """What the engine gives: a token of a request, and the end where it is the last."""

    request_id: str
    token_id: int
    logprob: float
    index: int = 0  # which of the request's n continuations
    top: Sequence[tuple[int, float]] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    # With the first token of a request's first continuation, which comes before all others, if
    # asked for: one for each prompt token but the first.
    prompt_scores: list[PromptScore] | None = None
    embedding: list[float] | None = None  # see GenerateRequest.embed; not normalised

    @property
    def row(self) -> tuple[int, int, float, FinishReason | None, TokenExtras]:
        """As text.RequestText.push takes it."""
        return self.index, self.token_id, self.logprob, self.finish_reason, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A request's turn has come: its first sequence is running. There is one for each request that
    runs, so that one whose time passed (FinishReason.TIMEOUT) without it never left the queue."""

    request_id: str
    waited_s: float
    cached_tokens: int  # of its prompt, found in the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token's logprob among all tokens, and its place among them where that is known."""

    logprob: float
    rank: int | None  # 1 is the likeliest; None: not among those that were asked for
    decoded_token: str


# A place in a text: the token that is there and the likeliest others, by id.
Logprobs = dict[int, Logprob]


@dataclass(slots=True, kw_only=True)  # not frozen, which would take twice the time to make
class TokenEvent:
    """What streams out to a caller: a token and the text that it completed. A last event that
    brings no token (a timeout) has a token_id of None."""

    request_id: str
    token_id: int | None
    text: str  # may be empty while a UTF-8 character or a possible stop string is incomplete
    logprob: float
    index: int = 0  # which of the request's n continuations
    logprobs: Logprobs | None = None  # if asked for
    prompt_logprobs: list[Logprobs | None] | None = None  # if asked for, with the first token
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  # which of the request's ended it, if one did
    embedding: list[float] | None = None  # see GenerateRequest.embed


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One finished continuation."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its continuations, shaped as vLLM's: `out.outputs[0].text`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None = None  # None for the first token
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
