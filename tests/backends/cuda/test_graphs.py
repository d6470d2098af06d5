"""Graphs of launches: whether a launch ran as it will from now on. Captures need a GPU."""

from __future__ import annotations

import pytest
import torch

from headrace.backends.cuda.step.graphs import Graphs


def test_without_a_gpu_nothing_is_captured() -> None:
    runs: list[int] = []
    graphs = Graphs(torch.device("cpu"))
    for _ in range(5):
        assert graphs.run("shape", lambda: runs.append(1), 8)
    assert len(runs) == 5
    assert len(graphs) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a GPU")
@pytest.mark.parametrize(
    ("rows", "at_once", "settled"),
    [
        (8, True, [False, True, True, True]),
        (8, False, [False, False, False, True]),  # launched twice, captured, replayed
        (1 << 20, True, [False, True, True, True]),  # never captured; the first may compile
    ],
)
def test_a_launch_is_settled_once_it_is_replayed(
    rows: int, at_once: bool, settled: list[bool]
) -> None:
    device = torch.device("cuda")
    counter = torch.zeros(1, device=device)
    graphs = Graphs(device)

    def count() -> None:
        counter.add_(1)

    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        found = [graphs.run("shape", count, rows, at_once=at_once) for _ in settled]
        torch.cuda.current_stream().synchronize()
    assert found == settled
    assert len(graphs) == (rows == 8)
    assert counter.item() >= len(settled)  # once more where a first launch came before the capture
