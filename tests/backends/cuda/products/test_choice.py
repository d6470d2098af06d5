"""Which kernel is chosen: the measured one where there is one, else the rule's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from headrace.backends.cuda.products import choice
from headrace.backends.cuda.products.choice import (
    Choices,
    KernelChoice,
    key_of,
    rule,
)
from headrace.backends.cuda.products.formats import WIDENED, MatrixFormat
from headrace.backends.cuda.products.matrix import dense_matrix
from headrace.core.errors import ConfigError

SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336), (576, 192), (49152, 576))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path / "cuda" / "choices.json"


@pytest.mark.parametrize("format", list(MatrixFormat))
def test_rule_can_run(format: MatrixFormat) -> None:
    for outputs, columns in SHAPES:
        for rows in (1, 2, 3, 17, 64, 65, 300, 5000):
            launch = rule(format, outputs, columns, rows)
            assert launch.kernel in choice.KERNELS
            assert launch.kernel != "library" or format.dense or format is MatrixFormat.FP8
            assert launch.kernel != "row" or rows == 1
            assert launch.kernel != "widened" or format in WIDENED
            for size in (launch.block_m, launch.block_n, launch.block_k):
                assert size & (size - 1) == 0


@pytest.mark.parametrize("format", [MatrixFormat.FP8, MatrixFormat.FP8_BLOCK])
def test_rows_are_not_quantized_for_small_fp8_matrices(format: MatrixFormat) -> None:
    """At no row count: what a row gives does not depend on who else is there."""
    for rows in (1, 8, 64, 65, 256, 257, 5000):
        launch = rule(format, 3072, 576, rows)
        assert launch.whole_rows or launch.kernel in ("row", "widened")
    assert not rule(format, 28672, 4096, 64).whole_rows


def test_measured_beats_the_rule(cache: Path) -> None:
    matrix = dense_matrix(torch.zeros(48, 32), "cpu")
    best = KernelChoice(kernel="dot", block_n=128, stages=5)
    keys = [key_of(MatrixFormat.BF16, 48, 32, rows) for rows in (1, 16)]
    table = {
        "Some GPU": {key: asdict(best) for key in keys},
        "Another": {keys[1]: {"kernel": "library"}},
    }
    cache.parent.mkdir()
    cache.write_text(json.dumps(table))
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
