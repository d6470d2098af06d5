"""What each replica gets of this machine: cores or GPUs, and memory. Values in, shares out.

Shares are disjoint and as equal as they can be. Knows numbers; looks at no machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What may be shared out."""

    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them; empty: CPUs compute
    # What follows is looked at only where CPUs compute.
    cores: tuple[tuple[int, ...], ...] = ()  # the logical processors of each physical core
    most_threads: int = 0  # fewer than cores where a cgroup limits the time
    memory_bytes: int = 0  # free; 0: not known
    can_pin: bool = True  # processes can be kept on chosen cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    cpus: tuple[int, ...] = ()  # logical processors; empty: wherever the system likes
    threads: int | None = None
    memory_bytes: int | None = None
    gpus: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        if self.gpus:
            return f"GPU {', '.join(self.gpus)}"
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}"
        return f"{threads} on CPU {_ranges(self.cpus)}" if self.cpus else threads


def share_out(
    machine: Machine, count: int, *, threads: int | None = None, ranks: int = 1
) -> tuple[Share, ...]:
    """One share for each replica. `threads` is what each was asked to compute with, `ranks` how
    many GPUs one needs. Raises where there is not enough for all."""
    if machine.gpus:
        return _share_gpus(machine.gpus, count, ranks)
    cores = machine.cores
    most = min(len(cores), machine.most_threads)
    if threads is None and count > most:
        raise ConfigError(
            f"replicas is {count}, and this process may use {most} core{'s' if most != 1 else ''}; "
            "expected a core for each replica.",
            f"Set --replicas to {most} or less." if most > 1 else "Serve without --replicas.",
            param="replicas",
        )
    logical = sum(map(len, cores))
    if threads is not None and count * threads > logical:
        raise ConfigError(
            f"{count} replicas with {threads} threads each need {count * threads} processors; this "
            f"process may use {logical}.",
            f"Set --threads to {max(1, logical // count)} or less, or --replicas to "
            f"{max(1, logical // threads)} or less.",
            param="threads",
        )
    memory = machine.memory_bytes // count or None
    pieces = _pieces(cores, count)
    allowed = _sizes(most, count)
    return tuple(
        Share(
            cpus=tuple(sorted(cpu for core in piece for cpu in core)) if machine.can_pin else (),
            threads=threads if threads is not None else max(1, min(len(piece), allowed[number])),
            memory_bytes=memory,
        )
        for number, piece in enumerate(pieces)
    )


def _share_gpus(gpus: Sequence[str], count: int, ranks: int) -> tuple[Share, ...]:
    needed = count * ranks
    if needed > len(gpus):
        each = f" with {ranks} GPUs each" if ranks > 1 else ""
        most = len(gpus) // ranks
        raise ConfigError(
            f"{count} replicas{each} need {needed} GPUs; this process sees {len(gpus)}.",
            f"Set --replicas to {most} or less."
            if most > 1
            else "Serve without --replicas, or set --device cpu.",
            param="replicas",
        )
    return tuple(
        Share(gpus=tuple(gpus[first : first + ranks])) for first in range(0, needed, ranks)
    )


def _pieces(cores: Sequence[tuple[int, ...]], count: int) -> list[Sequence[tuple[int, ...]]]:
    """Neighbouring cores stay together. With fewer cores than replicas (--threads was given),
    hyper-threads are shared out instead."""
    if count > len(cores):
        cores = [(cpu,) for core in cores for cpu in core]
    pieces, at = [], 0
    for size in _sizes(len(cores), count):
        pieces.append(cores[at : at + size])
        at += size
    return pieces


def _sizes(whole: int, count: int) -> list[int]:
    each, more = divmod(whole, count)
    return [each + (number < more) for number in range(count)]


def _ranges(cpus: Sequence[int]) -> str:
    """0-3,8"""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
