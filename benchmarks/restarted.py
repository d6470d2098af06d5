"""What clients notice while replicas are restarted, killed, stopped and made slow.

    python benchmarks/restarted.py restart [--requests 10000] [--clients 24] [--replicas 2]
    python benchmarks/restarted.py kill stop slow [--turns 3]

`headrace serve --replicas N` with the default model, under load from this process. Each request has
an id of its own; the replicas' own logs say how often it was answered. `restart` restarts every
replica, one after the other, again and again until all requests are answered. The others do
something to one replica while long and short answers run: kill -9, SIGSTOP, or running for 50 ms of
every 2 s. A request counts as failed before its first token if no byte of an answer's body came,
and after it if the answer was not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-P", "-c", "from headrace.cli.commands import main; main()", "serve")
DURING_S, BEFORE_S = 12.0, 3.0  # of a turn: in all, and before something happens
LOOK_S = 0.01


class Server:
    def __init__(self, replicas: int, folder: Path, *flags: str) -> None:
        self._log = folder / f"log-{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(*COMMAND, "--replicas", str(replicas), "--port", "0", *flags),
                    *("--kv-tokens", "32768", "--log-format", "json"),
                ],
                stderr=log,
                cwd=folder,
            )
        self.url = ""

    def __enter__(self) -> Server:
        end_s = time.monotonic() + 120
        while time.monotonic() < end_s and self._process.poll() is None:
            for record in self.records("ready"):
                self.url = record["url"]
                return self
            time.sleep(0.05)
        raise SystemExit(self._log.read_text())

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def records(self, event: str) -> list[dict[str, Any]]:
        mark = f'"event": "{event}"'
        lines = self._log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if mark in line and line.endswith("}")]

    def ask(self, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def replica(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("/replicas")["replicas"][number - 1]
        return found


@dataclass
class Seen:
    whole: int = 0
    streams: int = 0
    before: list[str] = field(default_factory=list)  # failed before the first token
    after: list[str] = field(default_factory=list)  # and after it
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    open: dict[str, bool] = field(default_factory=dict)  # by id: whether a byte has come


class Client:
    """One request after the other on one connection."""

    def __init__(self, url: str, seen: Seen) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        self._seen = seen
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, name: str, tokens: int, *, stream: bool) -> None:
        seen = self._seen
        seen.open[name] = False
        began_s = time.perf_counter()
        try:
            status, text = await self._exchange(name, self._body(name, tokens, stream))
            good = text.endswith(b"data: [DONE]\n\n") and b'"error"' not in text
            if status != 200 or (stream and not good):
                raise ConnectionError(f"{status} {text[-300:]!r}")
            seen.whole += 1
            seen.streams += stream
            seen.whole_s.append(time.perf_counter() - began_s)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            (seen.after if seen.open[name] else seen.before).append(f"{name}: {error!r}")
            self.close()
        finally:
            del seen.open[name]

    def _body(self, name: str, tokens: int, stream: bool) -> bytes:
        return json.dumps(
            {
                "model": "smollm2",
                "prompt": f"Request {name} is about the sea. The sea is",
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": stream,
            }
        ).encode()

    async def _exchange(self, name: str, body: bytes) -> tuple[int, bytes]:
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        reader, writer = self._reader, self._writer
        assert reader is not None
        began_s = time.perf_counter()
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nx-request-id: {name}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1])
        parts: list[bytes] = []
        if b"transfer-encoding: chunked" in head:
            while size := int(await reader.readline(), 16):
                parts.append(await self._part(reader, size, name, began_s))
                await reader.readexactly(2)
            await reader.readline()
        else:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            parts.append(await self._part(reader, length, name, began_s))
        if b"connection: close" in head:
            self.close()
        return status, b"".join(parts)

    async def _part(
        self, reader: asyncio.StreamReader, size: int, name: str, began_s: float
    ) -> bytes:
        data = await reader.readexactly(size)
        if not self._seen.open[name]:
            self._seen.open[name] = True
            self._seen.first_s.append(time.perf_counter() - began_s)
        return data

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def load(
    server: Server, clients: int, ids: list[str], tokens: tuple[int, int], seen: Seen
) -> None:
    """All requests, or those of as many as the list still has: it may be emptied."""
    ids.reverse()

    async def run(number: int) -> None:
        client, random_ = Client(server.url, seen), random.Random(number)
        while ids:
            name = ids.pop()
            await client.ask(name, random_.randint(*tokens), stream=random_.random() < 0.5)
        client.close()

    await asyncio.gather(*(run(number) for number in range(clients)))


# -- every replica, again and again ----------------------------------------------------------------


async def restart(args: argparse.Namespace, folder: Path) -> None:
    with Server(args.replicas, folder) as server:
        seen, rolls = Seen(), 0
        ids = [f"r{number}" for number in range(args.requests)]
        began_s = time.perf_counter()
        loading = asyncio.create_task(load(server, args.clients, list(ids), (1, 8), seen))
        while not loading.done():
            await asyncio.to_thread(server.ask, "/restart", {})
            while (await asyncio.to_thread(server.ask, "/replicas"))["roll"]["state"] == "rolling":
                await asyncio.sleep(0.05)
            rolls += 1
        await loading
        took_s = time.perf_counter() - began_s
        requests = server.records("request")
        metrics = urllib.request.urlopen(f"{server.url}/metrics", timeout=10).read().decode()
    answered = Counter(each["request_id"] for each in requests if each["status"] == 200)
    lines = Counter(each["request_id"] for each in requests)
    show(
        {
            "requests": len(ids),
            "whole answers / of them streams": f"{seen.whole} / {seen.streams}",
            "failed before / after the first token": f"{len(seen.before)} / {len(seen.after)}",
            "answered once by a replica": sum(answered[name] == 1 for name in ids),
            "answered twice or more": sum(answered[name] > 1 for name in ids),
            "seen by two replicas (refused by one)": sum(lines[name] > 1 for name in ids),
            "restarts of a replica": rolls * args.replicas,
            "seconds": f"{took_s:.1f}",
            "requests/s": f"{len(ids) / took_s:.1f}",
            "whole answer, p50 / p99, ms": quantiles(seen.whole_s),
            "retries": [line for line in metrics.splitlines() if "retries_total{" in line],
        }
    )
    for failure in [*seen.before, *seen.after][:5]:
        print("   ", failure)


# -- something happens to one ----------------------------------------------------------------------


async def turn(
    args: argparse.Namespace, folder: Path, hurt: Callable[[int, float], Coroutine[Any, Any, None]]
) -> dict[str, Any]:
    with Server(args.replicas, folder) as server:
        seen = Seen()
        ids = [f"t{number}" for number in range(100_000)]
        loading = asyncio.create_task(load(server, args.clients, ids, (1, 48), seen))
        await asyncio.sleep(BEFORE_S)
        victim = await asyncio.to_thread(server.replica, 1)
        end_s = time.monotonic() + DURING_S - BEFORE_S
        waiting = sum(not has_bytes for has_bytes in seen.open.values())
        streaming = sum(seen.open.values())
        hurting = asyncio.create_task(hurt(victim["pid"], end_s))
        hurt_s, out_s, back_s = time.monotonic(), None, None
        while time.monotonic() < end_s:
            found = await asyncio.to_thread(server.replica, 1)
            now_s = time.monotonic() - hurt_s
            if out_s is None and found.get("state") != "up":
                out_s = now_s
            if out_s is not None and back_s is None and found.get("state") == "up":
                back_s = now_s
            await asyncio.sleep(LOOK_S)
        ids.clear()
        await hurting
        await asyncio.wait_for(loading, 60)
        return {
            "running on it": victim["running"],
            "all clients: waiting for / after a first token": f"{waiting} / {streaming}",
            "out after, s": out_s,
            "back after, s": back_s,
            "answered": seen.whole,
            "failed before the first token": len(seen.before),
            "broken off after it": len(seen.after),
            "why": (seen.before + seen.after)[:1],
            "whole answer p99, ms": quantiles(seen.whole_s),
        }


async def kill(pid: int, end_s: float) -> None:
    os.kill(pid, signal.SIGKILL)


async def stop(pid: int, end_s: float) -> None:
    os.kill(pid, signal.SIGSTOP)


async def slow(pid: int, end_s: float) -> None:
    """The server and its engine run for 50 ms of every 2 s."""
    family = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    while time.monotonic() < end_s:
        for number, pause_s in ((signal.SIGSTOP, 1.95), (signal.SIGCONT, 0.05)):
            for each in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, number)
            await asyncio.sleep(pause_s)


HURTS = {"kill": kill, "stop": stop, "slow": slow}


def quantiles(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "-"
    cuts = statistics.quantiles(seconds, n=100)
    return f"{cuts[49] * 1000:.0f} / {cuts[98] * 1000:.0f}"


def show(facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        shown = f"{value:.2f}" if isinstance(value, float) else value
        print(f"  {name:<48}{shown}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("rows", nargs="+", choices=["restart", *HURTS])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for row in args.rows:
            print(row)
            if row == "restart":
                await restart(args, Path(folder))
                continue
            for number in range(args.turns):
                print(f"  turn {number + 1}")
                show(await turn(args, Path(folder), HURTS[row]))


if __name__ == "__main__":
    asyncio.run(main())
