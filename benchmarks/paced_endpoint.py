"""An OpenAI-compatible endpoint whose times are known: nothing is computed.

    python benchmarks/paced_endpoint.py --port 8001 --first 0.05 --gap 0.01

Each answer's first token goes out `first` seconds after its request was read, and every further one
`gap` seconds later, whatever else is asked. GET /timings gives what really went out since it was
last asked, by the endpoint's own clock: the truth that clients are held against.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

MODEL = "paced"
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(value: object) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    body = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(body), body)


def plain(value: object) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def _chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
            "choices": [choice]}  # fmt: skip


_TOKEN = event(_chunk({"content": " word"}))
_UNSTAMPED = b"data: " + json.dumps(_chunk({"content": " word"})).encode()[:-1]


def stamped() -> bytes:
    """A token that says when it was sent, by the clock that all processes of a machine share."""
    body = _UNSTAMPED + b', "sent_s": %.6f}\n\n' % time.perf_counter()
    return b"%x\r\n%s\r\n" % (len(body), body)


@dataclass(slots=True)
class Sent:
    """What went out of one answer: seconds of the event loop's clock."""

    read_s: float
    times_s: list[float] = field(default_factory=list)


class Paced:
    def __init__(self, first_s: float, gap_s: float, *, stamps: bool = False) -> None:
        self._first_s, self._gap_s, self._stamps = first_s, gap_s, stamps
        self._sent: list[Sent] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"POST"):
                    about = plain(self._about(head.split(b" ")[1].decode()))
                    is_whole = head.startswith(b"GET")  # HEAD has no body
                    writer.write(about if is_whole else about.split(b"{", 1)[0])
                    continue
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                await self._answer(writer, body, Sent(asyncio.get_running_loop().time()))
        except (asyncio.IncompleteReadError, ConnectionError, IndexError):
            pass  # IndexError: no HTTP/1.1; routers try what else is spoken here
        finally:
            writer.close()

    def _about(self, path: str) -> dict[str, Any]:
        if path.startswith("/timings"):
            found, self._sent = self._sent, []
            return timings(found)
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], sent: Sent) -> None:
        loop = asyncio.get_running_loop()
        wanted = body.get("max_tokens") or body.get("max_completion_tokens")
        tokens = int(wanted or 16)
        writer.write(_HEAD + event(_chunk({"role": "assistant", "content": ""})))
        for number in range(tokens):
            due_s = sent.read_s + self._first_s + number * self._gap_s
            await asyncio.sleep(due_s - loop.time())
            writer.write(stamped() if self._stamps else _TOKEN)
            sent.times_s.append(loop.time())
        words = len(json.dumps(body.get("messages", "")).split())
        usage = {"prompt_tokens": words, "completion_tokens": tokens,
                 "total_tokens": words + tokens}  # fmt: skip
        last = {**_chunk({}), "choices": [], "usage": usage}
        writer.write(event(_chunk({}, "length")) + event(last) + event(b"[DONE]") + b"0\r\n\r\n")
        self._sent.append(sent)


def timings(sent: list[Sent]) -> dict[str, Any]:
    """Medians of TTFT and TPOT, and tokens by wall clock, of answers of more than two tokens: what
    a client asks to find its way is shorter."""
    long = [one for one in sent if len(one.times_s) > 2]
    if not long:
        return {"answers": 0}
    wall_s = max(one.times_s[-1] for one in long) - min(one.read_s for one in long)
    return {
        "answers": len(long),
        "ttft_s": statistics.median(one.times_s[0] - one.read_s for one in long),
        "tpot_s": statistics.median(
            (one.times_s[-1] - one.times_s[0]) / (len(one.times_s) - 1) for one in long
        ),
        "tokens_s": sum(len(one.times_s) for one in long) / wall_s,
    }


async def run(port: int, first_s: float, gap_s: float, stamps: bool) -> None:
    paced = Paced(first_s, gap_s, stamps=stamps)
    server = await asyncio.start_server(paced.serve, "127.0.0.1", port, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first", type=float, default=0.05, help="seconds to the first token")
    parser.add_argument("--gap", type=float, default=0.01, help="seconds between tokens")
    parser.add_argument("--stamp", action="store_true", help="tokens say when they were sent")
    asked = parser.parse_args()
    asyncio.run(run(asked.port, asked.first, asked.gap, asked.stamp))


if __name__ == "__main__":
    main()
