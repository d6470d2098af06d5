"""The client against a server of a few lines: chunks cut anywhere, refusals, ends."""

from __future__ import annotations

import asyncio
import json

import pytest

from headrace.calibrate.client import Connection, Heard, completion
from headrace.core.errors import HeadraceError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    body = json.dumps({"choices": [{"index": 0, "text": text}]}, separators=(",", ":"))
    return chunk(b"data: " + body.encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


USAGE = chunk(b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n')
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def ask(replies: list[list[bytes]]) -> list[Heard]:
    """Each request gets the next list of writes, a pause between them; an empty one closes."""
    left = iter(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                json.loads(await reader.readexactly(length))
                for part in next(left):
                    if not part:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.002)
        except (asyncio.IncompleteReadError, StopIteration):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        connection = await Connection.open(server.sockets[0].getsockname()[1])
        try:
            return [await connection.ask(completion([1, 2], 3)) for _ in replies]
        finally:
            connection.close()


def test_a_kept_connection_hears_one_answer_after_the_other() -> None:
    whole = [HEAD, event(""), event("a"), event("b"), event("c"), USAGE + END]
    first, second = asyncio.run(ask([whole, whole]))
    for heard in (first, second):
        assert heard.tokens == 3
        assert len(heard.text_s) == 3
        assert heard.sent_s < heard.first_s < heard.last_s
        assert heard.tpot_s == pytest.approx((heard.last_s - heard.first_s) / 2)


def test_a_connection_that_the_server_has_closed_is_known_to_be() -> None:
    """A request on it would never be answered."""

    async def run() -> tuple[bool, bool]:
        closing = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await closing.wait()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            connection = await Connection.open(server.sockets[0].getsockname()[1])
            before = connection.is_open
            closing.set()
            for _ in range(1000):
                if not connection.is_open:
                    break
                await asyncio.sleep(0.001)
            return before, connection.is_open

    assert asyncio.run(run()) == (True, False)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_chunks_may_be_cut_anywhere(size: int) -> None:
    data = HEAD + event("a") + event("b") + event("c") + USAGE + END
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    (heard,) = asyncio.run(ask([parts]))
    assert heard.tokens == 3
    assert heard.first_s > heard.sent_s


@pytest.mark.parametrize(
    "parts",
    [
        [b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\nno"],
        [HEAD, event("a"), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"],
        [HEAD, event("a"), b""],
    ],
)
def test_what_is_no_whole_answer_is_an_error(parts: list[bytes]) -> None:
    with pytest.raises(HeadraceError, match="expected a stream"):
        asyncio.run(ask([parts]))
