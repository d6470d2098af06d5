"""How much load `headrace bench` can make on one core, and how late it is while it does.

    python benchmarks/bench_client.py --streams 256 --rate 5000 [--realtime]

A stand-in for a server, in a process of its own, sends tokens to all streams at a fixed pace. The
client is the real one. Each has a core of its own, and with --realtime the scheduler puts nothing
else before them. What is printed is the client's own health: nothing here says anything about a
server. The loads:

open    requests at times of their own, tokens of each stream at its own moments
spread  a closed loop, tokens of each stream at its own moments
steps   a closed loop, tokens of all streams at once, as an engine's steps send them; answers have
        half of --tokens to one and a half
waves   the same, but all answers have the same length: all streams end in the same moment, and all
        of the next requests are due in that moment

Delays count from the moment in which a request was due: in a closed loop, when the last bytes of
the answer before it arrived. A closed loop begins with all of its requests at once; how long these
took to go out is a column of its own, and the delays are those of all later requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from multiprocessing.connection import Connection
from random import Random

from headrace.bench.interval import quantile
from headrace.bench.run import Stop
from headrace.bench.session import Asked, Session, loop_factory, run_session
from headrace.bench.summary import Summary
from headrace.client.connection import parse_address
from headrace.workload.arrivals import ClosedLoop, OpenLoop
from headrace.workload.distribution import Uniform
from headrace.workload.workload import Lengths, Synthetic, fixed

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = b'HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{"data": [{"id": "stand-in"}]}'


def _event(value: object) -> bytes:
    body = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(body), body)


_TOKEN = _event({"id": "x" * 24, "object": "chat.completion.chunk", "created": 0, "model": "m",
                 "choices": [{"index": 0, "delta": {"content": " word"},
                              "finish_reason": None}]})  # fmt: skip


class StandIn:
    """Answers at a fixed pace, whatever comes."""

    def __init__(self, gap_s: float, in_steps: bool) -> None:
        self._gap_s = gap_s
        self._in_steps = in_steps
        self._step = asyncio.Event()
        self._random = Random(0)

    async def steps(self) -> None:
        while True:
            await asyncio.sleep(self._gap_s)
            done, self._step = self._step, asyncio.Event()
            done.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(_MODELS)
                    continue
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                await self._answer(writer, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        writer.write(_HEAD)
        tokens = int(str(body["max_tokens"]))
        words = len(str(body["messages"]).split())
        loop = asyncio.get_running_loop()
        first_s = loop.time() + self._gap_s * self._random.random()
        for number in range(tokens):
            if self._in_steps:
                await self._step.wait()
            else:  # at times that do not move: else streams that are late together stay together
                await asyncio.sleep(first_s + number * self._gap_s - loop.time())
            writer.write(_TOKEN)
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        usage = {"prompt_tokens": words, "completion_tokens": tokens}
        writer.write(_event(last) + _event({"choices": [], "usage": usage})
                     + _event(b"[DONE]") + b"0\r\n\r\n")  # fmt: skip


KINDS = ("open", "spread", "steps", "waves")
_IN_STEPS = ("steps", "waves")


def _stand_in(port: Connection, gap_s: float, in_steps: bool, core: int) -> None:
    os.sched_setaffinity(0, {core})

    async def work() -> None:
        made = StandIn(gap_s, in_steps)
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await made.steps() if in_steps else await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work())


def measure(streams: int, rate_s: float, seconds: float, tokens: int, kind: str) -> Summary:
    """`kind` is one of KINDS."""
    gap_s, cores = streams / rate_s, os.sched_getaffinity(0)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(
        target=_stand_in, args=(theirs, gap_s, kind in _IN_STEPS, min(cores)), daemon=True
    )
    server.start()
    os.sched_setaffinity(0, {max(cores)})
    try:
        session = Session(Asked(address=parse_address(f":{ours.recv()}")))
        arrivals: OpenLoop | ClosedLoop = ClosedLoop(clients=streams)
        if kind == "open":
            arrivals = OpenLoop(rate_s=rate_s / tokens)
        outputs = fixed(tokens)
        if kind == "steps":
            outputs = Lengths(Uniform(tokens / 2, 1.5 * tokens))
        workload = Synthetic(prompts=fixed(256), outputs=outputs, arrivals=arrivals)

        async def work() -> Summary:
            await session.open()
            return await session.measure(workload, Stop(duration_s=seconds))

        return run_session(session, work)
    finally:
        server.terminate()
        server.join()
        os.sched_setaffinity(0, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens a second, in all")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--realtime", action="store_true", help="SCHED_FIFO; needs the right to it")
    asked = parser.parse_args()
    if asked.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before the start")
    print(f"{'':<8}{'streams':>8}{'tokens/s':>10}{'late p50':>10}{'late p99':>10}{'loop p99':>10}"
          f"{'CPU':>7}{'start':>10}")  # fmt: skip
    for kind in KINDS:
        found = measure(asked.streams, asked.rate, asked.seconds, asked.tokens, kind)
        health = found.health
        late = sorted(one.late_s for one in found.records if one.scheduled_s > 0)
        start_s = max((one.late_s for one in found.records if one.scheduled_s <= 0), default=0.0)
        print(
            f"{kind:<8}{found.most_at_once:>8}{found.output_tokens_s:>10,.0f}"
            f"{quantile(late, 0.5) * 1e3:>7.2f} ms{quantile(late, 0.99) * 1e3:>7.2f} ms"
            f"{health.lag_p99_s * 1e3:>7.2f} ms{health.cpu_share:>7.0%}{start_s * 1e3:>7.1f} ms"
        )


if __name__ == "__main__":
    main()
