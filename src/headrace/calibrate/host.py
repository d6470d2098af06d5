"""What the engine itself takes for a step: scheduling before it, committing after it.

Measured with the engine's own counters while it decodes. Knows engines; no server.
"""

from __future__ import annotations

from headrace.calibrate.statistic import median
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.core.step import Runner
from headrace.engine.loop import Engine
from headrace.hardware.profile import HostTime

PROMPT, STEPS, ROUNDS = 8, 12, 2
ROWS = (1, 4, 16, 64, 256)


def measure_host(runner: Runner, row_counts: tuple[int, ...] = ROWS) -> list[HostTime]:
    """For each number of rows that the runner's limits allow."""
    limits = runner.limits
    room = limits.total_blocks // (-(-(PROMPT + STEPS) // limits.block_tokens) + 1)
    fitting = [n for n in row_counts if n <= min(limits.max_sequences, room)]
    return [_of(runner, rows) for rows in fitting or [1]]


def _of(runner: Runner, rows: int) -> HostTime:
    schedule_s, commit_s = [], []
    for _ in range(ROUNDS):
        engine = Engine(runner, frozenset())
        params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
        for number in range(rows):
            prompt = [number + 1] * PROMPT
            request = GenerateRequest(
                request_id=str(number), prompt_token_ids=prompt, params=params
            )
            engine.add(request)
        while engine.has_work:
            before = engine.stats.schedule_s, engine.stats.commit_s
            if len(engine.step()) == rows:
                schedule_s.append(engine.stats.schedule_s - before[0])
                commit_s.append(engine.stats.commit_s - before[1])
    return HostTime(decode_rows=rows, schedule_s=median(schedule_s), commit_s=median(commit_s))
