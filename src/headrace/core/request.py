"""What a caller asks for and what comes back: sampling parameters, requests, events, outputs.

Standard library only. Knows nothing of sequences, blocks or models. Values are checked when they
are constructed, so that the code behind does not have to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from headrace.core import bounds
from headrace.core.checks import (
    MAX_COUNT,
    RULE,
    Range,
    Text,
    Texts,
    TokenIds,
    TokenValues,
    check_fields,
    refusal,
    within,
)
from headrace.core.constraint import GrammarSpec
from headrace.core.drafter import DrafterWord, Method
from headrace.core.errors import InvalidRequestError
from headrace.core.sampling import (
    FILTERS,
    MODEL_DEFAULTS,
    NEUTRAL,
    PENALTIES,
    DrawFields,
    DrawNumbers,
    Taken,
    row,
)

MAX_N = bounds.CONTINUATIONS.most
MAX_SEED = 2**64 - 1


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's words."""

    STOP = "stop"  # an end-of-text token, a stop string or a stop id
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller went away
    TIMEOUT = "timeout"  # timeout_s passed
    ERROR = "error"  # this sequence failed; SampledToken.error says how
    REFUSED = "refused"  # likewise, because of what the request asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(DrawFields):
    """How to choose the next token (the rows of core/sampling.py), and when to stop. The names are
    those of vLLM and OpenAI.

    None in a draw parameter means the model's default for that parameter:
    SamplingParams(temperature=1.0) keeps the model's top_p.
    """

    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        metadata={
            RULE: TokenValues(most=bounds.BIASED_TOKENS, values=Range(at_least=-100, at_most=100))
        },
    )
    allowed_token_ids: Sequence[int] | None = field(
        default=None,
        metadata=row("Draw only from these tokens.", Taken.COMPLETIONS)
        | {RULE: TokenIds(most=bounds.ALLOWED_TOKENS, may_be_empty=False, each_once=True)},
    )
    bad_words: Sequence[str] = field(
        default=(),
        metadata=row("Texts that may not be written.", Taken.COMPLETIONS)
        | {RULE: Texts(most=bounds.BAD_WORDS, longest=bounds.BAD_WORD_CHARACTERS)},
    )
    # None: up to the context length. Every API has its own name and default for it.
    max_tokens: int | None = field(
        default=256,
        metadata=row("Longest answer.", Taken.COMMANDS) | within(at_least=1, at_most=MAX_COUNT),
    )
    min_tokens: int = field(
        default=0,
        metadata=row("Fewest tokens before the answer may end.", Taken.COMPLETIONS)
        | within(at_least=0, at_most=MAX_COUNT),
    )
    seed: int | None = field(
        default=None,
        metadata=row("The same seed gives the same answer.", Taken.EVERYWHERE)
        | within(at_least=0, at_most=MAX_SEED),
    )
    stop: str | Sequence[str] = field(
        default=(),
        metadata=row("End at this text.", Taken.COMPLETIONS | Taken.RESPONSES | Taken.COMMANDS)
        | {RULE: Texts(most=bounds.STOP_STRINGS, longest=bounds.STOP_CHARACTERS)},
    )
    stop_token_ids: Sequence[int] = field(
        default=(),
        metadata=row("End at these tokens.", Taken.COMPLETIONS)
        | {RULE: TokenIds(most=bounds.STOP_TOKENS)},
    )
    ignore_eos: bool = field(
        default=False,
        metadata=row("Go on after the model's end-of-text token.", Taken.APIS),
    )
    skip_special_tokens: bool = field(
        default=True,
        metadata=row("False: control tokens are part of the text.", Taken.COMPLETIONS),
    )
    include_stop_str_in_output: bool = field(
        default=False,
        metadata=row(
            "Keep the stop string, or the text of the token that ended the answer.",
            Taken.COMPLETIONS,
        ),
    )
    # Alternatives to give with each token of the output, and of the prompt.
    logprobs: int | None = field(
        default=None, metadata=within(at_least=0, at_most=bounds.LOGPROBS.most)
    )
    prompt_logprobs: int | None = field(
        default=None, metadata=within(at_least=0, at_most=bounds.LOGPROBS.most)
    )
    n: int = field(
        default=1,
        metadata=row("How many continuations to give.", Taken.COMPLETIONS)
        | within(at_least=1, at_most=MAX_N),
    )
    # Generate this many, return the n likeliest.
    best_of: int | None = field(default=None, metadata=within(at_least=1, at_most=MAX_N))

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least, most in (
            ("min_tokens", 0, self.max_tokens),
            ("best_of", self.n, MAX_N),
        ):
            value = getattr(self, name)
            if value is not None and most is not None and not least <= value <= most:
                raise refusal(InvalidRequestError, name, value, f"{least} to {most}")
        if self.top_k is not None:
            object.__setattr__(self, "top_k", max(self.top_k, 0))  # frozen

    @property
    def chosen(self) -> DrawNumbers:
        """A number for every draw parameter: the neutral value for those that are None."""
        return DrawNumbers(**{name: _first(self, NEUTRAL, name) for name in (*FILTERS, *PENALTIES)})

    def settled(self, defaults: DrawNumbers) -> SamplingParams:
        """A copy with no draw parameter None: the model's `defaults` fill those in."""
        settled = copy(self)  # without checking the lists again: they are the same
        for name in MODEL_DEFAULTS:
            object.__setattr__(settled, name, _first(self, defaults, name))
        return settled


def _first(params: SamplingParams, defaults: DrawNumbers, name: str) -> Any:
    value = getattr(params, name)
    return getattr(defaults, name) if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """Beam search: the likeliest whole continuations rather than one token at a time."""

    beam_width: int = field(metadata=within(at_least=1, at_most=MAX_N))
    max_tokens: int = field(default=256, metadata=within(at_least=1, at_most=MAX_COUNT))
    length_penalty: float = 1.0  # score = logprob / length ** length_penalty
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


# A salt that begins so is used once: what is computed under it is not kept beyond the engine.
ONCE = "\0once "


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, already token ids, and how to continue it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    beam: BeamParams | None = None  # search instead of sampling; `params` is ignored
    bad_token_ids: Sequence[Sequence[int]] = ()  # params.bad_words, tokenized
    # Lower goes first, if the policy is `priority`.
    priority: int = field(default=0, metadata=within(at_least=-MAX_COUNT, at_most=MAX_COUNT))
    # Prefixes are shared only among requests with the same salt.
    cache_salt: str = field(
        default="",
        metadata={RULE: Text(longest=bounds.CACHE_SALT_CHARACTERS, may_be_empty=True)},
    )
    # Counted from arrival; ends the request, whether it waits or runs.
    timeout_s: float | None = field(default=None, metadata=within(above=0))
    # The tenant, for fair scheduling; requests without one share "". Used for nothing else.
    tenant: str = ""
    # The tenant's weight: twice the weight, twice the share.
    weight: int = field(default=1, metadata=within(at_least=1))
    # Who guesses tokens for it; None: as the engine's own setting says.
    speculate: Method | None = field(default=None, metadata={RULE: DrafterWord()})
    grammar: GrammarSpec | None = None  # what the output must match; goes with a Constraint
    # Compute only the prompt: the result is one SampledToken with an `embedding` and no token.
    embed: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


# A prompt token's logprob, and the likeliest tokens at its position with their logprobs.
PromptScore = tuple[float, Sequence[tuple[int, float]]]


class TokenExtras(Protocol):
    """The fields that only few tokens have; see SampledToken."""

    @property
    def top(self) -> Sequence[tuple[int, float]]: ...

    @property
    def error(self) -> str | None: ...

    @property
    def prompt_scores(self) -> Sequence[PromptScore] | None: ...

    @property
    def embedding(self) -> list[float] | None: ...


@dataclass(slots=True)  # neither frozen nor kw_only, for speed: there is one for every token
class SampledToken:
    """What the engine returns: a token of a request, with the finish reason if it is the last."""

    request_id: str
    token_id: int
    logprob: float
    index: int = 0  # which of the request's n continuations
    top: Sequence[tuple[int, float]] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    # If asked for: one for each prompt token except the first. Comes with the first token of the
    # request's first continuation, before all others.
    prompt_scores: list[PromptScore] | None = None
    embedding: list[float] | None = None  # see GenerateRequest.embed; not normalised
    # Of the guesses that the step checked: how many were right, and how many wrong. With the first
    # token of that step; None if there were none.
    drafted: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def row(self) -> tuple[int, int, float, FinishReason | None, TokenExtras]:
        """As text.RequestText.push takes it."""
        return self.index, self.token_id, self.logprob, self.finish_reason, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A request left the queue: its first sequence is running. Every request that runs has one; a
    request that ended with FinishReason.TIMEOUT and has none timed out in the queue."""

    request_id: str
    waited_s: float
    cached_tokens: int  # of its prompt, found in the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token's logprob, and its rank among all tokens where that is known."""

    logprob: float
    rank: int | None  # 1 is the likeliest; None: not among those that were asked for
    decoded_token: str


# One position of a text: the token that is there and the likeliest others, by id.
Logprobs = dict[int, Logprob]


@dataclass(slots=True, kw_only=True)  # not frozen: that would double the time to construct one
class TokenEvent:
    """What is streamed to a caller: a token and the text that it completed. A last event without a
    token (a timeout) has a token_id of None."""

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
