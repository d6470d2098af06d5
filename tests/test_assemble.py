"""A whole model put together: the ledger against what was allocated, and the pool under budgets."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tests.plans import plan_of

from headrace import LLM, SamplingParams
from headrace.assemble import Assembled, assemble
from headrace.backends.shared import host
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, HeadraceError, MemoryFitError
from headrace.core.sizes import MIB

TOKEN_BYTES = 2 * 30 * 3 * 64 * 2  # SmolLM2-135M: layers, KV heads, head size, fp16


def assembled(path: Path, **settings: object) -> Assembled:
    return assemble(str(path), config=EngineConfig.from_mapping(settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_tokens": 4096},
        {"kv_tokens": 512, "max_batch_tokens": 64, "threads": 3, "kv_dtype": "f32"},
        {"kv_memory": "64MiB", "context_tokens": 1000, "max_batch_tokens": 2048},
    ],
)
def test_predicted_and_allocated_agree(
    default_model_path: Path, settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "headrace"):
        model = assembled(default_model_path, **settings)
    assert model.allocated is not None
    for row in model.ledger.compare(model.allocated):
        assert abs(row.share) <= 0.05, row
    assert model.notes == () or "the context is" in model.notes[0]
    assert model.ledger.render(model.allocated) in caplog.text  # both are told at start
    size = default_model_path.stat().st_size
    assert 0.8 * size < model.ledger.weights_bytes < 1.3 * size
    assert model.ledger.kv_pool_bytes % TOKEN_BYTES == 0
    model.file.close()


def test_int8_and_overlap_reach_the_runner(default_model_path: Path) -> None:
    model = assembled(default_model_path, kv_tokens=512, kv_dtype="int8", overlap=True)
    assert model.allocated is not None
    expected = 512 * 2 * 30 * 3 * (64 + 4)  # a code a value, and a scale a head
    assert model.ledger.kv_pool_bytes == model.allocated.kv_pool_bytes == expected
    assert model.runner.limits.steps_in_flight == 2
    model.close()
    with pytest.raises(HeadraceError, match="runner is closed"):
        model.runner.submit(plan_of())


def test_the_kernel_says_the_same(default_model_path: Path) -> None:
    """Private writable memory of the process, before and after: what /proc says, not ours."""
    code = f"""
import json
def data_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmData"):
            return int(line.split()[1]) * 1024
from headrace.backends.cpu.backend import CpuBackend
from headrace import assemble as module
load, seen = CpuBackend.load, []
def measured(*args, **named):
    seen.append(data_bytes())
    result = load(*args, **named)
    seen.append(data_bytes())
    return result
CpuBackend.load = measured
config = module.EngineConfig(kv_memory="1GiB", threads=1)
model = module.assemble({str(default_model_path)!r}, config=config)
ledger = model.ledger
print(json.dumps([seen[1] - seen[0], ledger.total_bytes - ledger.runtime_bytes]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    taken, predicted = json.loads(done.stdout)
    assert predicted > 1.05 * 2**30
    assert abs(taken - predicted) < 0.05 * predicted


def test_settings_reach_the_runner(default_model_path: Path) -> None:
    llm = LLM(default_model_path, kv_memory="32MiB", max_batch_tokens=40, max_sequences=3)
    limits = llm._assembled.runner.limits
    assert (limits.max_batch_tokens, limits.max_sequences) == (40, 3)
    assert limits.total_blocks == 32 * MIB // (16 * TOKEN_BYTES) == 91
    assert llm.context_tokens == 91 * 16
    assert llm.notes[0].startswith("the context is limited to 1,456 tokens by the KV pool; ")
    assert "predicted" in llm.memory_report()
    params = SamplingParams(temperature=0, max_tokens=2)
    assert llm.generate("The capital of France is", params)[0].outputs[0].text == " Paris."


def test_settings_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match="Unknown engine setting 'kv_size'"):
        LLM("/absent.gguf", kv_size=3)
    with pytest.raises(ConfigError, match="config and threads are given"):
        LLM("/absent.gguf", config=EngineConfig(), threads=3)


def test_a_context_that_was_asked_for_is_never_cut(default_model_path: Path) -> None:
    with pytest.raises(MemoryFitError, match=r"(?s)8,192 tokens.*allows 19\.7 MiB") as error:
        assembled(default_model_path, kv_memory="20MiB", context_tokens=8192)
    assert error.value.remedy == "Set --kv-memory 180MiB, or --context-tokens 896."
    assert "2 × 30 layers × 3 KV heads × 64 × 2 bytes (f16) = 23,040" in str(error.value)
    model = assembled(default_model_path, kv_memory="180MiB", context_tokens=8192)
    assert model.runner.limits.context_tokens == 8192
    model.file.close()


def test_a_machine_that_is_too_small(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: (256 * MIB, 240 * MIB))
    model = assembled(default_model_path)  # what is left is shared out, and told
    assert 256 <= model.runner.limits.context_tokens < 8192
    assert model.ledger.total_bytes <= 240 * MIB
    assert len(model.notes) == 1
    model.file.close()
    monkeypatch.setattr(host, "memory_bytes", lambda: (64 * MIB, 60 * MIB))
    with pytest.raises(MemoryFitError, match=r"does not fit.*60\.0 MiB are free.*Free 1\d\d\."):
        assembled(default_model_path)


def test_where_memory_is_not_known_the_whole_context_is_held(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "memory_bytes", lambda: (0, 0))
    model = assembled(default_model_path)
    assert model.runner.limits.total_blocks == 512
    assert model.ledger.available_bytes is None
    model.file.close()


def test_the_reference_backend_keeps_floats(default_model_path: Path) -> None:
    sizes = {"context_tokens": 64, "kv_tokens": 128, "max_batch_tokens": 32}
    model = assembled(default_model_path, device="reference", **sizes)
    assert model.ledger.kv_pool_bytes == 128 * 2 * TOKEN_BYTES
    assert model.ledger.weights_bytes == 4 * 134_515_008
    assert "4 bytes (f32)" in model.ledger.render()
    assert model.allocated is None
    model.file.close()


def test_the_cpu_refuses_to_quantize(default_model_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization is 'fp8'; the CPU backend does not"):
        assembled(default_model_path, device="cpu", quantization="fp8")
