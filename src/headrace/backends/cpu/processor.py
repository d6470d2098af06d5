"""The processor's name, and its features that matter to the kernels.

Reads /proc/cpuinfo, or asks macOS. The kernels themselves choose their path (kernels/path.cpp).
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from headrace.backends.shared import macos

_CPUINFO = Path("/proc/cpuinfo")
# Feature names in Linux's x86 "flags" and ARM "Features" and on macOS -> our names.
_LINUX = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512_vnni": "avx512_vnni",
    "amx_int8": "amx_int8",
    "asimd": "neon",
    "asimddp": "dotprod",
}
_MACOS = {
    "hw.optional.avx2_0": "avx2",
    "hw.optional.fma": "fma",
    "hw.optional.f16c": "f16c",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.avx512bw": "avx512bw",
    "hw.optional.avx512vnni": "avx512_vnni",
    "hw.optional.AdvSIMD": "neon",
    "hw.optional.arm.FEAT_DotProd": "dotprod",
}
# Linux reports ARM cores by number only. These are the ones of servers and of small boards.
_ARM_LIMITED = "0x41"
_ARM_PARTS = {
    "0xd03": "Cortex-A53",
    "0xd05": "Cortex-A55",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd41": "Cortex-A78",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
}


def describe() -> tuple[str, list[str]]:
    """Name and features."""
    if sys.platform == "darwin":
        name, features = of_macos(macos.sysctl("machdep.cpu.brand_string", *_MACOS))
    else:
        name, features = of_cpuinfo(_CPUINFO.read_text() if _CPUINFO.exists() else "")
    return name or platform.processor() or platform.machine(), features


def of_cpuinfo(text: str) -> tuple[str, list[str]]:
    """From /proc/cpuinfo, of the first processor in it."""
    first, _, _ = text.partition("\n\n")
    fields = macos.facts_of(first)
    words = fields.get("flags", fields.get("Features", "")).split()
    return _name(fields), [ours for theirs, ours in _LINUX.items() if theirs in words]


def of_macos(facts: dict[str, str]) -> tuple[str, list[str]]:
    return facts.get("machdep.cpu.brand_string", ""), [
        ours for theirs, ours in _MACOS.items() if facts.get(theirs) == "1"
    ]


def _name(fields: dict[str, str]) -> str:
    if "model name" in fields or "CPU part" not in fields:
        return fields.get("model name", "")
    maker, part = fields.get("CPU implementer", "?"), fields["CPU part"]
    if maker == _ARM_LIMITED and part in _ARM_PARTS:
        return f"ARM {_ARM_PARTS[part]}"
    return f"ARM core, implementer {maker}, part {part}"
