"""A plan survives a process boundary: a runner in another process draws the same tokens, and of
block tables, histories and draw parameters only what it has not seen yet is sent."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import DrawParams, Runner, RunnerLimits, StepPlan, StepResult
from headrace.engine.loop import Engine
from headrace.simulate.cost import linear_cost
from headrace.simulate.runner import SimulatedRunner

LIMITS = RunnerLimits(
    max_batch_tokens=128,
    max_sequences=64,
    total_blocks=260,
    block_tokens=16,
    context_tokens=512,
    steps_in_flight=2,
    counts_previous=True,
)


class Sender:
    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], int] = {}  # (sequence, version) -> blocks sent
        self._said: dict[int, int] = {}  # sequence -> tokens of its history that were sent
        self._params: dict[int, tuple[int, DrawParams]] = {}  # by identity; held, so that it stays

    def pack(self, plan: StepPlan) -> bytes:
        tails = []
        for row, table in enumerate(plan.tables):
            key = plan.sequence_ids[row], plan.versions[row]
            tails.append(table[self._blocks.get(key, 0) :])
            self._blocks[key] = len(table)
        extras = {}
        for row, extra in plan.extras.items():
            who = plan.sequence_ids[row]
            extras[row] = replace(extra, history=list(extra.history[self._said.get(who, 0) :]))
            self._said[who] = len(extra.history)
        new: list[DrawParams] = []
        numbers = [None if draw is None else self._number(draw, new) for draw in plan.draws]
        columns = replace(plan, tables=tails, extras={}, draws=[])
        fields = [getattr(columns, name) for name in StepPlan.__slots__]
        return pickle.dumps((fields, extras, numbers, new), protocol=5)

    def _number(self, draw: DrawParams, new: list[DrawParams]) -> int:
        if id(draw) not in self._params:
            self._params[id(draw)] = len(self._params), draw
            new.append(draw)
        return self._params[id(draw)][0]


class Receiver:
    def __init__(self) -> None:
        self._tables: dict[tuple[int, int], list[int]] = {}
        self._histories: dict[int, list[int]] = {}
        self._params: list[DrawParams] = []

    def unpack(self, data: bytes) -> StepPlan:
        fields, extras, numbers, new = pickle.loads(data)
        self._params += new
        plan = StepPlan(**dict(zip(StepPlan.__slots__, fields, strict=True)))
        plan.draws = [None if number is None else self._params[number] for number in numbers]
        for row, key in enumerate(zip(plan.sequence_ids, plan.versions, strict=True)):
            table = self._tables.setdefault(key, [])
            table += plan.tables[row]
            plan.tables[row] = table
        for row, extra in extras.items():
            known = self._histories.setdefault(plan.sequence_ids[row], [])
            known += extra.history
            plan.extras[row] = replace(extra, history=known)
        return plan


def make_runner() -> SimulatedRunner:
    return SimulatedRunner(LIMITS, cost=linear_cost(), clock=VirtualClock())


CHILD = "from tests.backends.shared.test_boundary import serve; serve()"


def serve() -> None:
    """The other process: plans on its standard input, results on its output."""
    runner, receiver = make_runner(), Receiver()
    while (message := pickle.load(sys.stdin.buffer)) is not None:
        if message == b"collect":
            pickle.dump(runner.collect(), sys.stdout.buffer)
            sys.stdout.flush()
        else:
            runner.submit(receiver.unpack(message))


class RemoteRunner:
    def __init__(self) -> None:
        self.limits = LIMITS
        self.progress = 0
        self.sizes: list[tuple[int, int]] = []  # (rows, bytes) of plans that decode alone
        self._sender = Sender()
        root = Path(__file__).parents[3]
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _send(self, message: bytes | None) -> None:
        assert self._child.stdin is not None
        pickle.dump(message, self._child.stdin)
        self._child.stdin.flush()

    def submit(self, plan: StepPlan) -> None:
        data = self._sender.pack(plan)
        if max(plan.counts) == 1 and not plan.extras:
            self.sizes.append((len(plan), len(data)))
        self._send(data)

    def collect(self) -> StepResult:
        assert self._child.stdout is not None
        self._send(b"collect")
        result = pickle.load(self._child.stdout)
        assert isinstance(result, StepResult)
        return result

    def close(self) -> None:
        self._send(None)
        self._child.communicate(timeout=30)
        assert self._child.returncode == 0


def requests(count: int, *, rare: bool, max_tokens: int) -> Sequence[GenerateRequest]:
    """With `rare`, some share a prefix, some have penalties, bias, several continuations."""
    chooser = random.Random(3)
    shared = [chooser.randrange(1000) for _ in range(40)]
    made = []
    for number in range(count):
        fields: dict[str, object] = {"seed": number, "temperature": 0.8, "max_tokens": max_tokens}
        special: list[dict[str, object]] = [
            {"temperature": 0.0},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
            {"n": 3, "logit_bias": {7: 2.0}},
            {"min_tokens": 5, "stop_token_ids": [3], "logprobs": 2},
        ]
        if rare:
            fields |= special[number % 4]
        prompt = shared * (number % 2) + [chooser.randrange(1000) for _ in range(20)]
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        made.append(GenerateRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    return made


def tokens_by(runner: Runner, asked: Sequence[GenerateRequest]) -> tuple[list[object], int]:
    config = SchedulerConfig(watermark=0.0)
    engine = Engine(runner, frozenset({999}), config, VirtualClock())
    for request in asked:
        engine.add(request)
    found: list[object] = []
    while engine.has_work:
        found += engine.step()
    return found, engine.stats.preemptions


def run_both(asked: Sequence[GenerateRequest]) -> tuple[RemoteRunner, int]:
    remote = RemoteRunner()
    found, preempted = tokens_by(remote, asked)
    remote.close()
    assert found
    assert (found, preempted) == tokens_by(make_runner(), asked)
    return remote, preempted


def test_the_tokens_are_the_same() -> None:
    _, preempted = run_both(requests(20, rare=True, max_tokens=180))
    assert preempted  # tables had to be sent anew, under another version


def test_little_is_sent() -> None:
    remote, _ = run_both(requests(64, rare=False, max_tokens=40))
    rows, size = max(remote.sizes)
    assert rows > 32
    assert size / rows < 40
