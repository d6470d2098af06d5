"""benchmarks/planning/allocation.py: its shapes are valid on both devices, and one row is right."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace.backends.cuda import device as cuda_device
from headrace.backends.registry import find_backend
from headrace.core.config import Device, EngineConfig
from headrace.core.sizes import GIB
from headrace.plan.sizing import size_pool
from headrace.weights.shaped import shaped_weights

SCRIPT = Path(__file__).parents[2] / "benchmarks/planning/allocation.py"


@pytest.fixture(scope="module")
def allocation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("allocation", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["allocation"] = module
    spec.loader.exec_module(module)
    return module


def test_there_are_enough_shapes(allocation: ModuleType) -> None:
    assert len(allocation.SHAPES["cpu"]) >= 10
    assert len(allocation.SHAPES["cuda"]) >= 10


def test_an_h200_holds_every_shape(allocation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = cuda_device.Gpu(
        index=0, name="NVIDIA H200", capability=(9, 0), multiprocessors=132,
        total_bytes=140 * GIB, free_bytes=139 * GIB,
    )  # fmt: skip
    monkeypatch.setattr(cuda_device, "find_gpu", lambda: h200)
    backend = find_backend(Device.CUDA)
    for name, shape in allocation.SHAPES["cuda"].items():
        config = EngineConfig(
            device=Device.CUDA,
            context_tokens=shape.context,
            kv_tokens=shape.kv_tokens,
            **dict(shape.settings),
        )
        backend.check(config)
        weights = shaped_weights(shape.spec)
        ledger = size_pool(backend.footprint(shape.spec, weights, config), config).ledger
        assert ledger.total_bytes < 120 * GIB, name


def test_one_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    call = [sys.executable, str(SCRIPT), "--device", "cpu", "--only", "smollm2-135m"]
    done = subprocess.run([*call, "--json", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["shapes"].values()
    assert abs(row["difference"]) <= 0.02
