"""HTTP clients in a closed loop: each sends its next request when its last one has ended.

Plain sockets in one process, light on purpose: they run on the machine that they measure. Streams
OpenAI completions, whoever serves them, and knows no engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Load:
    """What came of a closed loop."""

    tokens: int = 0
    taken_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)


def request_bytes(prompt: list[int], output_tokens: int, model: str | None) -> bytes:
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model:
        body["model"] = model
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def read_event(line: bytes) -> dict[str, Any] | None:
    """An event of a stream, or None for anything else that a line may hold."""
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if data == b"[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise RuntimeError(f"the server answered {event['error']}")
    return event


def has_text(event: dict[str, Any]) -> bool:
    return any(choice.get("text") for choice in event.get("choices") or [])


async def ask(port: int, request: bytes, load: Load) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        began = time.perf_counter()
        writer.write(request)
        status = await reader.readline()
        if b" 200 " not in status:
            rest = await reader.read()  # to its end: headers and body may come apart
            said = rest.partition(b"\r\n\r\n")[2]
            raise RuntimeError(f"the server answered {status!r} {said[:200]!r}")
        first_s: float | None = None
        tokens = 0
        while line := await reader.readline():
            event = read_event(line)
            if event is None:
                continue
            if first_s is None and has_text(event):
                first_s = time.perf_counter() - began
            if usage := event.get("usage"):
                tokens = usage["completion_tokens"]
        if first_s is None:
            raise RuntimeError("the server streamed no text")
        load.first_token_s.append(first_s)
        load.tokens += tokens
    finally:
        writer.close()


async def closed_loop(port: int, requests: list[bytes], clients: int) -> Load:
    load = Load()
    waiting = iter(requests)

    async def client(mine: Iterator[bytes]) -> None:
        for request in mine:
            await ask(port, request, load)

    began = time.perf_counter()
    await asyncio.gather(*(client(waiting) for _ in range(clients)))
    load.taken_s = time.perf_counter() - began
    return load


def run_clients(
    port: int,
    model: str | None,
    warm: list[int],
    prompts: list[list[int]],
    clients: int,
    output_tokens: int,
    timeout_s: float,
) -> Load:
    """The warm prompt first and untimed, then all the others."""

    async def run() -> Load:
        async with asyncio.timeout(timeout_s):
            await ask(port, request_bytes(warm, output_tokens, model), Load())
            requests = [request_bytes(prompt, output_tokens, model) for prompt in prompts]
            return await closed_loop(port, requests, clients)

    load = asyncio.run(run())
    if load.tokens != len(prompts) * output_tokens:
        raise RuntimeError(f"{load.tokens} tokens came, not {len(prompts) * output_tokens}")
    return load
