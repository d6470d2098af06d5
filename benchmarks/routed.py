"""What the router costs: the same streams straight to paced endpoints, and through the router.

    python benchmarks/routed.py [--streams 256] [--gap 0.05] [--seconds 15] [--replicas 2]

Endpoints whose times are known (paced_endpoint.py) send a token every `gap` seconds. Each client
notes when the bytes of a token arrived; the endpoint puts into each token when it sent them, by the
clock that all processes of a machine share. Time added is the difference between the two ways, of
the medians and of the 99th percentiles; the requests are the same, and turns alternate. Each
client's first answer in a turn opens connections (its own, and the router's) and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

HERE = Path(__file__).parent
_ROUTE = "from headrace.cli.commands import main; main()"


@dataclass
class Seen:
    """What clients of one turn saw."""

    first_s: list[float] = field(default_factory=list)  # from a request to its first token
    late_s: list[float] = field(default_factory=list)  # from when a token was sent to its arrival
    start_s: float = math.inf  # all clients have begun
    end_s: float = math.inf  # no request begins after this
    tokens: int = 0  # between the two
    answers: int = 0
    failed: int = 0


class Client(asyncio.Protocol):
    """One stream after the other on one connection, until the time is over."""

    def __init__(self, seen: Seen, body: bytes) -> None:
        self._seen = seen
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._is_warm = False  # its first answer opened connections, and is not counted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        self._is_first, self._tail = True, b""
        self._asked_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        seen = self._seen
        if b'"sent_s"' in data:
            count = data.count(b'"sent_s"')
            if seen.start_s <= now_s < seen.end_s:
                seen.tokens += count
            at = data.rindex(b'"sent_s": ') + 10
            sent_s = float(data[at : data.index(b"}", at)])
            if self._is_warm:
                seen.late_s.append(now_s - sent_s)
            if self._is_first:
                self._is_first = False
                if self._is_warm:
                    seen.first_s.append(now_s - self._asked_s)
        if (self._tail + data).endswith(b"\r\n0\r\n\r\n"):
            seen.answers += 1
            self._is_warm = True
            if now_s < seen.end_s:
                self._ask()
            else:
                self._finish()
            return
        self._tail = data[-7:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._seen.failed += 1
            self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        if self._transport is not None:
            self._transport.close()


async def turn(ports: list[int], streams: int, seconds: float, tokens: int) -> Seen:
    """`streams` clients, shared out over the ports."""
    seen = Seen()
    loop = asyncio.get_running_loop()
    clients = []
    for number in range(streams):
        prompt = {"role": "user", "content": f"{number} " + "word " * 200}
        words = {"model": "paced", "messages": [prompt], "max_tokens": tokens, "stream": True}
        make = partial(Client, seen, json.dumps(words).encode())
        _, client = await loop.create_connection(make, "127.0.0.1", ports[number % len(ports)])
        clients.append(client)
        await asyncio.sleep(0.004)  # spread out, as clients are
    seen.start_s = time.perf_counter()
    seen.end_s = seen.start_s + seconds
    await asyncio.gather(*(client.done for client in clients))
    return seen


@contextlib.contextmanager
def processes(replicas: int, first_s: float, gap_s: float) -> Iterator[tuple[list[int], int, int]]:
    """Ports of endpoints, the router's port and its process."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    started = []
    try:
        ports = []
        for _ in range(replicas):
            words = [sys.executable, str(HERE / "paced_endpoint.py"), "--stamp"]
            words += ["--first", str(first_s), "--gap", str(gap_s)]
            one = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
            started.append(one)
            assert one.stdout is not None
            ports.append(int(one.stdout.readline()))
        words = [sys.executable, "-c", _ROUTE, "route", *(f":{port}" for port in ports)]
        words += ["--port", "0", "--log-format", "pretty"]
        router = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
        started.append(router)
        assert router.stderr is not None
        line = ""
        while not line.startswith("routing at"):
            line = router.stderr.readline()
            if not line:
                raise SystemExit("the router did not start")
        yield ports, int(line.split(" ")[2].rpartition(":")[2]), router.pid
    finally:
        for each in started:
            each.terminate()
            each.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def milliseconds(values: list[float]) -> tuple[float, float]:
    return 1e3 * statistics.median(values), 1e3 * percentile(values, 0.99)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--gap", type=float, default=0.05, help="seconds between tokens")
    parser.add_argument("--first", type=float, default=0.1, help="seconds to the first token")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0, help="of one turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2)
    asked = parser.parse_args()
    sums = {"direct": Seen(), "routed": Seen()}
    rates: dict[str, list[float]] = {"direct": [], "routed": []}
    with processes(asked.replicas, asked.first, asked.gap) as (ports, port, pid):
        import uvloop

        for _ in range(asked.turns):
            for name, where in (("direct", ports), ("routed", [port])):
                before_s, began_s = cpu_s(pid), time.perf_counter()
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    seen = runner.run(turn(where, asked.streams, asked.seconds, asked.tokens))
                wall_s = time.perf_counter() - began_s
                rates[name].append(seen.tokens / asked.seconds)
                whole = sums[name]
                whole.first_s += seen.first_s
                whole.late_s += seen.late_s
                whole.tokens += seen.tokens
                whole.answers += seen.answers
                whole.failed += seen.failed
                used = (cpu_s(pid) - before_s) / wall_s
                first, late = milliseconds(seen.first_s), milliseconds(seen.late_s)
                print(
                    f"{name}: {seen.answers} answers, {seen.failed} failed, "
                    f"{rates[name][-1]:,.0f} tokens/s; first token {first[0]:.2f} / {first[1]:.2f} "
                    f"ms; a token's way {late[0]:.3f} / {late[1]:.3f} ms; router's CPU {used:.0%}",
                    flush=True,
                )
    direct, routed = sums["direct"], sums["routed"]
    for what, values in (("first token", "first_s"), ("a token's way", "late_s")):
        one, two = (milliseconds(getattr(each, values)) for each in (direct, routed))
        print(
            f"time added, {what}: p50 {two[0] - one[0]:+.3f} ms, p99 {two[1] - one[1]:+.3f} ms",
            flush=True,
        )
    share = statistics.median(rates["routed"]) / statistics.median(rates["direct"])
    print(f"throughput: {share:.4f} of direct; failed {direct.failed} / {routed.failed}")


if __name__ == "__main__":
    main()
