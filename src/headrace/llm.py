"""`LLM`: a model in this process, for use as a library.

    from headrace import LLM, SamplingParams
    outputs = LLM().generate(["The capital of France is"], SamplingParams(temperature=0))
    print(outputs[0].outputs[0].text)

Text in, text out: tokenizes, drives the engine, detokenizes, and looks for stop strings. Not safe
to use from several threads at once; a server keeps its engine in a process of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from headrace.assemble import BackendName, assemble
from headrace.core.errors import HeadraceError, InvalidRequestError, TemplateError
from headrace.core.request import (
    CompletionOutput,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SampledToken,
    SamplingParams,
    TokenEvent,
)
from headrace.models.catalog import Progress, silent
from headrace.models.spec import ModelSpec
from headrace.tokenizer.chat_template import ChatTemplate
from headrace.tokenizer.detokenize import StreamDetokenizer
from headrace.tokenizer.stop import StopChecker
from headrace.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids
Message = Mapping[str, object]


class LLM:
    """A model that answers. `model` is a catalog name, a GGUF file, a folder or a hub id; the
    default model is fetched on first use."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        backend: BackendName = "cpu",
        threads: int | None = None,
        context_tokens: int | None = None,
        offline: bool = False,
        progress: Progress = silent,
    ) -> None:
        self._assembled = assemble(
            None if model is None else str(model),
            backend=backend,
            threads=threads,
            context_tokens=context_tokens,
            offline=offline,
            progress=progress,
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
    def context_tokens(self) -> int:
        """The longest that a prompt and its answer may be together."""
        return self._assembled.runner.limits.context_tokens

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; all are computed together. `params` is one for all, or one each."""
        listed = _list_prompts(prompts)
        token_ids = [self._encode(prompt) for prompt in listed]
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        return self._complete(token_ids, texts, _list_params(params, len(listed)))

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
        token_ids = [template.encode(conversation) for conversation in several]  # type: ignore[arg-type]
        texts: list[str | None] = [None] * len(token_ids)
        return self._complete(token_ids, texts, _list_params(params, len(token_ids)))

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[TokenEvent]:
        """Continue one prompt, a token at a time. Closing the iterator stops the work; so does
        `stopped`, which is asked before each step, also while a long prompt is being computed."""
        request = self._request(list(prompt_token_ids), params)
        self._engine.check(request)  # refused here, before the first `next`
        return self._stream(request, stopped)

    def close(self) -> None:
        self._assembled.file.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(
        self, request: GenerateRequest, stopped: Callable[[], bool]
    ) -> Iterator[TokenEvent]:
        text = _TextStream(self.tokenizer, request.params)
        try:
            self._engine.add(request)
            while not stopped():
                for token in self._engine.step():
                    event = text.push(token)
                    yield event
                    if event.finish_reason is not None:
                        return
        finally:
            self._engine.cancel(request.request_id)

    def _complete(
        self,
        token_ids: list[list[int]],
        texts: list[str | None],
        params: list[SamplingParams],
    ) -> list[RequestOutput]:
        requests = [self._request(*pair) for pair in zip(token_ids, params, strict=True)]
        streams = {r.request_id: _TextStream(self.tokenizer, r.params) for r in requests}
        outputs = {
            r.request_id: CompletionOutput(
                index=0, text="", token_ids=[], cumulative_logprob=0.0, finish_reason=None
            )
            for r in requests
        }
        try:
            for request in requests:
                self._engine.add(request)
            while self._engine.has_work:
                for token in self._engine.step():
                    event = streams[token.request_id].push(token)
                    output = outputs[token.request_id]
                    output.text += event.text
                    output.token_ids.append(event.token_id)
                    output.cumulative_logprob += event.logprob
                    if event.finish_reason is not None:
                        output.finish_reason = event.finish_reason.value
                        self._engine.cancel(token.request_id)  # a stop string ends it here
        except BaseException:
            for request in requests:
                self._engine.cancel(request.request_id)
            raise
        return [
            RequestOutput(
                request_id=request.request_id,
                prompt=text,
                prompt_token_ids=request.prompt_token_ids,
                outputs=[outputs[request.request_id]],
            )
            for request, text in zip(requests, texts, strict=True)
        ]

    def _request(self, token_ids: list[int], params: SamplingParams) -> GenerateRequest:
        number = next(self._request_numbers)
        self._check_ids(token_ids, "prompt")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        return GenerateRequest(request_id=str(number), prompt_token_ids=token_ids, params=params)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError(
                    "The prompt is empty; expected at least one character.",
                    "Give some text or token ids.",
                    param="prompt",
                )
            return self.tokenizer.encode(prompt)
        return list(prompt)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        size = self.spec.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise InvalidRequestError(
                    f"{param} has the token id {token!r}; expected integers from 0 to {size - 1}.",
                    "Encode the text with this model's tokenizer.",
                    param=param,
                )


class _TextStream:
    """A request's tokens as text, cut at its stop strings."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = StreamDetokenizer(tokenizer)
        self._stops = StopChecker(params.stop)

    def push(self, token: SampledToken) -> TokenEvent:
        if token.error is not None:
            raise HeadraceError(f"Request {token.request_id} failed: {token.error}.")
        reason = token.finish_reason
        new = self._detokenizer.push(token.token_id)
        if reason is not None:
            new += self._detokenizer.finish()
        text, stopped = self._stops.push(new)
        if stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            text += self._stops.finish()
        return TokenEvent(
            request_id=token.request_id,
            token_id=token.token_id,
            text=text,
            logprob=token.logprob,
            finish_reason=reason,
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
