"""`headrace info`: the installation, the machine, the GPU and a model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.commands import app

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


MACHINE = {
    "cpu": "A CPU",
    "features": ["avx2", "fma"],
    "path": "avx2",
    "threads": 2,
    "threads_why": "2 cores by affinity",
    "memory_total_bytes": 8_000_000_000,
    "memory_available_bytes": 4_000_000_000,
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.backends.cpu

    module = ModuleType("headrace.backends.cpu.machine")
    monkeypatch.setattr(module, "describe", lambda: dict(MACHINE), raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(headrace.backends.cpu, "machine", module, raising=False)


@pytest.mark.usefixtures("machine")
def test_info_without_a_model_fetches_nothing(invoke: Invoke, empty_cache: Path) -> None:
    result = invoke("info")
    assert result.exit_code == 0, result.output
    for expected in ("A CPU", "avx2, fma", "2 cores by affinity", "8,000.0 MB", str(empty_cache)):
        assert expected in result.stdout
    assert "not in the cache" in result.stdout
    assert not empty_cache.exists()
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["machine"] == MACHINE
    refused = invoke("info", "smollm2")
    assert (refused.exit_code, refused.stdout) == (2, "")


@pytest.mark.usefixtures("machine", "empty_cache")
def test_info_says_which_gpu_there_is(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.backends.cuda import device

    monkeypatch.setattr(device, "driver_is_present", lambda: False)
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["gpu"] == {"usable": False, "why": "there is no NVIDIA driver"}
    assert re.search(r"gpu\n  usable +no\n  why +there is no NVIDIA driver", invoke("info").stdout)
    found = {
        "usable": True,
        "name": "NVIDIA H200",
        "memory_total_bytes": 150_000_000_000,
        "fp8": True,
        "kv_dtypes": ["bf16", "fp8"],
        "triton": None,
    }
    monkeypatch.setattr(device, "describe", lambda: found)
    assert json.loads(invoke("info", "--json").stdout)["gpu"] == found
    lines = [" ".join(line.split()) for line in invoke("info").stdout.splitlines()]
    at = lines.index("gpu") + 1
    assert lines[at : at + 6] == [
        "usable yes",
        "name NVIDIA H200",
        "memory total 150,000.0 MB",
        "fp8 yes",
        "kv dtypes bf16, fp8",
        "triton none",
    ]


@pytest.mark.usefixtures("machine")
def test_info_of_the_default_model(invoke: Invoke, default_model_path: Path) -> None:
    """The numbers of SmolLM2-135M's published configuration."""
    result = invoke("info", "--json", str(default_model_path))
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)["model"]
    published = {
        "family": "llama",
        "layers": 30,
        "hidden_size": 576,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "context_tokens": 8192,
        "parameters": 134_515_008,
        "kv_bytes_per_token": 2 * 30 * 3 * 64 * 2,
    }
    assert {name: facts[name] for name in published} == published
    assert sum(facts["quantization"].values()) == pytest.approx(1)
    assert 0.9 * default_model_path.stat().st_size < facts["weight_bytes"]
    assert facts["weight_bytes"] < default_model_path.stat().st_size
    assert "134.5 M" in invoke("info", str(default_model_path)).stdout
