"""Ranks that are processes: the same answers as one, and an end for all when one dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.assemble import assemble
from headrace.core.errors import ConfigError
from headrace.core.request import GenerateRequest, SamplingParams
from headrace.engine.loop import Engine
from headrace.parallel.gloo import GlooRanks
from headrace.parallel.leader import LeadingRunner
from headrace.parallel.team import Team

SETTINGS: dict[str, Any] = {
    "device": "reference",
    "kv_tokens": 512,
    "context_tokens": 128,
    "offline": True,
}


def generate(engine: Engine) -> dict[str, list[int]]:
    """Two requests that begin at different times, one of them drawn."""
    found: dict[str, list[int]] = {"greedy": [], "drawn": []}
    for name, temperature in (("greedy", 0.0), ("drawn", 0.9)):
        params = SamplingParams(max_tokens=4, temperature=temperature, seed=5, ignore_eos=True)
        prompt = [504 + 7 * step for step in range(len(name))]
        engine.add(GenerateRequest(request_id=name, prompt_token_ids=prompt, params=params))
        for token in engine.step():
            found[token.request_id].append(token.token_id)
    while engine.has_work:
        for token in engine.step():
            found[token.request_id].append(token.token_id)
    return found


def add_in_order(rank: int, count: int, meeting: Path, say: Any) -> None:
    """1 + 2^-24 is 1 in float32: three values whose sum depends on the order, at 40 places."""
    ranks = GlooRanks(rank, count, meeting)
    own = np.float32([1.0, 2.0**-24, 2.0**-24][rank])
    say.send(ranks.sum(np.full(40, own)).tolist())
    ranks.close()


def test_a_sum_does_not_depend_on_the_place_of_a_value(tmp_path: Path) -> None:
    """gloo's own sum does: its ring begins with another rank at each part of the array."""
    start = multiprocessing.get_context("spawn")
    pipes = [start.Pipe(duplex=False) for _ in range(3)]
    workers = [
        start.Process(target=add_in_order, args=(rank, 3, tmp_path / "meeting", pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    found = [pipe[0].recv() for pipe in pipes]
    for worker in workers:
        worker.join()
    assert found == [[1.0] * 40] * 3  # the first two first: both small ones are lost


def pids(runner: LeadingRunner) -> list[int]:
    team = runner._team
    assert isinstance(team, Team)
    return [process.pid for process in team._processes]


def test_three_ranks_answer_as_one_and_end_together(default_model_path: Path) -> None:
    model = str(default_model_path)
    one = assemble(model, **SETTINGS)
    expected = generate(one.engine)
    one.close()
    three = assemble(model, tensor_parallel=3, **SETTINGS)
    runner = three.runner
    assert isinstance(runner, LeadingRunner)
    assert generate(three.engine) == expected
    # Embedding, attention and MLP are divided; each rank keeps a third of the keys and values.
    assert three.ledger.kv_pool_bytes * 3 == one.ledger.kv_pool_bytes
    assert three.ledger.weights_bytes < 0.35 * one.ledger.weights_bytes

    os.kill(pids(runner)[0], signal.SIGKILL)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    three.engine.add(GenerateRequest(request_id="late", prompt_token_ids=[504], params=params))
    while three.engine.has_work:
        last = three.engine.step()
    assert last[-1].error is not None
    assert three.engine.lost is not None  # so the engine's process ends, and is started again
    three.close()
    again = assemble(model, tensor_parallel=3, **SETTINGS)  # in this process once more
    assert generate(again.engine) == expected
    again.close()
    for pid in pids(runner):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_two_stages_of_three_ranks_answer_as_one(default_model_path: Path) -> None:
    model = str(default_model_path)
    one = assemble(model, **SETTINGS)
    expected = generate(one.engine)
    one.close()
    six = assemble(model, tensor_parallel=3, pipeline_parallel=2, **SETTINGS)
    assert generate(six.engine) == expected
    assert six.ledger.kv_pool_bytes * 6 == one.ledger.kv_pool_bytes
    six.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cpu", "tensor_parallel": 3}, "in one process"),
        ({"device": "reference", "tensor_parallel": 2}, "does not divide the model: 9 "),
        ({"device": "reference", "tensor_parallel": 65}, "tensor_parallel"),
        ({"device": "cpu", "pipeline_parallel": 2}, "pipeline_parallel is 2; the CPU backend"),
        ({"device": "reference", "pipeline_parallel": 31}, "31 pipeline stages do not divide 30"),
    ],
)
def test_what_can_not_be_is_refused(
    default_model_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        assemble(str(default_model_path), offline=True, **settings)
