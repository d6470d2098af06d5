"""Every backend through the one protocol: what it refuses, predicts, loads and says of itself; and
which one a device setting means."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.backends.random_models import SPECS, make_weights

from headrace.backends.backend import Backend
from headrace.backends.cpu import _native
from headrace.backends.cuda import device as cuda_device
from headrace.backends.registry import choose_backend, find_backend
from headrace.backends.shared import host
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import ConfigError, DeviceError
from headrace.plan.sizing import Sizing, size_pool
from headrace.weights.tensor import Tensor

RandomTensor = Callable[..., Tensor]

BACKENDS = [device for device in Device if device is not Device.AUTO]
ON_THE_HOST = [Device.CPU, Device.REFERENCE]


def config_of(**settings: object) -> EngineConfig:
    return EngineConfig.from_mapping(settings)


# -- the protocol ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
def test_every_device_is_a_backend_of_that_name(name: Device) -> None:
    assert find_backend(name).name is name


@pytest.mark.parametrize("spec_name", ["plain", "window bias", "gemma-like"])
@pytest.mark.parametrize("name", ON_THE_HOST)
def test_what_is_predicted_is_what_loading_takes(
    name: Device, spec_name: str, random_tensor: RandomTensor
) -> None:
    """Python's own count of what was allocated is that of the reference, whose arrays are numpy's;
    the CPU backend's memory is native, and its module counts it."""
    spec = replace(SPECS[spec_name], tied_embeddings=True)
    weights = make_weights(spec, random_tensor, "F32")
    config = config_of(device=name, kv_tokens=20_000, max_batch_tokens=32, threads=1)
    backend = find_backend(name)
    sizing = size_pool(backend.footprint(spec, weights, config), config)
    ledger = sizing.ledger
    released: list[Tensor] = []
    tracemalloc.start()
    try:
        runner, allocated = backend.load(spec, weights, sizing, config, released.append)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert runner.limits.total_blocks == sizing.total_blocks == 1250
    assert runner.limits.context_tokens == 256
    assert (runner.limits.max_batch_tokens, runner.limits.max_sequences) == (32, 64)
    if name is Device.REFERENCE:
        assert allocated is None
        assert taken == pytest.approx(ledger.weights_bytes + ledger.kv_pool_bytes, rel=0.01)
    else:
        assert allocated is not None
        assert [row for row in ledger.compare(allocated) if abs(row.share) > 0.01] == []
        assert released  # what is packed is not needed in the file any more
    runner.close()


def sized(backend: Backend, config: EngineConfig, random_tensor: RandomTensor) -> Sizing:
    spec = SPECS["plain"]
    weights = make_weights(spec, random_tensor, "F32")
    return size_pool(backend.footprint(spec, weights, config), config)


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_a_pool_is_a_share_of_the_memory_that_is_free(
    name: Device, random_tensor: RandomTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, config = find_backend(name), config_of(device=name, max_sequences=64)
    monkeypatch.setattr(host, "memory_bytes", lambda: (1 << 30, 0))
    ledger = sized(backend, config, random_tensor).ledger
    assert (ledger.available_bytes, ledger.kv_tokens) == (None, 256)  # not known: one context
    free = ledger.fixed_bytes + 4 * ledger.kv_pool_bytes
    monkeypatch.setattr(host, "memory_bytes", lambda: (1 << 30, free))
    ledger = sized(backend, config, random_tensor).ledger
    assert (ledger.available_bytes, ledger.kv_tokens) == (free, 512)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_asked_for_wins_over_a_backends_defaults(name: Device) -> None:
    defaults = find_backend(name).defaults
    assert config_of().sizes(defaults) == defaults
    sizes = config_of(max_sequences=3, overlap=not defaults.overlap).sizes(defaults)
    assert sizes == replace(defaults, max_sequences=3, overlap=not defaults.overlap)


def test_a_backend_says_what_its_answers_depend_on() -> None:
    path = _native.paths()[0]
    cpu, reference = find_backend(Device.CPU), find_backend(Device.REFERENCE)
    assert cpu.facts(config_of()) == {"name": "cpu", "path": path, "kv_dtype": "f16"}
    assert cpu.facts(config_of(kv_dtype="int8"))["kv_dtype"] == "int8"
    expected = {"name": "reference", "path": "numpy", "kv_dtype": "f32"}
    assert reference.facts(config_of()) == expected


# -- check -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"block_tokens": 32}, r"block_tokens is 32; the CPU backend supports only 16"),
        ({"quantization": "fp8"}, "quantization is 'fp8'; the CPU backend does not quantize"),
        ({"kv_dtype": "fp8"}, "kv_dtype is 'fp8'; the CPU backend supports f32, f16, bf16, int8"),
    ],
)
def test_what_the_cpu_does_not_have_is_refused(settings: dict[str, Any], cause: str) -> None:
    for device in ("cpu", "auto"):
        with pytest.raises(ConfigError, match=cause) as error:
            find_backend(Device.CPU).check(config_of(device=device, **settings))
        assert error.value.param == next(iter(settings))
        assert not isinstance(error.value, DeviceError)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"quantization": "fp8"}, "quantization is 'fp8'; the reference backend does not quantize"),
        ({"kv_dtype": "int8"}, "kv_dtype is 'int8'; the reference backend supports only f32"),
    ],
)
def test_what_the_reference_does_not_have_is_refused(settings: dict[str, Any], cause: str) -> None:
    reference = find_backend(Device.REFERENCE)
    with pytest.raises(ConfigError, match=cause) as error:
        reference.check(config_of(device="reference", **settings))
    assert error.value.param == next(iter(settings))
    reference.check(config_of(device="reference", block_tokens=32, kv_dtype="f32"))


# -- which one -------------------------------------------------------------------------------------


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "driver_is_present", lambda: False)
    assert choose_backend(config_of()).name is Device.CPU
    with pytest.raises(ConfigError, match="kv_dtype is 'fp8'; the CPU backend supports"):
        choose_backend(config_of(kv_dtype="fp8"))  # of the one that was taken


def test_a_backend_that_can_not_run_here_is_passed_over_only_by_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise DeviceError("This GPU is a lamp.", "Use another.", param="device")

    monkeypatch.setattr(cuda_device, "driver_is_present", lambda: True)
    monkeypatch.setattr(cuda_device, "find_gpu", refuse)
    assert choose_backend(config_of()).name is Device.CPU
    with pytest.raises(DeviceError, match="This GPU is a lamp"):
        choose_backend(config_of(device="cuda"))


_IMPORTED = """
import sys
import headrace.assemble
from headrace.backends.registry import choose_backend
from headrace.core.config import EngineConfig
if sys.argv[1] == "auto":
    from headrace.backends.cuda import device
    device.driver_is_present = lambda: False
choose_backend(EngineConfig.from_mapping({"device": sys.argv[1]}))
backends = [f"headrace.backends.{name}" for name in ("cpu", "cuda", "reference")]
print([name for name in (*backends, "torch", "triton") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("device", "loaded"),
    [("cpu", ["cpu"]), ("reference", ["reference"]), ("auto", ["cpu", "cuda"])],
)
def test_a_backend_is_imported_when_it_is_chosen(device: str, loaded: list[str]) -> None:
    """`auto` asks the CUDA backend whether there is a driver; that takes no torch."""
    command = [sys.executable, "-c", _IMPORTED, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([f"headrace.backends.{name}" for name in loaded])
