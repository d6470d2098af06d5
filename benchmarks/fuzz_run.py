"""The fuzzer's clients: they send cases, watch the server meanwhile, and collect what is wrong.

Findings of one kind at one endpoint are one finding. Knows cases by their numbers; what they are is
fuzz_cases.py's affair, what answers must look like fuzz_checks.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attack_wire
import fuzz_checks
from attacked_server import AttackedServer, Held
from fuzz_bodies import RESPONSES, STORED_ID
from fuzz_cases import CUT, HALF_CLOSE, LEAVE, Case, Cases

ANSWER_LIMIT_S = 90.0
SETTLE_S = 60.0
RECENT = 64  # cases that are named when the server as a whole went wrong


@dataclass(slots=True)
class Finding:
    what: str
    case: Case | None
    seed: int
    detail: str = ""
    times: int = 1


@dataclass(slots=True)
class Run:
    """What became of it."""

    sent: int = 0
    took_s: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[float, int]] = field(default_factory=list)
    findings: dict[str, Finding] = field(default_factory=dict)

    def find(self, what: str, case: Case | None, seed: int, detail: str = "") -> bool:
        """Whether it is new."""
        where = what
        if (
            case is not None
        ):  # how it was sent matters where nothing came back, what was sent elsewhere
            where = f"{case.family if what.startswith('no answer') else case.path}: {what}"
        if where in self.findings:
            self.findings[where].times += 1
            return False
        self.findings[where] = Finding(what, case, seed, detail)
        return True


class Fuzzer:
    def __init__(self, server: AttackedServer, cases: Cases, folder: Path, *, loud: bool) -> None:
        self.server = server
        self.cases = cases
        self.run = Run()
        self._folder = folder
        self._loud = loud
        self._stored = STORED_ID
        self._open: dict[int, float] = {}

    # -- one case ----------------------------------------------------------------------------------

    async def send(self, case: Case, wire: attack_wire.Wire) -> attack_wire.Answer | None:
        """The last answer, where the case waits for one; notes what is wrong."""
        stored = self._stored.encode()
        for place, piece in enumerate(case.pieces):
            if place and case.pause_s:
                await asyncio.sleep(case.pause_s)
            wire.send(piece.replace(STORED_ID.encode(), stored))
            if len(piece) > 65536:
                with contextlib.suppress(ConnectionError):  # refused by its size: read what it says
                    await wire.drain()
        if case.ending == LEAVE:
            await asyncio.sleep(0)
            return None
        if case.ending == CUT:
            await wire.reader.read(case.cut_bytes)
            return None
        if case.ending == HALF_CLOSE:
            wire.half_close()
        answer = None
        for _ in range(case.answers):
            answer = await wire.answer(case.method)
            self.run.statuses[str(answer.status)] += 1
            for problem in fuzz_checks.check(case, answer):
                self.report(problem, case)
            if not answer.keeps_alive:
                break
        if answer is not None and case.path == RESPONSES and answer.status == 200:
            self.keep_id(answer.body)
        return answer

    def keep_id(self, body: bytes) -> None:
        place = body.find(b'"resp_')
        found = body[place + 1 : place + 1 + len(STORED_ID)].decode("ascii", "replace")
        if place >= 0 and found.replace("_", "").isalnum() and found != STORED_ID:
            self._stored = found

    async def _one(self, case: Case, wire: attack_wire.Wire | None) -> attack_wire.Wire | None:
        """Sends it on the connection that is left over, or on a new one; the connection, if it can
        be used again."""
        if wire is not None and (case.own_connection or wire.reader.at_eof()):
            wire.abort()
            wire = None
        is_new = wire is None
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                wire = wire or await attack_wire.Wire.open(self.server.port)
                answer = await self.send(case, wire)
        except TimeoutError:
            self.report(f"no answer within {ANSWER_LIMIT_S:g} s", case)
            answer = None
        except attack_wire.BrokenAnswerError as error:
            self.report(f"an answer that is not HTTP: {error}", case)
            answer = None
        except (OSError, asyncio.IncompleteReadError) as error:
            answer = None
            if case.is_http and case.ending not in (LEAVE, CUT):
                if is_new:
                    self.report(f"no answer: {type(error).__name__}", case)
                else:  # a connection that was kept may be closed by either side
                    return await self._one(case, None)
            self.run.statuses["closed"] += 1
        if wire is not None and (answer is None or case.own_connection or not answer.keeps_alive):
            wire.abort()
            return None
        return wire

    async def _client(self, numbers: Iterator[int]) -> None:
        wire: attack_wire.Wire | None = None
        for number in numbers:
            case = self.cases.make(number)
            began_s = time.monotonic()
            self._open[number] = began_s
            wire = await self._one(case, wire)
            del self._open[number]
            self.run.sent += 1
            self.run.families[case.family] += 1
            took_s = time.monotonic() - began_s
            if len(self.run.slowest) < 10 or took_s > self.run.slowest[-1][0]:
                self.run.slowest = sorted([*self.run.slowest, (took_s, number)], reverse=True)[:10]
        if wire is not None:
            wire.abort()

    # -- all of them -------------------------------------------------------------------------------

    async def fuzz(self, first: int, count: int, seconds: float, concurrency: int) -> None:
        """From `first` on, so many or for so long, whichever ends first; watches meanwhile."""
        end_s = time.monotonic() + seconds

        def numbers() -> Iterator[int]:
            for number in range(first, first + count):
                if time.monotonic() > end_s:
                    return
                yield number

        shared = numbers()
        began_s = time.monotonic()
        watch = asyncio.ensure_future(self._watch())
        await asyncio.gather(*(self._client(shared) for _ in range(concurrency)))
        watch.cancel()
        self.run.took_s += time.monotonic() - began_s

    async def _watch(self) -> None:
        """The server's log grows with errors when something went wrong inside."""
        seen, last_s, last_sent = 0, time.monotonic(), 0
        while True:
            await asyncio.sleep(1.0)
            with self.server.log_path.open("rb") as log:
                log.seek(seen)
                new = log.read()
            seen += len(new)
            if new and self.server.log_errors():
                self.check_log()
            if not self.server.is_alive:
                self.report("the server ended", None, self._recent())
                return
            if self._loud and time.monotonic() - last_s > 10:
                held = self.server.held()
                rate = (self.run.sent - last_sent) / (time.monotonic() - last_s)
                print(
                    f"{self.run.sent:8} sent, {rate:6.0f}/s; http {held.http_bytes / 1e6:.0f} MB, "
                    f"engine {held.engine_bytes / 1e6:.0f} MB, {held.descriptors} descriptors",
                    flush=True,
                )
                last_s, last_sent = time.monotonic(), self.run.sent

    def check_log(self) -> None:
        for line in self.server.log_errors():
            self.report(f"the log has an error: {_gist(line)}", None, f"{self._recent()}\n{line}")

    def _recent(self) -> str:
        oldest = sorted(self._open, key=self._open.__getitem__)
        return f"under way: {oldest[:RECENT]}; sent {self.run.sent}"

    def report(self, what: str, case: Case | None, detail: str = "") -> None:
        if not self.run.find(what, case, self.cases.seed, detail):
            return
        print(f"\nFINDING {what}", flush=True)
        if case is not None:
            path = self._folder / f"case-{self.cases.seed}-{case.number}.http"
            path.write_bytes(case.data)
            print(f"  seed {self.cases.seed}, number {case.number} ({case.family}, {case.path})")
            print(
                f"  python benchmarks/fuzz_requests.py --seed {self.cases.seed} --replay ", end=""
            )
            print(f"{case.number}\n  nc 127.0.0.1 PORT < {path}  ({len(case.data)} bytes)")
            print(f"  {case.data[:600]!r}")
        if detail:
            print("  " + detail[:3000].replace("\n", "\n  "))
        print("  the log ends:\n    " + self.server.log_tail(5)[-2000:].replace("\n", "\n    "))

    # -- afterwards --------------------------------------------------------------------------------

    def check_settled(self, warm: Held, grown_share: float, grown_bytes: int) -> Held:
        """Blocks, descriptors and memory, once everything that was left behind has gone."""
        if (used := self.server.wait_free(SETTLE_S)) != 0:
            self.report(f"blocks are in use at the end: {used}", None)
        end_s = time.monotonic() + SETTLE_S
        most_bytes = max(warm.bytes * (1 + grown_share), warm.bytes + grown_bytes)
        held = self.server.held()
        while time.monotonic() < end_s:
            if held.bytes <= most_bytes and held.descriptors <= warm.descriptors + 4:
                return held
            time.sleep(0.5)
            held = self.server.held()
        if held.bytes > most_bytes:
            grown = f"{warm.bytes / 1e6:.0f} to {held.bytes / 1e6:.0f} MB"
            self.report("memory has grown", None, f"{grown}: {warm} {held}")
        if held.descriptors > warm.descriptors + 4:
            self.report("descriptors are left open", None, f"{warm} {held}")
        return held

    def check_probe(self, said: dict[str, Any], *, strict: bool) -> None:
        """Timing decides only where it was asked to; an answer that never comes always does."""
        if said["different"]:
            self.report("an honest answer changed", None, json.dumps(said["different"])[:3000])
        if said["honest"].get("same", 0) == 0:
            self.report("no honest client was answered", None, json.dumps(said["honest"]))
        if failed := said["health"]["failed"]:
            self.report("/health failed", None, json.dumps(failed))
        if strict and said["health"]["slow_twice"]:
            self.report("/health was slow twice in a row", None, json.dumps(said["health"]))
        if restarts := self.server.restarts():
            self.report("the engine was restarted", None, f"{restarts} times")
        self.check_log()


def _gist(line: str) -> str:
    """What of a log line is the same every time."""
    try:
        said = json.loads(line)
        text = f"{said.get('logger')}: {said.get('message')}"
        text += " " + str(said.get("exception", ""))[-200:]
    except ValueError:
        text = line
    return "".join("#" if letter.isdigit() else letter for letter in text)[:300]
