"""A model in shares and in stages on the CUDA backend, against the whole one on the reference.
Ranks are threads that compute one at a time; plans go to them as to other processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.cuda.test_runner import GREEDY, TOLERANCE, LibraryChoices, assert_alike, entry
from tests.backends.cuda.tiny import SPECS, VOCAB, make_weights
from tests.parallel.test_stages import deep
from tests.parallel.threads import ThreadRanks, ThreadStages, in_stages, together
from tests.plans import Draw, Row, plan_of

from headrace.backends.cuda.runner import CudaRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.step import PREVIOUS, StepResult
from headrace.models.decoder import DecoderWeights
from headrace.models.sharding import share_of
from headrace.models.spec import ModelSpec
from headrace.models.stages import stages_of
from headrace.parallel.plans import PlanReader, PlanWriter
from headrace.weights.shard import share_weights, stage_weights
from headrace.weights.weight import Weight

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
        return run(share_of(spec, count), own, device, ranks, leads=ranks.rank == 0)

    compare(spec, weights, together(count, compute)[0])


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_family_in_stages(name: str, device: torch.device) -> None:
    spec = deep(name)
    weights = make_weights(spec)

    def compute(ranks: ThreadStages) -> list[StepResult]:
        stage = stages_of(spec.layers, 2)[1 - ranks.number]
        own = stage_weights(weights, stage)
        return run(stage.share_of(spec), own, device, ranks, leads=ranks.number == 0)

    compare(spec, weights, in_stages(2, compute)[0])


def run(
    spec: ModelSpec,
    own: DecoderWeights[Weight],
    device: torch.device,
    ranks: ThreadRanks,
    *,
    leads: bool,
) -> list[StepResult]:
    writer, reader = PlanWriter(5), PlanReader(5)
    with CudaRunner(
        spec, own, **LIMITS, device=device, dtype=torch.float32, kv_dtype="f32", graphs="off",
        choices=LibraryChoices(), ranks=ranks,
    ) as runner:  # fmt: skip
        found = []
        for rows in steps():
            plan = plan_of(*rows)
            sent = writer.write(plan)
            runner.submit(plan if leads else reader.read(sent))
            found.append(runner.collect())
        return found


def compare(spec: ModelSpec, weights: DecoderWeights[Weight], found: list[StepResult]) -> None:
    reference = ReferenceRunner(spec, weights, **LIMITS, steps_in_flight=2)
    for rows, mine in zip(steps(), found, strict=True):
        reference.submit(plan_of(*rows))
        assert_alike(mine, reference.collect(), TOLERANCE)
