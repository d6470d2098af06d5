"""A model in shares on the CUDA backend, against the whole one on the reference: ranks are threads
that compute one at a time, and plans go to them as they go to other processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.cuda.test_runner import GREEDY, TOLERANCE, LibraryChoices, assert_alike, entry
from tests.backends.cuda.tiny import SPECS, VOCAB, make_weights
from tests.parallel.threads import ThreadRanks, together
from tests.plans import Draw, Row, plan_of

from headrace.backends.cuda.runner import CudaRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.step import PREVIOUS, StepResult
from headrace.models.sharding import share_of
from headrace.parallel.plans import PlanReader, PlanWriter
from headrace.weights.shard import share_weights

LIMITS: dict[str, Any] = {"total_blocks": 16, "max_batch_tokens": 40, "max_sequences": 5}


def steps() -> list[list[Row]]:
    """A prompt that is scored, in two chunks, beside another sequence; then both decode, one of
    them drawn."""
    rng = np.random.default_rng(1)
    long, short = rng.integers(0, VOCAB, 37).tolist(), [5, 96, 60]
    first, second = [3, 7, 1], [4]
    return [
        [
            entry(1, long[:21], 0, first[:2], targets=long[1:22], top_logprobs=3),
            entry(2, short, 0, second, draw=GREEDY, top_logprobs=2),
        ],
        [
            entry(2, [PREVIOUS], 3, second, draw=GREEDY),
            entry(1, long[21:], 21, first, draw=GREEDY, pool=True),
        ],
        [
            entry(2, [PREVIOUS], 4, second, draw=Draw(temperature=0.8, top_p=0.9, uniform=0.3)),
            entry(1, [PREVIOUS], 37, first, draw=GREEDY),
        ],
    ]


@pytest.mark.parametrize(
    ("name", "count"), [*((n, 3 if n == "phi" else 2) for n in SPECS), ("olmo2", 4)]
)
def test_every_family_in_shares(name: str, count: int, device: torch.device) -> None:
    spec, weights = SPECS[name], make_weights(SPECS[name])

    def compute(ranks: ThreadRanks) -> list[StepResult]:
        own = share_weights(spec, weights, ranks.rank, count)
        writer, reader = PlanWriter(5), PlanReader(5)
        with CudaRunner(
            share_of(spec, count), own, **LIMITS, device=device, dtype=torch.float32,
            kv_dtype="f32", graphs="off", choices=LibraryChoices(), ranks=ranks,
        ) as runner:  # fmt: skip
            found = []
            for rows in steps():
                plan = plan_of(*rows)
                sent = writer.write(plan)
                runner.submit(plan if ranks.rank == 0 else reader.read(sent))
                found.append(runner.collect())
            return found

    found = together(count, compute)[0]
    reference = ReferenceRunner(spec, weights, **LIMITS, steps_in_flight=2)
    for rows, mine in zip(steps(), found, strict=True):
        reference.submit(plan_of(*rows))
        assert_alike(mine, reference.collect(), TOLERANCE)
