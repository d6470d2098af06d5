"""Launches that the CUDA benchmarks time, and the table they write: what the backend can read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from candidates import candidates, save  # type: ignore[import-not-found]

from headrace.backends.cuda.products.choice import (
    MEASURED_ROWS,
    Choices,
    KernelChoice,
    key_of,
    own_path,
    rule,
)
from headrace.backends.cuda.products.formats import MatrixFormat
from headrace.backends.cuda.products.matrix import dense_matrix

SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336), (576, 192), (49152, 576))


@pytest.mark.parametrize("format", list(MatrixFormat))
def test_candidates_can_run(format: MatrixFormat) -> None:
    """Tiles that the kernels take: powers of two, rows covered, shared memory kept to."""
    for outputs, columns in SHAPES:
        for rows in MEASURED_ROWS:
            found = candidates(format, outputs, columns, rows)
            assert rule(format, outputs, columns, rows) in found
            assert len(found) == len(set(found))
            for launch in found:
                assert launch.kernel != "row" or rows == 1
                for size in (launch.block_m, launch.block_n, launch.block_k):
                    assert size & (size - 1) == 0
                assert not launch.swap or launch.block_n >= 64


@pytest.mark.parametrize("format", [MatrixFormat.FP8, MatrixFormat.FP8_BLOCK])
def test_rows_are_not_quantized_for_small_fp8_matrices(format: MatrixFormat) -> None:
    for rows in (1, 8, 64, 65, 256, 257, 5000):
        found = candidates(format, 3072, 576, rows)
        assert all(one.whole_rows or one.kernel in ("row", "widened") for one in found)


def test_a_saved_table_is_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    matrix = dense_matrix(torch.zeros(48, 32), "cpu")
    best, other = KernelChoice(kernel="dot", block_n=128, stages=5), KernelChoice(kernel="library")
    save("Some GPU", {key_of(MatrixFormat.BF16, 48, 32, 16): best}, own_path())
    save("Some GPU", {key_of(MatrixFormat.BF16, 48, 32, 1): best}, own_path())
    save("Another", {key_of(MatrixFormat.BF16, 48, 32, 16): other}, own_path())
    assert [Choices.load("Some GPU").launch(matrix, rows) for rows in (1, 16)] == [best] * 2
    assert Choices.load("Another").launch(matrix, 16) == other
