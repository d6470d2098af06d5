"""`LLM`: a model in this process, for use as a library.

    from headrace import LLM, SamplingParams
    outputs = LLM().generate(["The capital of France is"], SamplingParams(temperature=0))
    print(outputs[0].outputs[0].text)

Drives the engine itself, so it is not safe to use from several threads at once: `AsyncEngine`
(async_engine.py) is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.assemble import assemble
from headrace.core import collector
from headrace.core.closes import Closes
from headrace.core.config import EngineConfig
from headrace.core.constraint import GrammarSpec
from headrace.core.context import default_params
from headrace.core.errors import HeadraceError, InvalidRequestError, TemplateError
from headrace.core.request import (
    BeamParams,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    TokenEvent,
)
from headrace.core.sampling import DrawNumbers
from headrace.core.step import Threaded
from headrace.engine.stats import EngineStats
from headrace.fetch.catalog import Progress, silent
from headrace.models.spec import ModelSpec
from headrace.text import OutputBuilder, Prompt, RequestText, make_request
from headrace.tokenizer.chat_template import ChatTemplate
from headrace.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, object]


class LLM(Closes):
    """A model that answers. `model` is a catalog name, a GGUF file, a folder or a hub id; the
    default model is fetched on first use. `settings` are the fields of EngineConfig:
    `LLM(kv_memory="4GiB", max_sequences=16)`."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        offline: bool = False,
        progress: Progress = silent,
        **settings: Any,
    ) -> None:
        self._assembled = assemble(
            None if model is None else str(model),
            config=config,
            offline=offline,
            progress=progress,
            **settings,
        )
        self._engine = self._assembled.engine
        self._request_numbers = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._assembled.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._assembled.chat_template

    @property
    def spec(self) -> ModelSpec:
        return self._assembled.spec

    @property
    def model_path(self) -> Path:
        return self._assembled.model_path

    @property
    def sampling_defaults(self) -> DrawNumbers:
        """The model's default sampling values, for what SamplingParams leave open."""
        return self._assembled.sampling_defaults

    @property
    def context_tokens(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return self._assembled.runner.limits.context_tokens

    @property
    def stats(self) -> EngineStats:
        """What the engine counted: steps, preemptions, prefix hits and misses."""
        return self._engine.stats

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on values that differ from what one might expect, such as a shorter context."""
        return self._assembled.notes

    def memory_report(self) -> str:
        """The memory ledger: predicted sizes beside allocated ones."""
        return self._assembled.ledger.render(self._assembled.allocated)

    def threads_report(self) -> str | None:
        """A note if the machine was too busy to run all threads since the last call; None if it was
        not, or the backend uses no threads."""
        runner = self._assembled.runner
        if not isinstance(runner, Threaded):
            return None
        mean, threads = runner.take_mean_threads(), runner.threads
        if mean > 0.9 * threads:
            return None
        return (
            f"{mean:.1f} of {threads} threads on average: the machine is busy with something else"
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
        speculate: str | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; all are computed together. `params` is one for all, or one each;
        what it leaves open comes from the model's `sampling_defaults`, as in the server and
        `headrace run`. With a `grammar` every answer matches it, unless max_tokens cuts it off. A
        max_tokens that does not fit the context is refused; None continues to the context's end.
        `speculate` says who guesses tokens ahead (auto, off, ngram, suffix, draft), if not as the
        engine's own setting; answers are the same."""
        listed = _list_prompts(prompts)
        requests = [
            self._request(
                prompt,
                param,
                priority=priority,
                cache_salt=cache_salt,
                grammar=grammar,
                speculate=speculate,
            )
            for prompt, param in zip(listed, _list_params(params, len(listed)), strict=True)
        ]
        for request in requests if params is None else ():
            request.params = default_params(
                request.params,
                prompt_tokens=len(request.prompt_token_ids),
                context_tokens=self.context_tokens,
            )
        return self._complete(requests, listed)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages), or each of several."""
        template = self._assembled.chat_template
        if template is None:
            raise TemplateError(
                f"{self.model_path.name} has no chat template.", "Use generate() instead of chat()."
            )
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [template.encode(each) for each in several]  # type: ignore[arg-type]
        return self.generate(prompts, params)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamParams
    ) -> list[RequestOutput]:
        """The `beam_width` best complete continuations of each prompt, best first."""
        listed = _list_prompts(prompts)
        requests = [self._request(prompt, SamplingParams(), beam=params) for prompt in listed]
        return self._complete(requests, listed)

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """Each prompt's embedding: the mean over its tokens of the last hidden states, after the
        final norm. Not normalised. The model was not trained for embeddings: they measure rough
        similarity only."""
        requests = [
            self._request(prompt, SamplingParams(), embed=True) for prompt in _list_prompts(prompts)
        ]
        found: dict[str, list[float]] = {}
        try:
            for request in requests:
                self._engine.add(request)
            while self._engine.has_work:
                for token in self._engine.step():
                    if token.embedding is None:
                        raise HeadraceError(f"Request {token.request_id} failed: {token.error}")
                    found[token.request_id] = token.embedding
        except BaseException:
            for request in requests:
                self._engine.cancel(request.request_id)
            raise
        return [found[request.request_id] for request in requests]

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[TokenEvent]:
        """Continue one prompt, a token at a time. Closing the iterator ends the request; so
        does `stopped`, which is called before each step, also during a long prefill."""
        request = self._request(prompt_token_ids, params)
        self._engine.check(request)  # raises here and not at the first `next`
        return self._stream(request, stopped)

    def close(self) -> None:
        self._assembled.close()

    def _stream(
        self, request: GenerateRequest, stopped: Callable[[], bool]
    ) -> Iterator[TokenEvent]:
        text = RequestText(self.tokenizer, request)
        try:
            self._engine.add(request)
            while not (stopped() or text.is_complete):
                for token in self._engine.step():
                    if token.request_id == request.request_id and (event := text.push(*token.row)):
                        yield event
                        if event.finish_reason is not None and token.finish_reason is None:
                            self._engine.stop(token.request_id, token.index)
        finally:
            self._engine.cancel(request.request_id)

    def _complete(
        self, requests: list[GenerateRequest], prompts: list[Prompt]
    ) -> list[RequestOutput]:
        texts = {r.request_id: RequestText(self.tokenizer, r) for r in requests}
        outputs = {
            r.request_id: OutputBuilder(r, prompt if isinstance(prompt, str) else None)
            for r, prompt in zip(requests, prompts, strict=True)
        }
        # One grammar for all: compiled once, each request uses a copy.
        grammar = requests[0].grammar
        started = None if grammar is None else self._assembled.grammars.compile(grammar)
        try:
            for request in requests:
                self._engine.add(request, None if started is None else started.fork())
            with collector.rarely():
                self._run(texts, outputs)
        except BaseException:
            for request in requests:
                self._engine.cancel(request.request_id)
            raise
        return [outputs[request.request_id].build() for request in requests]

    def _run(self, texts: dict[str, RequestText], outputs: dict[str, OutputBuilder]) -> None:
        """Runs steps until all requests are done."""
        while self._engine.has_work:
            for token in self._engine.step():
                if event := texts[token.request_id].push(*token.row):
                    outputs[token.request_id].add(event)
                    if event.finish_reason is not None and token.finish_reason is None:
                        # Ended by a stop string, which the engine does not know.
                        self._engine.stop(token.request_id, token.index)

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        beam: BeamParams | None = None,
        priority: int = 0,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
        embed: bool = False,
        speculate: str | None = None,
    ) -> GenerateRequest:
        return make_request(
            self.tokenizer,
            self.spec.vocab_size,
            str(next(self._request_numbers)),
            prompt,
            params.settled(self._assembled.sampling_defaults),
            beam=beam,
            priority=priority,
            cache_salt=cache_salt,
            grammar=grammar,
            embed=embed,
            speculate=speculate,
        )


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not prompts:
        raise InvalidRequestError(
            "prompts is empty; expected a text, token ids, or a list of them.",
            "Give at least one prompt.",
            param="prompts",
        )
    if all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _list_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling parameters for {count} prompts; expected one for all or one "
            "each.",
            "Make the two lists equally long.",
            param="params",
        )
    return list(params)
