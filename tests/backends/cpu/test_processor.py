"""What processors are called and can do, from what Linux and macOS say of them; a Mac's memory and
cores. The texts are as those systems print them."""

from __future__ import annotations

import sys

import pytest

from headrace.backends.cpu import machine, processor
from headrace.backends.shared import host, macos

GRAVITON = """\
processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

processor\t: 1
Features\t: fp asimd
CPU implementer\t: 0x41
CPU part\t: 0xd03
"""
XEON = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu vme avx2 fma f16c avx512f avx512bw avx512_vnni amx_int8
"""
VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            300000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages throttled:                              0.
Pages wired down:                        100000.
Pages purgeable:                            400.
"Translation faults":                 123456789.
"""


def test_linux_on_arm() -> None:
    assert processor.of_cpuinfo(GRAVITON) == ("ARM Neoverse N1", ["neon", "dotprod"])
    unknown = GRAVITON.replace("0xd0c", "0xfff").replace(" asimddp", "")
    assert processor.of_cpuinfo(unknown) == (
        "ARM core, implementer 0x41, part 0xfff",
        ["neon"],
    )
    # Another maker's number is not ARM Limited's.
    assert processor.of_cpuinfo(GRAVITON.replace("0x41", "0x61"))[0].startswith("ARM core")


def test_linux_on_x86() -> None:
    name, features = processor.of_cpuinfo(XEON)
    assert name == "Intel(R) Xeon(R) Processor"
    assert features == ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "amx_int8"]
    assert processor.of_cpuinfo("") == ("", [])


def test_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "machdep.cpu.brand_string": "Apple M2",
        "hw.optional.AdvSIMD": "1",
        "hw.optional.arm.FEAT_DotProd": "1",
        "hw.memsize": "17179869184",
        "hw.physicalcpu": "8",
        "hw.perflevel0.physicalcpu": "4",
    }

    def output_of(*command: str) -> str:
        if command[0] == "/usr/bin/vm_stat":
            return VM_STAT
        return "".join(f"{name}: {said[name]}\n" for name in command[1:] if name in said)

    monkeypatch.setattr(macos, "_output_of", output_of)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processor.describe() == ("Apple M2", ["neon", "dotprod"])
    assert host.memory_bytes() == (16 << 30, 33400 * 16384)
    assert machine.choose_threads() == (4, "4 performance cores")
    del said["hw.perflevel0.physicalcpu"]  # a Mac with Intel's processor
    assert machine.choose_threads() == (8, "8 physical cores")
    said.clear()  # or one that says nothing
    assert machine.choose_threads()[0] >= 1
    assert host.memory_bytes()[0] == 0
    assert machine.choose_threads(1) == (1, "as asked")


def test_a_program_that_is_not_there_says_nothing() -> None:
    assert macos._output_of("/no/such/program") == ""
    assert macos.available_bytes("") == 0
