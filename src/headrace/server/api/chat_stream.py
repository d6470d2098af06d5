"""A chat's answer as server-sent events, a chunk for each token that completes some text.

There is one chunk per token, so what does not change from one to the next is encoded only once.
Knows OpenAI's chunks; server/request/generation.py brings the tokens.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.core.errors import HeadraceError
from headrace.core.request import GenerateRequest, TokenEvent
from headrace.server.request.call import Call, encode_json, error_event
from headrace.server.request.ending import check_timeout, ending
from headrace.server.request.generation import generate, new_record
from headrace.server.request.logprobs import chat_logprobs
from headrace.server.request.schema import ChatRequest
from headrace.server.request.service import Service
from headrace.server.request.usage import Usage
from headrace.server.tools.deltas import encode_deltas
from headrace.server.tools.parser import CallParser
from headrace.server.tools.plan import ToolUse

DONE = b"data: [DONE]\n\n"


class ChatStream:
    """One answer, all its choices."""

    def __init__(
        self,
        service: Service,
        call: Call,
        sent: ChatRequest,
        request: GenerateRequest,
        use: ToolUse,
    ) -> None:
        self._service = service
        self._call = call
        self._request = request
        self._use = use
        self._parsers = [use.new_parser() for _ in range(request.params.n)]
        # Token ids not yet sent in a chunk, by choice, if the client asked for them.
        self._new_ids: list[list[int]] | None = None
        if sent.return_token_ids:
            self._new_ids = [[] for _ in range(request.params.n)]
        self._record = new_record(call, request)
        self._output_tokens = 0
        options = sent.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)
        self._counts_on = (
            self._wants_usage and options is not None and bool(options.continuous_usage_stats)
        )
        head = {
            "id": request.request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": service.model.name,
            "system_fingerprint": service.fingerprint or None,
        }
        # The start of a chunk, up to where choices differ.
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._heads = [
            self._head + b'{"index":%d,"delta":' % index for index in range(request.params.n)
        ]

    async def chunks(self) -> AsyncGenerator[bytes]:
        opened = False
        try:
            async with aclosing(
                generate(
                    self._service, self._call, self._request, self._record, self._use.shown_ids
                )
            ) as found:
                async for events in found:
                    parts = [self._event(event) for event in events]
                    if not opened:
                        # Not before the first token: until then an error can have its own status.
                        opened = True
                        parts[:0] = map(self._open, range(self._request.params.n))
                    if out := b"".join(parts):
                        yield out
            yield self._close()
        except HeadraceError as error:
            if not opened:
                raise
            yield error_event(error)

    def _open(self, index: int) -> bytes:
        delta = b'{"role":"assistant","content":"","refusal":null}'
        if self._new_ids is None:
            return self.chunk(index, delta)
        prompt = b',"prompt_token_ids":' + encode_json(self._request.prompt_token_ids)
        return self._chunk(index, delta, b"null", b"null", b',"token_ids":[]', prompt)

    def _event(self, event: TokenEvent) -> bytes:
        self._output_tokens += event.token_id is not None
        check_timeout(event, self._output_tokens)
        if self._new_ids is not None and event.token_id is not None:
            self._new_ids[event.index].append(event.token_id)
        if not event.text and event.finish_reason is None and event.logprobs is None:
            return b""
        logprobs = b"null"
        if event.logprobs is not None:
            assert event.token_id is not None
            pairs = [(event.token_id, event.logprobs)]
            logprobs = encode_json(chat_logprobs(self._service.model.tokenizer, pairs))
        parser = self._parsers[event.index]
        if parser is not None:
            deltas = self._tool_deltas(parser, event)
        elif event.text:
            deltas = [b'{"content":' + encode_json(event.text) + b"}"]
        else:
            deltas = []
        if not deltas and event.logprobs is not None:
            deltas = [b'{"content":""}']
        out = b""
        for delta in deltas:
            out += self.chunk(event.index, delta, logprobs)
            logprobs = b"null"  # once is enough
        if event.finish_reason is not None:
            reason, stop_reason = ending(event.finish_reason)
            if parser is not None and parser.whole_calls:
                reason = self._use.called_reason(reason)
            extra = b"" if stop_reason is None else b',"stop_reason":' + encode_json(stop_reason)
            out += self.chunk(event.index, b"{}", finish=encode_json(reason) + extra)
        return out

    def _tool_deltas(self, parser: CallParser, event: TokenEvent) -> list[bytes]:
        pieces = parser.push(event.text)
        if event.finish_reason is not None:
            pieces += parser.finish()
        return encode_deltas(pieces)

    def chunk(
        self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        """One event; its parts are JSON already."""
        ids = b""
        if self._new_ids is not None:
            ids = b',"token_ids":' + encode_json(self._new_ids[index])
            self._new_ids[index].clear()
        return self._chunk(index, delta, logprobs, finish, ids)

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes,
        finish: bytes,
        ids: bytes,
        prompt: bytes = b"",
    ) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b}]%b%b}\n\n' % (
            self._heads[index],
            delta,
            logprobs,
            finish,
            ids,
            prompt,
            self._usage(),
        )

    def _usage(self) -> bytes:
        if self._counts_on:
            return b',"usage":' + encode_json(Usage.of([self._record], self._output_tokens))
        return b',"usage":null' if self._wants_usage else b""

    def _close(self) -> bytes:
        if not self._wants_usage:
            return DONE
        usage = encode_json(Usage.of([self._record], self._output_tokens))
        return self._head + b'],"usage":' + usage + b"}\n\n" + DONE
