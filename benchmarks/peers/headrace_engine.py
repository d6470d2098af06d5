"""Headrace's adapter: steps of its CPU runner in process, and `headrace serve` over HTTP.

Runs in the environment that Headrace is installed in. The wall clock around a step decides, with
the plan made and the tokens drawn: more than what the peers' own tools count.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version

from headrace.assemble import Assembled, assemble
from headrace.core.step import DrawParams, Runner, StepPlan, StepResult
from peers.adapter import Answer, HttpServer, free_port, run_adapter
from peers.workloads import DECODE_STEPS, MAX_SEQUENCES, make_prompt

GREEDY = DrawParams(temperature=0.0)
BLOCK_TOKENS = 16


class Headrace:
    def __init__(self) -> None:
        self._model = ""
        self._threads = 0
        self._assembled: Assembled | None = None
        self._server: HttpServer | None = None

    def load(self, model: str, threads: int) -> Answer:
        self._model, self._threads = model, threads
        return {"note": f"{version('headrace')}, threads {threads}"}

    def _runner(self) -> Runner:
        if self._assembled is None:
            self._assembled = assemble(
                self._model, kv_tokens=MAX_SEQUENCES * 256, threads=self._threads
            )
        return self._assembled.runner

    def prefill(self, tokens: int, seed: str) -> Answer:
        runner = self._runner()
        fill(runner, 0, make_prompt(tokens, "warm"), blocks_for(tokens))
        prompt = make_prompt(tokens, seed)
        began = time.perf_counter()
        fill(runner, 0, prompt, blocks_for(tokens))
        return {"value": tokens / (time.perf_counter() - began)}

    def decode(self, sequences: int, context: int, seed: str) -> Answer:
        runner = self._runner()
        blocks = blocks_for(context + DECODE_STEPS + 1)
        fill(runner, 0, make_prompt(context, seed), blocks)
        copies = [(block % blocks, block) for block in range(blocks, sequences * blocks)]
        runner.submit(StepPlan(copies=copies))
        runner.collect()
        ids = list(range(100, 100 + sequences))
        began = 0.0
        for step in range(DECODE_STEPS + 1):
            if step == 1:  # the first one warms up
                began = time.perf_counter()
            plan = StepPlan()
            for n in range(sequences):
                add_row(plan, n, [ids[n]], context + step, blocks)
            runner.submit(plan)
            ids = drawn(runner.collect())
        return {"value": sequences * DECODE_STEPS / (time.perf_counter() - began)}

    def serve(self) -> Answer:
        if self._server is None:
            port = free_port()
            run = "from headrace.cli.commands import main; main()"
            self._server = HttpServer(
                [
                    *(sys.executable, "-c", run, "serve", self._model, "--port", str(port)),
                    *("--max-sequences", "16", "--kv-tokens", "16384", "--log-level", "warning"),
                    *("--threads", str(self._threads)),
                ],
                port,
                "/ready",
            )
        return {"port": self._server.port}

    def stop(self) -> None:
        if self._server:
            self._server.stop()
        if self._assembled:
            self._assembled.close()


def drawn(result: StepResult) -> list[int]:
    for found in result.extras.values():
        raise RuntimeError(found.error or "a step found what nobody asked for")
    return [token for (token,) in result.tokens]


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def add_row(plan: StepPlan, number: int, tokens: list[int], start: int, blocks: int) -> None:
    table = list(range(number * blocks, (number + 1) * blocks))
    plan.add(number, tokens, start, table, version=blocks, draw=GREEDY)


def fill(runner: Runner, number: int, prompt: list[int], blocks: int) -> None:
    most = runner.limits.max_batch_tokens
    for at in range(0, len(prompt), most):
        plan = StepPlan()
        add_row(plan, number, prompt[at : at + most], at, blocks)
        runner.submit(plan)
        runner.collect()


if __name__ == "__main__":
    run_adapter(Headrace())
