"""A model in stages computes what the whole one does, to the last bit, for every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.backends.cuda.tiny import SPECS, make_weights
from tests.parallel.test_shares import LIMITS, next_tokens, prompts
from tests.parallel.threads import ThreadStages, in_stages

from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.errors import ConfigError
from headrace.models.counting import count_step
from headrace.models.counting_ops import Chunk, WeightSize
from headrace.models.spec import ModelSpec
from headrace.models.stages import Stage, stages_of
from headrace.weights.shard import stage_weights
from headrace.weights.weight import Weight


def deep(name: str) -> ModelSpec:
    """With twice its layers: two at least."""
    spec = SPECS[name]
    layers = enumerate((*spec.attention, *spec.attention))
    return replace(spec, attention=tuple(replace(a, layer=layer) for layer, a in layers))


def whole(name: str) -> ReferenceRunner:
    return ReferenceRunner(deep(name), make_weights(deep(name)), **LIMITS)


def stage_of(name: str, number: int, count: int) -> Stage:
    return stages_of(deep(name).layers, count)[count - 1 - number]


def staged(name: str, ranks: ThreadStages, **more: Any) -> ReferenceRunner:
    spec, stage = deep(name), stage_of(name, ranks.number, ranks.stages)
    own = stage_weights(make_weights(spec), stage)
    return ReferenceRunner(stage.share_of(spec), own, ranks=ranks, **LIMITS, **more)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_logits_and_tokens_are_those_of_the_whole_model(name: str) -> None:
    count = deep(name).layers
    assert count > 1
    expected = whole(name).logits(prompts())
    found = in_stages(count, lambda each: staged(name, each).logits(prompts()))
    assert all(part == [] for part in found[1:])
    for ours, theirs in zip(found[0], expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)

    def generate(runner: ReferenceRunner, ranks: ThreadStages | None = None) -> list[list[int]]:
        plan, drawn_by_step = prompts(), []
        for number in range(4):
            runner.submit(plan)
            drawn = [row[0] if row else 0 for row in runner.collect().tokens]
            drawn = drawn if ranks is None else ranks.share(drawn)
            drawn_by_step.append(drawn)
            plan = next_tokens(drawn)
            plan.starts = [start + number for start in plan.starts]
        return drawn_by_step

    alone = generate(whole(name))
    both = in_stages(count, lambda each: generate(staged(name, each), each))
    assert both == [alone] * count


def test_with_two_steps_in_flight_the_first_stage_gets_the_tokens() -> None:
    def run(ranks: ThreadStages) -> list[list[int]]:
        runner = staged("llama", ranks, steps_in_flight=2)
        runner.submit(prompts())
        runner.submit(next_tokens([-1, -1]))
        return [*runner.collect().tokens, *runner.collect().tokens]

    last, first = in_stages(2, run)
    assert first == last
    alone = whole("llama")
    alone.submit(prompts())
    drawn = [row[0] for row in alone.collect().tokens]
    alone.submit(next_tokens(drawn))
    assert last == [[drawn[0]], [drawn[1]], *alone.collect().tokens]


def test_stages_cost_what_the_whole_model_does_and_what_they_send() -> None:
    spec, chunks = deep("llama"), [Chunk(tokens=5), Chunk(tokens=1, start=9)]

    def size(_role: str, weight: Weight) -> WeightSize:
        shape = weight.parts[0].shape
        return WeightSize(weight.rows if len(shape) == 2 else 1, shape[-1], 64.0)

    weights = make_weights(spec).map(size)
    all_ = count_step(spec, weights, chunks, kv_value_bytes=2)
    parts = []
    for number in range(2):
        stage = stage_of("llama", number, 2)
        own = stage_weights(make_weights(spec), stage).map(size)
        parts.append(count_step(stage.share_of(spec), own, chunks, kv_value_bytes=2))
    assert sum(part.flops for part in parts) == all_.flops
    assert sum(part.weight_bytes for part in parts) == all_.weight_bytes
    last, first = parts
    assert last.sent_bytes == all_.sent_bytes == 0
    assert first.sent_bytes > 0
    assert first.sent_bytes % (6 * spec.hidden_size) == 0


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="each needs one"):
        stages_of(2, 3)
