"""Plain completions as server-sent events, those of several prompts interleaved as they arrive.

As in chat_stream.py, what does not change from one event to the next is encoded only once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.core.errors import HeadraceError
from headrace.core.request import Logprobs, TokenEvent
from headrace.server.api.chat_stream import DONE
from headrace.server.api.completion_request import Asked
from headrace.server.request.call import Call, encode_json, error_event
from headrace.server.request.ending import check_timeout, ending
from headrace.server.request.generation import generate
from headrace.server.request.interleave import interleave
from headrace.server.request.logprobs import CompletionLogprobsWriter
from headrace.server.request.prompts import off_loop
from headrace.server.request.schema import CompletionRequest
from headrace.server.request.service import Service
from headrace.server.request.usage import Usage

LARGE_BYTES = 1 << 16  # after a larger event other requests get a turn


class CompletionStream:
    """One answer: all prompts, all choices."""

    def __init__(self, service: Service, call: Call, sent: CompletionRequest, asked: Asked) -> None:
        self._service = service
        self._call = call
        self._asked = asked
        self._n = asked.requests[0].params.n
        self._output_tokens = [0] * len(asked.requests)
        self._writers: dict[
            int, CompletionLogprobsWriter | None
        ] = {}  # by choice, once it has begun
        self._new_ids: dict[int, list[int]] = {}  # not yet sent in a chunk, by choice
        options = sent.stream_options
        self._wants_usage = options is not None and bool(options.include_usage)
        self._counts_on = (
            self._wants_usage and options is not None and bool(options.continuous_usage_stats)
        )
        head = {
            "id": asked.completion_id,
            "object": "text_completion",
            "created": asked.created,
            "model": service.model.name,
            "system_fingerprint": service.fingerprint or None,
        }
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['

    async def chunks(self) -> AsyncGenerator[bytes]:
        opened = False
        sources = [
            generate(self._service, self._call, *pair)
            for pair in zip(self._asked.requests, self._asked.records, strict=True)
        ]
        try:
            async with aclosing(interleave(sources)) as found:
                async for place, events in found:
                    parts: list[bytes] = []
                    for event in events:
                        if (prompt := event.prompt_logprobs) is not None:
                            await self._take_prompt(place, prompt)
                        parts.append(self._event(place, event))
                        if (
                            len(parts[-1]) > LARGE_BYTES
                        ):  # those of the other choices will be large too
                            await asyncio.sleep(0)
                    if out := b"".join(parts):
                        opened = True
                        yield out
            yield self._close()
        except HeadraceError as error:
            if not opened:
                raise
            yield error_event(error)

    async def _take_prompt(self, place: int, found: list[Logprobs | None]) -> None:
        tokenizer = self._service.model.tokenizer
        entries = sum(len(here) for here in found if here is not None)
        await off_loop(entries, lambda: self._asked.take_prompt(tokenizer, place, found))

    def _event(self, place: int, event: TokenEvent) -> bytes:
        self._output_tokens[place] += event.token_id is not None
        check_timeout(event, self._output_tokens[place])
        choice = place * self._n + event.index
        text, prompt_ids = "", b""
        if choice not in self._writers:
            if self._asked.wants_ids:
                found = self._asked.requests[place].prompt_token_ids
                prompt_ids = b',"prompt_token_ids":' + encode_json(found)
            text, self._writers[choice] = self._asked.open_choice(
                self._service.model.tokenizer, place
            )
        writer = self._writers[choice]
        if self._asked.wants_output:
            text += event.text
            if self._asked.wants_ids and event.token_id is not None:
                self._new_ids.setdefault(choice, []).append(event.token_id)
            if writer is not None and event.token_id is not None:
                writer.add(event.token_id, event.logprobs)
        if not (text or writer or prompt_ids) and event.finish_reason is None:
            return b""
        finish = b"null"
        if event.finish_reason is not None:
            reason, stop_reason = ending(event.finish_reason)
            finish = encode_json(reason if self._asked.wants_output else "length")
            if stop_reason is not None:
                finish += b',"stop_reason":' + encode_json(stop_reason)
        ids = b""
        if self._asked.wants_ids:
            ids = prompt_ids + b',"token_ids":' + encode_json(self._new_ids.pop(choice, []))
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]%b}\n\n' % (
            self._head,
            choice,
            encode_json(text),
            b"null" if writer is None else writer.take(),
            finish,
            ids,
            self._usage(),
        )

    def _usage(self) -> bytes:
        if self._counts_on:
            return b',"usage":' + encode_json(self._used())
        return b',"usage":null' if self._wants_usage else b""

    def _used(self) -> Usage:
        count = sum(self._output_tokens) if self._asked.wants_output else 0
        return Usage.of(self._asked.records, count)

    def _close(self) -> bytes:
        if not self._wants_usage:
            return DONE
        return self._head + b'],"usage":' + encode_json(self._used()) + b"}\n\n" + DONE
