"""Finding a GPU, and what is said where there is none that will do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.assemble import choose_backend
from headrace.backends.cuda import device as device_module
from headrace.backends.cuda.device import RESERVED_BYTES, Gpu, budget_bytes, check_gpu, find_gpu
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, MemoryFitError
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
    with pytest.raises(ConfigError, match=f"{missing} is not installed.*headrace\\[cuda\\]"):
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
        ("the KV pool", f"taking the KV pool.*--gpu-memory {room}MiB"),
        ("weights", "taking weights.*smaller model or --quantization"),
    ):
        with pytest.raises(MemoryFitError, match=said), device_module.taking(part):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


def test_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = False
    monkeypatch.setattr(device_module, "is_usable", lambda: usable)
    assert choose_backend("auto", EngineConfig()) == "cpu"
    usable = True
    assert choose_backend("auto", EngineConfig()) == "cuda"
    assert choose_backend("auto", EngineConfig.from_mapping({"device": "cpu"})) == "cpu"
    assert choose_backend("auto", EngineConfig.from_mapping({"device": "cuda"})) == "cuda"
    assert choose_backend("reference", EngineConfig()) == "reference"
    assert choose_backend("cpu", EngineConfig()) == "cpu"
    with pytest.raises(ConfigError, match="backend is 'reference' and device is 'cuda'"):
        choose_backend("reference", EngineConfig.from_mapping({"device": "cuda"}))


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


def test_looking_for_a_driver_imports_no_torch() -> None:
    source = str(Path(device_module.__file__).parents[3])
    code = (
        "import sys; from headrace.backends.cuda.device import driver_is_present; "
        "driver_is_present(); print('torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": source, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "False"
