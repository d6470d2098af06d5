"""The ledger's floor, against arithmetic by hand from public numbers."""

from __future__ import annotations

import pytest

from headrace.doctor.floor import floor_of
from headrace.hardware.gpus import find_gpu
from headrace.hardware.this_machine import this_machine

PROMPTS = (512, 2048)


def test_an_8b_model_on_an_h100() -> None:
    gpu = find_gpu("h100-sxm")
    assert gpu.bandwidth_bytes_s is not None
    found = floor_of("meta-llama/Llama-3.1-8B", gpu, {}, PROMPTS)
    assert found is not None
    # 8.03e9 parameters in 2 bytes, without the table of embeddings (128,256 × 4,096), which a
    # token reads one row of; its keys and values are a fraction of a percent.
    read_bytes = 2 * (8.030e9 - 128_256 * 4096)
    assert found.tpot_s == pytest.approx(read_bytes / gpu.bandwidth_bytes_s, rel=0.01)
    assert found.weight_bytes == pytest.approx(16.06e9, rel=0.01)
    assert found.narrower_ratio is not None
    assert 1.7 < found.narrower_ratio < 2
    assert found.long_ratio is not None
    assert 1 < found.long_ratio < 1.2


def test_quantization_and_ranks_that_the_engine_tells() -> None:
    gpu = find_gpu("h100-sxm")
    whole = floor_of("meta-llama/Llama-3.1-8B", gpu, {}, PROMPTS)
    narrow = floor_of("meta-llama/Llama-3.1-8B", gpu, {"quantization": "fp8"}, PROMPTS)
    wide = floor_of("meta-llama/Llama-3.1-8B", gpu, {"tensor_parallel": 2}, PROMPTS)
    assert whole is not None
    assert narrow is not None
    assert wide is not None
    assert narrow.tpot_s < 0.6 * whole.tpot_s
    assert wide.tpot_s == pytest.approx(whole.tpot_s / 2, rel=0.02)
    assert wide.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.02)


def test_what_is_not_known_has_no_floor() -> None:
    gpu = find_gpu("h100-sxm")
    assert floor_of("nobody/nothing-9b", gpu, {}, PROMPTS) is None
    assert floor_of(None, gpu, {}, PROMPTS) is None
    assert floor_of("meta-llama/Llama-3.1-8B", None, {}, PROMPTS) is None
    assert floor_of("meta-llama/Llama-3.1-8B", this_machine(), {}, PROMPTS) is None
