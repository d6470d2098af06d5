"""A fuzzer of whole requests: real HTTP to a real server, and what must hold whatever is sent.

    python benchmarks/fuzz_requests.py [--seed 1] [--count 1000000] [--seconds 60] [--source SRC]
    python benchmarks/fuzz_requests.py --seed 1 --replay 4711

Every case is a function of (seed, number): `--replay` sends one again and shows the answer. Held to
all along: no 5xx but 503 with Retry-After; errors in OpenAI's or Anthropic's shape; streams that
end with a word; `/health` answers; no engine restart; no line of level error in the log; an honest
client's seeded answers are the same bits. At the end: blocks free, descriptors and memory as they
were after the warm-up. Exits with 1 if any of it did not hold, and says how to see it again.
`--without grammars,sizes` leaves hostile grammars, or lists and texts beyond a hundred, out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

import attack_wire
from attack_probe import ProbeProcess
from attacked_server import SOURCE, AttackedServer
from fuzz_cases import Case, Cases
from fuzz_run import Fuzzer, Run
from source_check import check_source

# A short context, so that going beyond it takes no time; a small pool and a small store, so that
# both are full, and their memory resident, when the warm-up ends.
FLAGS = (
    *("--context-tokens", "512", "--kv-tokens", "2048", "--max-sequences", "16"),
    *("--log-level", "warning", "--client-timeout-s", "3", "--timeout-s", "60"),
    *("--max-stored-responses", "50", "--max-stored", "1MiB"),
)
WARM_SEED = 0  # of cases that bring memory to its level; others are looked for from 1 on


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int = 1
    first: int = 0
    count: int = 1_000_000_000
    seconds: float = 1e9
    warm_count: int = 20_000  # so many have seen bodies of every size
    warm_seconds: float = 300.0
    concurrency: int = 32
    without: frozenset[str] = frozenset()
    health_ms: float | None = None  # None: timing decides nothing
    grown_share: float = 0.05  # of memory, since the warm-up
    grown_bytes: int = 0  # or so much, where that is more
    is_loud: bool = False


async def _fill_pool(port: int) -> None:
    """Memory of the KV pool is resident once its blocks were used."""
    chooser = random.Random(1)
    prompts = [[chooser.randrange(100, 49_000) for _ in range(300)] for _ in range(8)]
    bodies = [{"prompt": prompt, "max_tokens": 8, "ignore_eos": True} for prompt in prompts]
    await asyncio.gather(*(attack_wire.ask(port, "/v1/completions", body) for body in bodies))


def fuzz(server: AttackedServer, plan: Plan, folder: Path) -> tuple[Run, dict[str, Any]]:
    """What was found, and what it looked like meanwhile."""
    description = json.loads(server.get("/openapi.json"))
    probe = ProbeProcess(server.port, health_ms=plan.health_ms or 250)
    uvloop.run(_fill_pool(server.port))
    cases = Cases(WARM_SEED, description, without=plan.without)
    warming = Fuzzer(server, cases, folder, loud=plan.is_loud)
    uvloop.run(warming.fuzz(0, plan.warm_count, plan.warm_seconds, plan.concurrency))
    server.wait_free(60)
    warm = server.held()
    cases = Cases(plan.seed, description, without=plan.without)
    fuzzer = Fuzzer(server, cases, folder, loud=plan.is_loud)
    fuzzer.run.findings.update(warming.run.findings)
    uvloop.run(fuzzer.fuzz(plan.first, plan.count, plan.seconds, plan.concurrency))
    said = probe.stop()
    held = fuzzer.check_settled(warm, plan.grown_share, plan.grown_bytes)
    fuzzer.check_probe(said, strict=plan.health_ms is not None)
    run = fuzzer.run
    report = {
        "seed": plan.seed,
        "first": plan.first,
        "sent": run.sent,
        "warming": warming.run.sent,
        "seconds": round(run.took_s, 1),
        "per_second": round(run.sent / max(run.took_s, 1e-9), 1),
        "statuses": dict(run.statuses.most_common()),
        "families": dict(run.families.most_common()),
        "slowest": [(round(took_s, 2), number) for took_s, number in run.slowest],
        "health": said["health"],
        "honest": said["honest"],
        "warm_mb": round(warm.bytes / 1e6, 1),
        "end_mb": round(held.bytes / 1e6, 1),
        "growth": round(held.bytes / warm.bytes - 1, 4),
        "descriptors": [warm.descriptors, held.descriptors],
        "load": list(os.getloadavg()),
        "findings": [
            {
                "what": where,
                "times": found.times,
                "seed": found.seed,
                "number": found.case.number if found.case else None,
            }
            for where, found in run.findings.items()
        ],
    }
    return run, report


async def _replay(server: AttackedServer, case: Case, folder: Path, cases: Cases) -> Fuzzer:
    fuzzer = Fuzzer(server, cases, folder, loud=True)
    # So that there is an answer that was stored, where the case asks for one.
    stored = await attack_wire.ask(
        server.port, "/v1/responses", {"input": "Hi", "max_output_tokens": 1}
    )
    fuzzer.keep_id(stored.body)
    wire = await attack_wire.Wire.open(server.port)
    async with asyncio.timeout(300):
        answer = await fuzzer.send(case, wire)
    if answer is not None:
        print(answer.status, json.dumps(answer.headers, indent=1))
        print(answer.body[:4000].decode("utf-8", "replace"))
    return fuzzer


def replay(server: AttackedServer, plan: Plan, number: int, folder: Path) -> int:
    cases = Cases(plan.seed, json.loads(server.get("/openapi.json")), without=plan.without)
    case = cases.make(number)
    print(case.family, case.method, case.path, case.ending, f"{len(case.data)} bytes")
    print(repr(case.data[:3000]))
    before = server.held()
    fuzzer = asyncio.run(_replay(server, case, folder, cases))
    used = server.wait_free(60)
    print(f"before {before}\nafter  {server.held()}; {used} blocks in use")
    print("the log ends:\n" + server.log_tail())
    return 1 if fuzzer.run.findings or server.log_errors() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=None, help="default: one that nobody had")
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--count", type=int, default=1_000_000_000)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--warm-count", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="this one case alone")
    parser.add_argument("--without", default="", help="grammars, sizes, or both with a comma")
    parser.add_argument("--health-ms", type=float, help="a slower /health is a finding")
    parser.add_argument("--source", type=Path, default=SOURCE, help="of the server to attack")
    parser.add_argument("--flags", default="", help="more flags of headrace serve")
    parser.add_argument("--folder", type=Path, help="for cases and the log; default: a new one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check_source(options.source)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="headrace-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    seed = random.SystemRandom().randrange(1, 2**31) if options.seed is None else options.seed
    plan = Plan(
        seed=seed,
        first=options.first,
        count=options.count,
        seconds=options.seconds,
        warm_count=options.warm_count,
        concurrency=options.concurrency,
        without=frozenset(filter(None, options.without.split(","))),
        health_ms=options.health_ms,
        is_loud=True,
    )
    server = AttackedServer(folder, [*FLAGS, *options.flags.split()], source=options.source)
    try:
        server.wait_ready()
        print(f"seed {seed}, folder {folder}", flush=True)
        if options.replay is not None:
            return replay(server, plan, options.replay, folder)
        run, report = fuzz(server, plan, folder)
    finally:
        server.stop()
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))
    return 1 if run.findings else 0


if __name__ == "__main__":
    sys.exit(main())
