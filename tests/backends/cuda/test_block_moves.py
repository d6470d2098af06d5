"""Blocks out of the device's pool and into another: every byte, of every type, in pieces or not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.cuda import block_moves
from headrace.backends.cuda.block_moves import BlockMoves
from headrace.backends.cuda.kv import KvPool
from headrace.backends.cuda.kv_sizes import kv_bytes_per_token
from headrace.backends.cuda.runner import CudaRunner
from headrace.core.step import MovesBlocks

_FOUND = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _FOUND is not None
assert _FOUND.loader is not None
tiny: Any = importlib.util.module_from_spec(_FOUND)
_FOUND.loader.exec_module(tiny)


def random_pool(kv_dtype: str, device: torch.device, seed: int) -> KvPool:
    with torch.inference_mode():
        pool = KvPool(tiny.SPECS["llama"], 12, 16, kv_dtype, device)
        made = torch.Generator().manual_seed(seed)
        for layer in pool.layers:
            raw = layer.view(torch.uint8)
            raw.copy_(torch.randint(0, 255, raw.shape, dtype=torch.uint8, generator=made))
    return pool


@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize("kv_dtype", ["bf16", "f32", "fp8"])
def test_every_byte_arrives_where_it_should(
    kv_dtype: str, at_once: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = random_pool(kv_dtype, device, 1), random_pool(kv_dtype, device, 2)
    monkeypatch.setattr(block_moves, "MOST_BYTES", at_once * one.block_bytes)
    assert one.block_bytes == 16 * kv_bytes_per_token(tiny.SPECS["llama"], kv_dtype)
    source, target = [7, 0, 11, 3, 5], [2, 9, 1, 0, 4]
    before = [layer.view(torch.uint8).clone() for layer in two.layers]
    contents = BlockMoves(one, device).read(source)
    assert [len(each) for each in contents] == [one.block_bytes] * 5
    BlockMoves(two, device).write(target, [bytes(each) for each in contents])
    for mine, theirs, old in zip(one.layers, two.layers, before, strict=True):
        raw, now = mine.view(torch.uint8), theirs.view(torch.uint8)
        assert torch.equal(now[:, target], raw[:, source])
        others = [at for at in range(12) if at not in target]
        assert torch.equal(now[:, others], old[:, others])
    assert BlockMoves(one, device).read([]) == []


@pytest.mark.parametrize("size", [1, 15, 17])
def test_contents_of_another_size_are_refused(size: int, device: torch.device) -> None:
    pool = random_pool("f32", device, 1)
    before = [layer.view(torch.uint8).clone() for layer in pool.layers]
    content = bytes(pool.block_bytes // 16 * size)
    with pytest.raises(ValueError, match=f"{len(content)} bytes; expected {pool.block_bytes}"):
        BlockMoves(pool, device).write([1, 2], [bytes(pool.block_bytes), content])
    for layer, old in zip(pool.layers, before, strict=True):
        assert torch.equal(layer.view(torch.uint8), old)


def test_the_runner_offers_it(device: torch.device) -> None:
    spec = tiny.SPECS["llama"]
    runner = CudaRunner(
        spec,
        tiny.make_weights(spec, 3),
        total_blocks=8,
        max_batch_tokens=32,
        max_sequences=4,
        graphs="off",
        device=device,
        dtype=torch.float32,
        kv_dtype="f32",
    )
    assert isinstance(runner, MovesBlocks)
    content = bytes(range(256)) * (runner.block_bytes // 256)
    runner.write_blocks([6, 1], [content, content[::-1]])
    assert [bytes(each) for each in runner.read_blocks([1, 6])] == [content[::-1], content]
    assert runner.block_layout == "cuda float32 2x16,2x16 by 16"
    runner.close()
