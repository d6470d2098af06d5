"""Which kernel is chosen: the measured one where there is one, else the rule's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.backends.cuda.products import choice
from headrace.backends.cuda.products.choice import (
    MEASURED_ROWS,
    Choices,
    KernelChoice,
    candidates,
    key_of,
    rule,
)
from headrace.backends.cuda.products.matrix import MatrixFormat, dense_matrix
from headrace.core.errors import ConfigError

SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336), (576, 192), (49152, 576))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path / "cuda" / "choices.json"


@pytest.mark.parametrize("format", list(MatrixFormat))
def test_rule_and_candidates_can_run(format: MatrixFormat) -> None:
    """Tiles that the kernels take: powers of two, rows covered, shared memory kept to."""
    for outputs, columns in SHAPES:
        for rows in (1, 2, 3, 17, 64, 65, 300, 5000):
            launch = rule(format, outputs, columns, rows)
            assert launch.kernel in choice.KERNELS
            assert launch.kernel != "library" or format.dense or format is MatrixFormat.FP8
            assert launch.kernel != "row" or rows == 1
            assert launch.kernel != "widened" or format in choice.WIDENED
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
    """At no row count: what a row gives does not depend on who else is there."""
    for rows in (1, 8, 64, 65, 256, 257, 5000):
        found = [rule(format, 3072, 576, rows), *candidates(format, 3072, 576, rows)]
        assert all(one.whole_rows or one.kernel in ("row", "widened") for one in found)
    assert not rule(format, 28672, 4096, 64).whole_rows


def test_measured_beats_the_rule(cache: Path) -> None:
    matrix = dense_matrix(torch.zeros(48, 32), "cpu")
    best = KernelChoice(kernel="dot", block_n=128, stages=5)
    key = key_of(MatrixFormat.BF16, 48, 32, 16)
    choice.save("Some GPU", {key: best}, choice.own_path())
    choice.save("Some GPU", {key_of(MatrixFormat.BF16, 48, 32, 1): best}, choice.own_path())
    choice.save("Another", {key: KernelChoice(kernel="library")}, choice.own_path())
    assert cache.is_file()
    choices = Choices.load("Some GPU")
    assert [choices.launch(matrix, rows) for rows in (1, 9, 16)] == [best] * 3
    for rows in (8, 17, 600):
        assert choices.launch(matrix, rows) == rule(MatrixFormat.BF16, 48, 32, rows)
    assert Choices.load("Another").launch(matrix, 16) == KernelChoice(kernel="library")
    assert Choices.load("Neither").launch(matrix, 16) == rule(MatrixFormat.BF16, 48, 32, 16)


@pytest.mark.parametrize("text", ["", "[]", '{"GPU": {"key": {"kernel": "dot", "tile": 4}}}'])
def test_damaged_table(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    with pytest.raises(ConfigError, match=r"choices\.json is not a table .* Delete it"):
        Choices.load("GPU")
