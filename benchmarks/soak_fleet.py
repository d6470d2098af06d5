"""Whether a fleet is after an hour what it was at the start: throughput and memory, in tenths.

    python benchmarks/soak_fleet.py [--minutes 60] [--replicas 2] [--clients 16] [--json FILE]

`headrace serve --replicas N` with a prefix cache on disk, under the requests of soak.py in a closed
loop: streams, seeds, stop strings, logprobs, n, schemas, refusals, clients that leave. One request
in four begins with one of a few long prompts, so that blocks are cached, evicted and read back.
After a warm-up of a minute each tenth of the time has its requests and answer tokens a second, the
fleet's processor time for a token, what others took of the machine, and each process' memory, files
and threads. Processor time for a token tells a fleet that became slower from a machine that did.
At the end nothing may run, and all blocks must be free.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from others_share import busy_s
from served import Server
from soak import WORDS, ask, make_body, resident_bytes

KV_TOKENS = 8192
WARM_S = 60.0
TENTHS = 10
PREFIXES = 12
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def prefix(number: int) -> str:
    chooser = random.Random(number)
    return " ".join(chooser.choice(WORDS) for _ in range(300))


def next_body(chooser: random.Random, prefixes: list[str]) -> dict[str, Any]:
    body = make_body(chooser)
    if chooser.random() < 0.25:
        system = {"role": "system", "content": chooser.choice(prefixes)}
        body["messages"] = [system, *body["messages"]]
    return body


def family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def named(server: Server) -> dict[str, int]:
    """The router, and each replica's HTTP and engine process; helpers that come and go are not."""
    shown = fetch(server, "/replicas")["replicas"]
    found = {"router": server.pid}
    for number, replica in enumerate(shown, 1):
        http = int(replica["pid"])
        found[f"http {number}"] = http
        engine = Path(f"/proc/{http}/task/{http}/children").read_text().split()[0]
        found[f"engine {number}"] = int(engine)
    return found


def fetch(server: Server, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def used_s(pids: list[int]) -> float:
    """Processor time of these processes, with that of children that have ended."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(field) for field in fields[11:15])
    return total / TICKS_PER_S


def sizes(pids: dict[str, int]) -> dict[str, dict[str, int]]:
    return {
        name: {
            "bytes": resident_bytes(pid),
            "files": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
        }
        for name, pid in pids.items()
    }


class Counted:
    def __init__(self) -> None:
        self.statuses = Counter[str]()
        self.tokens = 0
        self.broken: list[str] = []

    def take(self, body: dict[str, Any], reply: bytes) -> None:
        status = reply[9:12].decode() or "none"
        self.statuses[status] += 1
        expected = b"400" if body.get("temperature") == -1 else b"200"
        if reply[9:12] != expected or b'"type":"server_error"' in reply:
            self.broken.append(f"{body} -> {reply[-300:]!r}")
        if body.get("stream"):
            self.tokens += reply.count(b'"content":')
            if not reply.rstrip().endswith(b"0") or b"[DONE]" not in reply:
                self.broken.append(f"{body} -> {reply[-300:]!r}")
        elif (at := reply.find(b'"completion_tokens":')) >= 0:
            digits = reply[at + 20 : at + 30]
            self.tokens += int(digits.split(b",")[0].split(b"}")[0])


async def soak(server: Server, seconds: float, clients: int) -> dict[str, Any]:
    prefixes = [prefix(number) for number in range(PREFIXES)]
    counted, done, left = Counted(), 0, 0
    over = asyncio.Event()

    async def client(number: int) -> None:
        nonlocal done, left
        chooser = random.Random(number)
        while not over.is_set():
            body, leave = next_body(chooser, prefixes), chooser.random() < 0.05
            reply = await ask(server.port, body, leave)
            left += leave
            if not leave:
                counted.take(body, reply)
            done += 1

    working = [asyncio.create_task(client(number)) for number in range(clients)]
    await asyncio.sleep(WARM_S)
    pids = await asyncio.to_thread(named, server)
    rows: list[dict[str, Any]] = []
    for tenth in range(TENTHS):
        start = (time.perf_counter(), done, counted.tokens, used_s([*pids.values()]), busy_s())
        own_s = time.process_time()
        await asyncio.sleep(seconds / TENTHS)
        for task in working:
            if task.done():
                task.result()
        took_s = time.perf_counter() - start[0]
        tokens, fleet_s = counted.tokens - start[2], used_s([*pids.values()]) - start[3]
        all_s = (busy_s() or 0) - (start[4] or 0)
        row = {
            "tenth": tenth + 1,
            "requests_per_s": (done - start[1]) / took_s,
            "tokens_per_s": tokens / took_s,
            "fleet_ms_per_token": fleet_s / tokens * 1000,
            "client_cores": (time.process_time() - own_s) / took_s,
            "other_cores": (all_s - fleet_s - (time.process_time() - own_s)) / took_s,
            "processes": sizes(pids),
        }
        rows.append(row)
        show(row)
    over.set()
    await asyncio.gather(*working)
    await asyncio.sleep(2)
    return {
        "rows": rows,
        "done": done,
        "left": left,
        "statuses": counted.statuses,
        "broken": counted.broken[:20],
        "broken_count": len(counted.broken),
        "pids_same": await asyncio.to_thread(named, server) == pids,
        "load": await asyncio.to_thread(fetch, server, "/load"),
    }


def show(row: dict[str, Any]) -> None:
    memory = ", ".join(
        f"{name} {each['bytes'] / 1e6:.1f} MB / {each['files']} / {each['threads']}"
        for name, each in row["processes"].items()
    )
    print(
        f"{row['tenth']:2}: {row['requests_per_s']:6.2f} requests/s, {row['tokens_per_s']:6.1f} "
        f"tokens/s, {row['fleet_ms_per_token']:.2f} ms of processors a token, "
        f"others {row['other_cores']:.3f} cores; {memory}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    flags = ("--replicas", str(options.replicas), "--prefix-disk", f"{folder},256MiB")
    server = Server(options.clients, KV_TOKENS, *flags)
    try:
        found = asyncio.run(soak(server, options.minutes * 60, options.clients))
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    first, last = found["rows"][0], found["rows"][-1]
    print(f"{found['done']} requests, {found['left']} left early, statuses {found['statuses']}")
    print(f"broken: {found['broken_count']}; the same processes: {found['pids_same']}")
    for key in ("requests_per_s", "tokens_per_s", "fleet_ms_per_token"):
        print(f"{key}, the last tenth against the first: {last[key] / first[key]:.3f}")
    for name, each in last["processes"].items():
        growth = each["bytes"] / first["processes"][name]["bytes"] - 1
        print(f"{name}: memory {growth:+.2%} since the first tenth")
    print("load at the end:", json.dumps(found["load"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
