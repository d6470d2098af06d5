"""What the system says about this host, and what it does not say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.profiles import profile

from headrace.core.sizes import MIB
from headrace.hardware import this_machine as here
from headrace.hardware.gpus import find_gpu
from headrace.hardware.profile import Ceilings


def test_memory_and_cpu_are_read(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       24610016 kB\nMemFree: 1 kB\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    found = here.this_machine(tmp_path)
    assert found.memory_bytes == 24610016 * 1024
    assert found.label.startswith("Some CPU @ 2 GHz, ")
    assert found.kind == "cpu"
    assert found.bandwidth_bytes_s is None  # nobody measured it
    assert set(found.sources) == {"memory_bytes"}


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    found = here.this_machine(tmp_path / "absent")
    assert found.memory_bytes is None
    assert found.label
    assert not found.sources


def test_gpus_that_the_driver_lists() -> None:
    text = "NVIDIA H200, 143771\nNVIDIA H100 80GB HBM3, 81559\nQuadro P400, 2048\nnonsense\n, \n"
    first, second, third = here.read_smi(text)
    assert first.gpu is not None
    assert first.gpu.name == "h200-sxm"
    assert first.memory_bytes == first.gpu.memory_bytes == 143771 * MIB
    assert second.gpu is not None
    assert second.gpu.name == "h100-sxm"
    assert "this machine" in second.gpu.sources["memory_bytes"].title
    assert third.gpu is None
    assert third.driver_name == "Quadro P400"


def test_this_drivers_total_replaces_the_tables() -> None:
    (seen,) = here.read_smi("NVIDIA A40, 49140\n")  # ECC is off
    assert seen.gpu is not None
    assert seen.gpu.memory_bytes == 49140 * MIB
    assert find_gpu("a40").memory_bytes == 46068 * MIB


def test_no_driver_is_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert here.gpus_here() == ()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034'\n")
    program.chmod(0o755)
    (seen,) = here.gpus_here()
    assert seen.gpu is not None
    assert seen.gpu.name == "l4"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert here.gpus_here() == ()


def test_a_measured_gpu_has_its_own_rates_and_the_rest_of_its_row() -> None:
    facts = {"name": "NVIDIA H200", "memory_total_bytes": "150000000000"}
    ceilings = Ceilings(read_bytes_s={"gpu": 4.2e12}, multiplies_s={"bf16": 3.9e14})
    made = replace(profile(), ceilings=ceilings, machine={"device": "cuda", "gpu": facts})
    found, row = here.measured_machine(made), find_gpu("h200-sxm")
    assert found.kind == "gpu"
    assert found.memory_bytes == 150_000_000_000
    assert found.bandwidth_bytes_s == 4.2e12
    assert found.flops["bf16"] == 7.8e14
    assert found.flops["fp8"] == row.flops["fp8"]  # not measured
    assert found.sources["flops.bf16"].title == "headrace calibrate"
    assert found.capability == row.capability


def test_a_measured_gpu_that_no_table_has() -> None:
    facts = {"name": "NVIDIA Z9000", "memory_total_bytes": "8000000000"}
    ceilings = Ceilings(read_bytes_s={"gpu": 1e12}, multiplies_s={"bf16": 1e14})
    made = replace(profile(), ceilings=ceilings, machine={"device": "cuda", "gpu": facts})
    found = here.measured_machine(made)
    assert (found.kind, found.memory_bytes) == ("gpu", 8_000_000_000)
    assert found.flops == {"bf16": 2e14}
