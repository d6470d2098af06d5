"""Finding a GPU, and what is said where there is none that will do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.backends.cuda import device as device_module
from headrace.backends.cuda.backend import CudaBackend
from headrace.backends.cuda.device import (
    RESERVED_BYTES,
    Gpu,
    budget_bytes,
    check_gpu,
    describe,
    find_gpu,
)
from headrace.backends.registry import choose_backend
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import ConfigError, DeviceError, MemoryFitError
from headrace.core.sizes import GIB

H200 = Gpu(
    index=0,
    name="NVIDIA H200",
    capability=(9, 0),
    multiprocessors=132,
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
)


def changed(**values: Any) -> Gpu:
    fields = {name: getattr(H200, name) for name in Gpu.__slots__}
    return Gpu(**(fields | values))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_one_line_says_what_to_change() -> None:
    with pytest.raises(ConfigError) as error:
        find_gpu()
    assert error.value.param == "device"
    assert "\n" not in str(error.value)
    assert "--device cpu" in error.value.remedy


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_without_torch_the_extra_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == missing else find_spec(name),
    )
    with pytest.raises(ConfigError, match=f"{missing} is not installed.*\\.\\[cuda\\]"):
        find_gpu()


def test_an_old_gpu_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"Tesla V100 has compute capability 7\.0; 8\.0 or newer"):
        check_gpu(changed(name="Tesla V100", capability=(7, 0)))
    check_gpu(changed(capability=(8, 0)))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("0.5", 70 * GIB),
        (0.5, 70 * GIB),
        ("60GiB", 60 * GIB),
        ("1", 139 * GIB - RESERVED_BYTES),
        ("0.999", 139 * GIB - RESERVED_BYTES),
    ],
)
def test_a_budget_is_a_fraction_or_bytes_and_what_is_free(asked: Any, expected: int) -> None:
    assert budget_bytes(H200, asked) == expected


def test_more_than_the_gpu_has_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"has 140\.0 GiB.*--gpu-memory 143360MiB"):
        budget_bytes(H200, "200GiB")


def test_running_out_of_memory_names_the_part_and_what_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20 * GIB)
    room = (30 * GIB - RESERVED_BYTES) >> 20
    for part, said in (
        ("the KV pool", f"allocating the KV pool.*--gpu-memory {room}MiB"),
        ("weights", "allocating weights.*smaller model or --quantization"),
    ):
        with pytest.raises(MemoryFitError, match=said), device_module.taking(part):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


# -- what `headrace info` says ---------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A driver and a GPU that torch says are there; what it says of the GPU may be changed."""
    said: dict[str, Any] = {
        "available": True,
        "properties": SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132
        ),
        "memory": (139 * GIB, 140 * GIB),
        "driver": "580.159.03",
    }
    monkeypatch.setattr(device_module, "driver_is_present", lambda: True)
    monkeypatch.setattr(device_module, "driver_version", lambda: said["driver"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: said["available"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: said["properties"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: said["memory"])
    return said


def test_a_gpu_is_described_with_what_it_can_do(cuda: dict[str, Any]) -> None:
    facts = describe()
    assert facts == {
        "usable": True,
        "name": "NVIDIA H200",
        "memory_total_bytes": 140 * GIB,
        "memory_free_bytes": 139 * GIB,
        "capability": "9.0",
        "multiprocessors": 132,
        "fp8": True,
        "weights": ["bf16", "fp8", "int8", "int4"],
        "kv_dtypes": ["f32", "f16", "bf16", "fp8"],
        "graphs": True,
        "driver": "580.159.03",
        "torch": torch.__version__,
        "cuda": "13.0",
        "triton": metadata.version("triton"),
    }


def test_without_fp8_what_needs_it_is_not_offered(cuda: dict[str, Any]) -> None:
    cuda["properties"] = SimpleNamespace(
        name="NVIDIA A100", major=8, minor=0, multi_processor_count=108
    )
    facts = describe()
    assert facts["usable"] is True
    assert facts["fp8"] is False
    assert facts["weights"] == ["bf16", "int8", "int4"]
    assert facts["kv_dtypes"] == ["f32", "f16", "bf16"]


def test_a_gpu_that_is_too_old_is_described_and_refused(cuda: dict[str, Any]) -> None:
    cuda["properties"] = SimpleNamespace(
        name="Tesla V100", major=7, minor=0, multi_processor_count=80
    )
    facts = describe()
    assert facts["usable"] is False
    assert facts["why"] == "Tesla V100 has compute capability 7.0; 8.0 or newer is needed (bf16)."
    assert facts["name"] == "Tesla V100"
    assert facts["capability"] == "7.0"
    assert "weights" not in facts


def test_a_driver_without_torch_is_a_reason(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    facts = describe()
    assert (facts["usable"], facts["why"]) == (False, "torch is not installed.")
    assert ".[cuda]" in str(facts["remedy"])
    assert facts["driver"] == "580.159.03"


def test_a_torch_without_cuda_is_a_reason(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    facts = describe()
    assert facts["why"] == f"torch {torch.__version__} is built without CUDA."
    assert facts["cuda"] is None


def test_what_torch_warns_of_is_part_of_the_reason(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn() -> bool:
        warnings.warn("The NVIDIA driver is too old (found 11040).\nUpdate it.", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    reason = "torch finds no CUDA device (The NVIDIA driver is too old (found 11040).)."
    assert describe()["why"] == reason
    with pytest.raises(ConfigError, match="device is 'cuda', and torch finds no CUDA device"):
        find_gpu()


def test_a_gpu_that_fails_when_it_is_looked_at_is_a_reason(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    reason = "torch can't use the GPU: CUDA error: all CUDA-capable devices are busy"
    assert describe()["why"] == reason
    with pytest.raises(DeviceError, match="torch can't use the GPU"):
        CudaBackend().check(EngineConfig(device=Device.CUDA))
    assert choose_backend(EngineConfig()).name == "cpu"


# -- whether it is used ----------------------------------------------------------------------------


def chosen(**settings: str) -> Device:
    return choose_backend(EngineConfig.from_mapping(settings)).name


def test_auto_takes_a_supported_gpu(cuda: dict[str, Any]) -> None:
    assert chosen() == "cuda"
    assert chosen(device="cuda") == "cuda"
    assert chosen(device="cpu") == "cpu"
    assert chosen(device="reference") == "reference"
    cuda["properties"] = SimpleNamespace(
        name="Tesla V100", major=7, minor=0, multi_processor_count=80
    )
    assert chosen() == "cpu"
    with pytest.raises(DeviceError, match=r"Tesla V100 has compute capability 7\.0"):
        chosen(device="cuda")


def test_auto_does_not_pass_over_a_gpu_because_of_a_setting(cuda: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kv_dtype is 'int8'; the CUDA backend supports"):
        chosen(kv_dtype="int8")
    with pytest.raises(ConfigError, match=r"gpu_memory is 200GiB; NVIDIA H200 has 140\.0 GiB"):
        chosen(gpu_memory="200GiB")


def test_where_no_driver_is_only_who_asks_for_it_has_torch_asked(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may be where it is not looked for, as on some boards."""
    monkeypatch.setattr(device_module, "driver_is_present", lambda: False)
    assert chosen(device="cuda") == "cuda"
    monkeypatch.setattr(device_module, "find_gpu", lambda: pytest.fail("torch was asked"))
    assert chosen() == "cpu"


def test_the_fingerprint_names_the_gpu_and_what_compiles_for_it(cuda: dict[str, Any]) -> None:
    assert CudaBackend().facts(EngineConfig()) == {
        "name": "cuda",
        "path": "triton",
        "kv_dtype": "bf16",
        "gpu": "NVIDIA H200",
        "torch": torch.__version__,
        "cuda": "13.0",
        "triton": metadata.version("triton"),
    }


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Mon Jul  6 12:00:00 UTC 2026",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build",
    ],
)
def test_the_kernel_says_which_driver_it_has(line: str, tmp_path: Path) -> None:
    proc = tmp_path / "version"
    proc.write_text(f"{line}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    assert device_module.driver_version(proc) == "580.159.03"


def test_else_nvidia_smi_says_which_driver_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = tmp_path / "version"
    assert device_module.driver_version(missing) is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.159.03\necho 580.159.03\n")
    program.chmod(0o755)
    assert device_module.driver_version(missing) == "580.159.03"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert device_module.driver_version(missing) is None


# -- what it takes to look ---------------------------------------------------------------------


_IMPORTS = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import headrace.assemble
import headrace.backends.cuda.layout
import headrace.backends.cuda.runner
unwanted = "msgspec fastapi gguf llguidance uvicorn tokenizers jinja2 safetensors transformers"
print(sorted(set(unwanted.split()) & set(sys.modules)))
"""


def test_assembling_needs_little() -> None:
    source = str(Path(device_module.__file__).parents[3])
    found = subprocess.run(
        [sys.executable, "-c", _IMPORTS],
        env={"PYTHONPATH": source, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    # torch itself brings jinja2 where it is installed.
    assert found.stdout.strip() in ("[]", "['jinja2']")


def test_without_a_driver_no_torch_is_imported() -> None:
    source = str(Path(device_module.__file__).parents[3])
    code = (
        "import sys; from headrace.backends.cuda import device; "
        "device.driver_is_present = lambda: False; "
        "print(device.describe(), 'torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": source, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == ("{'usable': False, 'why': 'there is no NVIDIA driver'} False")
