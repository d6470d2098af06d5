"""What others feel while a server is attacked: a process that asks `/health` twenty times a second
and, as an honest client, the same seeded questions over and over.

    python benchmarks/attack_probe.py PORT [--key KEY] [--pause-s 0.5]

Says `ready` once it knows what the answers are on a quiet server, probes until its standard input
ends, and then writes one JSON object. Probes go out on time, whether the ones before have come back
or not: a server that hangs for a second is seen by twenty of them. Knows nothing of the attack.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attack_wire

EVERY_S = 0.05
HEALTH_LIMIT_S = 10.0
MOST_UNANSWERED = 400  # probes: descriptors are ours too
SHAPE = {
    "type": "object",
    "properties": {"river": {"enum": ["Aare", "Reuss", "Limmat"]}, "km": {"type": "integer"}},
    "required": ["river", "km"],
}


def _chat(text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}
    return "/v1/chat/completions", body


# Greedy and sampled, with logprobs, several at once, held to a schema, a regex, a text's vector.
HONEST: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": _chat("Name two rivers.", temperature=0, logprobs=True, top_logprobs=3),
    "sampled": _chat("Name three mills.", temperature=0.9, seed=7, logprobs=True),
    "several": _chat("Name a stone.", temperature=1.2, seed=3, top_p=0.9, n=3),
    "schema": _chat(
        "A river as JSON.",
        temperature=0.8,
        seed=11,
        max_tokens=24,
        response_format={"type": "json_schema", "json_schema": {"name": "r", "schema": SHAPE}},
    ),
    "fresh": _chat("Is water wet?", temperature=0.7, seed=5),  # and a grammar, see below
    "vector": ("/v1/embeddings", {"input": "a mill by the river"}),
}


def question(name: str) -> tuple[str, dict[str, Any]]:
    """To be asked now. The grammar of `fresh` is the same every time in what it allows, and new in
    its text: it has to be compiled, whoever holds the places for that."""
    path, body = HONEST[name]
    if name == "fresh":
        body = {**body, "guided_json": {"enum": ["yes", "no"], "description": secrets.token_hex(8)}}
    return path, body


def essence(answer: Any) -> Any:
    """What must be the same every time: all but ids and times."""
    if "choices" in answer:
        return [
            (choice["message"], choice["logprobs"], choice["finish_reason"])
            for choice in answer["choices"]
        ]
    # Sums of a prompt's pieces, in 64 bits: the last of those depend on where it was cut.
    return [[round(value, 9) for value in each["embedding"]] for each in answer["data"]]


class Probe:
    def __init__(self, port: int, key: str | None, pause_s: float, health_ms: float) -> None:
        self._port = port
        self._headers = () if key is None else (("authorization", f"Bearer {key}"),)
        self._pause_s = pause_s
        self._health_s = health_ms / 1000
        self._expected: dict[str, str] = {}
        self._took_s: list[float] = []  # of probes that were answered
        self._quiet_s: list[float] = []  # of honest questions before anything else
        self._samples: list[tuple[float, float | None]] = []  # when a probe began, what it took
        self._honest_samples: list[tuple[float, float | None]] = []
        self._failed: Counter[str] = Counter()
        self._slow_twice = 0
        self._honest_s: list[float] = []
        self._honest: Counter[str] = Counter()
        self._different: list[Any] = []
        self._end = asyncio.Event()

    async def baseline(self) -> None:
        for name in [*HONEST] * 2:
            path, body = question(name)
            began_s = time.perf_counter()
            answer = await attack_wire.ask(self._port, path, body, *self._headers)
            if answer.status != 200:
                raise SystemExit(f"honest {name}: {answer.status} {answer.body[:300]!r}")
            self._quiet_s.append(time.perf_counter() - began_s)
            self._expected[name] = attack_wire.digest(essence(answer.json()))
        del self._quiet_s[: len(HONEST)]  # the first ones warmed the prefix cache

    async def run(self) -> None:
        threading_end = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        threading_end.add_done_callback(lambda _: self._end.set())
        honest = asyncio.ensure_future(self._ask_honestly())
        await self._probe_health()
        await honest

    async def _probe_health(self) -> None:
        open_probes: set[asyncio.Task[None]] = set()
        next_s = time.monotonic()
        while not self._end.is_set():
            if len(open_probes) < MOST_UNANSWERED:
                task = asyncio.ensure_future(self._health())
                open_probes.add(task)
                task.add_done_callback(open_probes.discard)
            next_s = max(next_s + EVERY_S, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        if open_probes:
            await asyncio.wait(open_probes)

    async def _health(self) -> None:
        began_s = time.time()
        took_s = await self._health_once()
        self._samples.append((began_s, took_s))
        if took_s is None or took_s > self._health_s:
            again_s = await self._health_once()  # this machine may have been away for a moment
            if again_s is None or again_s > self._health_s:
                self._slow_twice += 1

    async def _health_once(self) -> float | None:
        began_s = time.perf_counter()
        try:
            status = await attack_wire.health(self._port, limit_s=HEALTH_LIMIT_S)
        except TimeoutError:
            self._failed["timeout"] += 1
            return None
        except (OSError, asyncio.IncompleteReadError) as error:
            self._failed[type(error).__name__] += 1
            return None
        if status != 200:
            self._failed[str(status)] += 1
            return None
        took_s = time.perf_counter() - began_s
        self._took_s.append(took_s)
        return took_s

    async def _ask_honestly(self) -> None:
        while not self._end.is_set():
            for name in HONEST:
                if self._end.is_set():
                    return
                await self._ask(name, *question(name))
                await asyncio.sleep(self._pause_s)

    async def _ask(self, name: str, path: str, body: dict[str, Any]) -> None:
        began_s = time.perf_counter()
        self._honest_samples.append((time.time(), None))
        try:
            answer = await attack_wire.ask(self._port, path, body, *self._headers, limit_s=60)
        except TimeoutError:
            self._honest["timeout"] += 1
            return
        except (OSError, asyncio.IncompleteReadError) as error:
            self._honest[type(error).__name__] += 1
            return
        if answer.status != 200:
            self._honest[str(answer.status)] += 1
            self._honest[f"{name} {answer.status}"] += 1
            return
        took_s = time.perf_counter() - began_s
        self._honest_s.append(took_s)
        self._honest_samples[-1] = (self._honest_samples[-1][0], took_s)
        found = answer.json()
        if attack_wire.digest(essence(found)) == self._expected[name]:
            self._honest["same"] += 1
        else:
            self._honest["different"] += 1
            self._different.append({"question": name, "answer": found})

    def report(self, *, with_samples: bool) -> dict[str, Any]:
        samples = {"health": self._samples, "honest": self._honest_samples}
        return {
            **({"samples": samples} if with_samples else {}),
            "quiet": in_ms(self._quiet_s),
            "health": {
                "answered": len(self._took_s),
                "failed": dict(self._failed),
                "slow_twice": self._slow_twice,
                **in_ms(self._took_s),
            },
            "honest": {**self._honest, **in_ms(self._honest_s)},
            "different": self._different[:3],
        }


def in_ms(seconds: list[float]) -> dict[str, float]:
    """Percentiles; nothing where there is nothing."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    places = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    last = len(ordered) - 1
    return {name: round(ordered[round(part * last)] * 1000, 1) for name, part in places.items()}


class ProbeProcess:
    """The probe, as whoever attacks starts it."""

    def __init__(
        self,
        port: int,
        *,
        key: str | None = None,
        pause_s: float = 0.5,
        health_ms: float = 250,
        with_samples: bool = False,
    ) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(port)]
        command += ["--pause-s", str(pause_s), "--health-ms", str(health_ms)]
        command += [] if key is None else ["--key", key]
        command += ["--samples"] if with_samples else []
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("the probe did not get its answers from a quiet server")

    def stop(self) -> dict[str, Any]:
        said, _ = self._process.communicate("", timeout=150)
        report: dict[str, Any] = json.loads(said)
        return report


async def _main(options: argparse.Namespace) -> None:
    probe = Probe(options.port, options.key, options.pause_s, options.health_ms)
    await probe.baseline()
    print("ready", flush=True)
    await probe.run()
    print(json.dumps(probe.report(with_samples=options.samples)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("port", type=int)
    parser.add_argument("--key")
    parser.add_argument("--samples", action="store_true", help="report each one, with its time")
    parser.add_argument("--pause-s", type=float, default=0.5)
    parser.add_argument("--health-ms", type=float, default=250)
    asyncio.run(_main(parser.parse_args()))
