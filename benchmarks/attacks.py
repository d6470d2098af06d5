"""Every known attack on a real server, and what others felt meanwhile: before and after a change.

    python benchmarks/attacks.py --source SRC --json FILE [--only NAME ...] [--rows 1 2]
    python benchmarks/attacks.py --table BEFORE [AFTER]
    python benchmarks/attacks.py --list

SRC is the source folder of the build to attack (it must have its native module), so that one script
measures two builds. Each attack gets a fresh server (default model, 2 cores, 8,192 tokens of KV)
that was warmed up; `/health` is asked 20 times a second and an honest client asks seeded questions
in another process (attack_probe.py). Reported: what the attacker got, `/health` p50, p99 and most
while the attack ran and failed probes, memory of all processes before, at its peak and after,
engine restarts, whether honest answers were the same and how long they took, blocks and descriptors
at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import attack_wire
import attacks_table
from attack_probe import ProbeProcess, in_ms
from attacked_server import SOURCE, AttackedServer, Held
from attacks_edge import EDGE, PLANTED
from attacks_work import KV_TOKENS, WORK, Attack, Outcome, Target
from source_check import check_source

ATTACKS = {attack.name: attack for attack in (*WORK, *EDGE)}
MOST_BYTES = 6 << 30  # a server beyond this is stopped: the machine is not ours alone
PLANTED_MODULE = f"open({PLANTED!r}, 'w').write('x')\nraise ImportError('planted')\n"


class Sampler(threading.Thread):
    """Memory and descriptors, ten times a second."""

    def __init__(self, server: AttackedServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._ended = threading.Event()
        self.peak: Held = server.held()
        self.most_descriptors = 0
        self.was_stopped = False

    def run(self) -> None:
        while not self._ended.wait(0.1) and self._server.is_alive:
            held = self._server.held()
            self.most_descriptors = max(self.most_descriptors, held.descriptors)
            if held.bytes > self.peak.bytes:
                self.peak = held
            if held.bytes > MOST_BYTES:
                self.was_stopped = True
                self._server.process.kill()

    def end(self) -> None:
        self._ended.set()
        self.join()


async def _warm_up(port: int, key: str | None) -> None:
    """Until the pool's memory is resident: what is measured afterwards is the attack's."""
    chooser = random.Random(1)
    headers = () if key is None else (("authorization", f"Bearer {key}"),)
    for _ in range(KV_TOKENS // 1000):
        prompt = [chooser.randrange(100, 49_000) for _ in range(1000)]
        body = {"prompt": prompt, "max_tokens": 1}
        await attack_wire.ask(port, "/v1/completions", body, *headers)


def measure(attack: Attack, source: Path, folder: Path, bound_s: float) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    flags, attacker, honest = list(attack.flags), None, None
    if attack.keys:
        keys = folder / "keys.toml"
        keys.write_text(attack.keys)
        keys.chmod(0o600)
        flags += ["--api-keys-file", str(keys)]
        attacker, honest = "attacker", "honest"
    if attack.environment:
        attacker = honest = "honest"
    if attack.planted:
        (folder / "msgspec.py").write_text(PLANTED_MODULE)
    server = AttackedServer(
        folder / "server",
        flags,
        source=source,
        environment=dict(attack.environment),
        working_folder=folder if attack.planted else None,
        most_descriptors=attack.most_descriptors,
    )
    outcome = Outcome()
    report: dict[str, Any] = {"name": attack.name, "row": attack.row, "what": attack.what}
    try:
        if not server.is_ready_within(30 if attack.planted else 120):
            # Of a planted module that is what one sees of it.
            if attack.planted:
                target = Target(server, outcome, bound_s)
                asyncio.run(attack.act(target))
            report |= {**_told(outcome), "started": False, "log": server.log_tail(5)}
            return report
        asyncio.run(_warm_up(server.port, honest))
        probe = ProbeProcess(server.port, key=honest, with_samples=True)
        before, sampler = server.held(), Sampler(server)
        sampler.start()
        began_s = time.time()
        outcome.statuses.clear()
        ended_in = asyncio.run(_attack(attack, Target(server, outcome, bound_s, attacker)))
        ended_s = time.time()
        time.sleep(max(0.0, began_s + 5 - ended_s))  # enough probes to have a percentile of
        window_s = (began_s, max(ended_s, began_s + 5))
        time.sleep(attack.after_s)
        after = server.held()
        sampler.end()
        said = probe.stop()
        report |= {
            **_told(outcome),
            "attack_s": round(ended_in, 1),
            "health": _in_window(said["samples"]["health"], *window_s),
            "health_after": _in_window(said["samples"]["health"], window_s[1], 1e12),
            "honest": said["honest"],
            "honest_quiet": said["quiet"],
            "different": said["different"],
            "honest_during": _in_window(said["samples"]["honest"], *window_s),
            "mb": {
                "before": _in_mb(before),
                "peak": _in_mb(sampler.peak),
                "after": _in_mb(after),
            },
            "restarts": server.restarts(honest),
            "alive": server.is_alive,
            "stopped_for_memory": sampler.was_stopped,
            "blocks": server.wait_free(5, honest),
            "descriptors": [before.descriptors, sampler.most_descriptors, after.descriptors],
            "errors": [line[:300] for line in server.log_errors()[:5]],
        }
    finally:
        report["load"] = [round(value, 1) for value in os.getloadavg()]
        server.stop()
    return report


async def _attack(attack: Attack, target: Target) -> float:
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(target.bound_s):
            await attack.act(target)
    except TimeoutError:
        target.outcome.statuses["cut by us"] += 1
    return time.monotonic() - began_s


def _told(outcome: Outcome) -> dict[str, Any]:
    return {
        "statuses": dict(outcome.statuses),
        "note": outcome.note,
        "succeeded": outcome.succeeded,
    }


def _in_window(samples: list[list[Any]], began_s: float, ended_s: float) -> dict[str, Any]:
    """Of probes that began in this time; those without an answer are counted apart."""
    found = [took_s for when_s, took_s in samples if began_s <= when_s <= ended_s]
    answered = [took_s for took_s in found if took_s is not None]
    return {"asked": len(found), "failed": len(found) - len(answered), **in_ms(answered)}


def _in_mb(held: Held) -> dict[str, int]:
    return {
        "http": held.http_bytes // 1_000_000,
        "engine": held.engine_bytes // 1_000_000,
        "others": held.others_bytes // 1_000_000,
        "all": held.bytes // 1_000_000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="attacks by name")
    parser.add_argument(
        "--rows", nargs="*", metavar="ROW", help="attacks by row; +: the newer ones"
    )
    parser.add_argument("--bound-s", type=float, default=75.0, help="of each attack")
    parser.add_argument("--json", type=Path, help="added to, attack by attack")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", nargs="+", type=Path, help="of files that --json made")
    options = parser.parse_args()
    if options.table:
        print(attacks_table.table([json.loads(path.read_text()) for path in options.table]))
        return
    check_source(options.source)
    chosen = [
        attack
        for attack in ATTACKS.values()
        if (not options.only or attack.name in options.only)
        and (not options.rows or attack.row in options.rows)
    ]
    if options.list:
        for attack in chosen:
            print(f"{attack.row:3} {attack.name:22} {attack.what}")
        return
    reports: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        reports = json.loads(options.json.read_text())["attacks"]
    for attack in chosen:
        with tempfile.TemporaryDirectory(prefix="headrace-attack-") as folder:
            found = measure(attack, options.source, Path(folder), options.bound_s)
        print(attacks_table.line([found]), flush=True)
        reports = [each for each in reports if each["name"] != attack.name] + [found]
        if options.json:
            text = json.dumps({"source": str(options.source), "attacks": reports}, indent=1)
            options.json.write_text(text)


if __name__ == "__main__":
    main()
