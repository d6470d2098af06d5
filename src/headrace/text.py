"""Between a caller's text and the engine's tokens: prompts in, events and outputs out.

Used by the library (llm.py), by the async engine and by servers. Knows tokenizers and requests;
neither engine nor backend.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from headrace.core.bounds import shown
from headrace.core.constraint import GrammarSpec
from headrace.core.drafter import Method
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import (
    BeamParams,
    CompletionOutput,
    FinishReason,
    GenerateRequest,
    Logprob,
    Logprobs,
    PromptScore,
    RequestOutput,
    SamplingParams,
    TokenEvent,
    TokenExtras,
)
from headrace.tokenizer.detokenize import StreamDetokenizer
from headrace.tokenizer.stop import StopChecker, StopStrings
from headrace.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids


def make_request(
    tokenizer: Tokenizer,
    vocab_size: int,
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    *,
    beam: BeamParams | None = None,
    priority: int = 0,
    cache_salt: str = "",
    timeout_s: float | None = None,
    grammar: GrammarSpec | None = None,
    embed: bool = False,
    speculate: str | None = None,
    bad_ids: Sequence[Sequence[int]] | None = None,
) -> GenerateRequest:
    """A request for the engine, with every token id checked against the vocabulary. `bad_ids` are
    the ids of its bad words, if the caller has found them already (in a thread: it may take
    long)."""
    token_ids = _encode(tokenizer, prompt)
    check_ids("prompt", token_ids, vocab_size)
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_ids("logit_bias", params.logit_bias, vocab_size)
    if bad_ids is None:
        bad_ids = bad_token_ids(tokenizer, params.bad_words)
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        params=params,
        beam=beam,
        bad_token_ids=bad_ids,
        priority=priority,
        cache_salt=cache_salt,
        timeout_s=timeout_s,
        grammar=grammar,
        embed=embed,
        speculate=cast("Method | None", speculate),  # its rule reads the word
    )


def bad_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """A word as it is tokenized at the start of a text and after a space."""
    spelled: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            if ids := tokenizer.encode(text, add_bos=False):
                spelled.setdefault(tuple(ids))
    return [list(ids) for ids in spelled]


def _encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    if not prompt:
        raise InvalidRequestError(
            "The prompt is empty; expected at least one character.",
            "Give some text or token ids.",
            param="prompt",
        )
    return tokenizer.encode(prompt)


def check_ids(param: str, ids: Collection[int], size: int) -> None:
    """Refuses ids outside the vocabulary. Checks all at once first, since there may be many."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < size):
        return
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise InvalidRequestError(
                f"{param} has the token id {shown(token)}; expected integers from 0 to {size - 1}.",
                "Encode the text with this model's tokenizer.",
                param=param,
            )


class RequestText:
    """Turns the tokens of one request's continuations into events, cut at its stop strings.
    `shown_ids` are control tokens whose text is to be shown, such as a tool call's tags."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerateRequest,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        params = request.params
        self._shown_ids = shown_ids if params.skip_special_tokens else tokenizer.special_ids
        self._hidden_ends: frozenset[int] = frozenset()  # end tokens that are not shown
        if not params.include_stop_str_in_output:
            self._hidden_ends = tokenizer.eos_ids.union(params.stop_token_ids)
        self._stops = StopStrings(params.stop)
        self._shown_texts: dict[int, str] = {}  # cache of texts for tokens in logprobs
        self._streams: dict[int, tuple[StreamDetokenizer, StopChecker]] = {}
        if request.beam is None:
            self._open = request.params.best_of or request.params.n
        else:
            self._open = request.beam.beam_width
        self._ended: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every continuation has ended."""
        return len(self._ended) >= self._open

    def push(
        self,
        index: int,
        token_id: int,
        logprob: float,
        reason: FinishReason | None,
        extras: TokenExtras | None,
    ) -> TokenEvent | None:
        """The event for a token (fields as SampledToken's); None for one after a stop string,
        which is not shown."""
        if index in self._ended:
            return None
        if extras is not None and extras.error is not None:
            is_own_fault = reason is FinishReason.REFUSED
            kind = InvalidRequestError if is_own_fault else HeadraceError
            raise kind(f"Request {self._request.request_id} failed: {extras.error.rstrip('.')}.")
        params = self._request.params
        if index not in self._streams:
            self._streams[index] = (
                StreamDetokenizer(self._tokenizer, shown_ids=self._shown_ids),
                StopChecker(self._stops),
            )
        detokenizer, stops = self._streams[index]
        is_hidden = reason is FinishReason.STOP and token_id in self._hidden_ends
        new = detokenizer.push(token_id) if token_id >= 0 and not is_hidden else ""
        if reason is not None:
            new += detokenizer.finish()
        text, stopped = stops.push(new)
        if stopped:
            reason = FinishReason.STOP
            text += (stops.met or "") if params.include_stop_str_in_output else ""
        elif reason is not None:
            text += stops.finish()
        if reason is not None:
            self._ended.add(index)
        logprobs = prompt_logprobs = None
        if params.logprobs is not None and token_id >= 0:
            top = () if extras is None else extras.top[: params.logprobs]
            logprobs = self._logprobs(token_id, logprob, top)
        if params.prompt_logprobs is not None and extras is not None:
            prompt_logprobs = self._prompt_logprobs(extras.prompt_scores, params.prompt_logprobs)
        return TokenEvent(
            request_id=self._request.request_id,
            token_id=token_id if token_id >= 0 else None,
            text=text,
            logprob=logprob,
            index=index,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_string=stops.met,
            embedding=None if extras is None else extras.embedding,
        )

    def _prompt_logprobs(
        self, scores: Sequence[PromptScore] | None, wanted: int
    ) -> list[Logprobs | None] | None:
        if scores is None:
            return None
        found: list[Logprobs | None] = [None]
        for token_id, (logprob, top) in zip(
            self._request.prompt_token_ids[1:], scores, strict=True
        ):
            found.append(self._logprobs(token_id, logprob, top[:wanted]))
        return found

    def _logprobs(
        self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]
    ) -> Logprobs:
        found = {
            other: Logprob(logprob=value, rank=rank, decoded_token=self._shown(other))
            for rank, (other, value) in enumerate(top, start=1)
        }
        if token_id not in found:
            found[token_id] = Logprob(
                logprob=logprob, rank=None, decoded_token=self._shown(token_id)
            )
        return found

    def _shown(self, token_id: int) -> str:
        found = self._shown_texts.get(token_id)
        if found is None:
            found = self._tokenizer.decode([token_id], skip_special=False, continuation=True)
            self._shown_texts[token_id] = found
        return found


class OutputBuilder:
    """Collects a request's events into a RequestOutput."""

    def __init__(self, request: GenerateRequest, prompt: str | None) -> None:
        self._request = request
        self._output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
        )
        self._completions: dict[int, CompletionOutput] = {}

    def add(self, event: TokenEvent) -> None:
        if event.prompt_logprobs is not None:
            self._output.prompt_logprobs = event.prompt_logprobs
        completion = self._completions.setdefault(
            event.index,
            CompletionOutput(index=event.index, text="", token_ids=[], cumulative_logprob=0.0),
        )
        completion.text += event.text
        if event.token_id is not None:
            completion.token_ids.append(event.token_id)
            completion.cumulative_logprob += event.logprob
        if event.logprobs is not None:
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs.append(event.logprobs)
        if event.finish_reason is not None:
            completion.finish_reason = event.finish_reason.value

    def build(self) -> RequestOutput:
        """The n continuations that were asked for: with best_of, the most likely ones."""
        found = [self._completions[index] for index in sorted(self._completions)]
        params = self._request.params
        if self._request.beam is None and params.best_of is not None:
            found.sort(key=lambda c: -c.cumulative_logprob)
            found = found[: params.n]
            for index, completion in enumerate(found):
                completion.index = index
        self._output.outputs = found
        return self._output
