"""`headrace gpus`: the table of GPUs and CPU hosts, one in full, and where its figures are from.

Only prints; the figures are hardware/'s.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from headrace.cli.options import AsJson
from headrace.cli.tables import show_table
from headrace.core.sizes import GIB
from headrace.hardware.gpus import Gpu, Price, all_gpus, find_gpu
from headrace.hardware.this_machine import Seen, gpus_here, this_machine

_HEADING = ("NAME", "MEMORY", "BANDWIDTH", "BF16", "FP8", "FP4", "LINK", "FROM $/H", "SPOT")
_UNKNOWN = "-"
_WIDTH = 100


def gpus(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A GPU or host; 'here': this machine."),
    ] = None,
    as_json: AsJson = False,
    sources: Annotated[
        bool, typer.Option("--sources", help="Also show where each figure is from, with its date.")
    ] = False,
) -> None:
    """GPUs and CPU hosts: memory, bandwidth, dense rates, links and prices, each with its
    source."""
    if name is None:
        rows, seen = (*all_gpus(), this_machine()), gpus_here()
    elif name.lower() in ("here", "this-machine"):
        rows, seen = (this_machine(),), gpus_here()
    else:
        rows, seen = (find_gpu(name),), ()
    if as_json:
        facts = [gpu_facts(gpu) for gpu in rows]
        facts += [gpu_facts(each.gpu) | {"here": True} for each in seen if each.gpu is not None]
        typer.echo(json.dumps(facts if name is None else facts[0], indent=2))
        return
    if name is None:
        _show_all(rows, seen)
        if sources:
            typer.echo("\n" + "\n".join(_all_sources(rows)))
        return
    for gpu in rows:
        typer.echo("\n".join(_lines(gpu, sources=sources)))
    for each in seen:
        typer.echo(_seen_line(each))


def gpu_facts(gpu: Gpu) -> dict[str, Any]:
    """A row as JSON values: bytes, bytes per second and operations per second."""
    plain = ("name", "label", "vendor", "kind", "family", "memory_bytes", "nominal_bytes",
             "bandwidth_bytes_s", "sms", "capability", "link_bytes_s", "pcie_bytes_s")  # fmt: skip
    return {
        **{field: getattr(gpu, field) for field in plain},
        "aliases": list(gpu.aliases),
        "flops": dict(gpu.flops),
        "prices": [asdict(price) for price in gpu.prices],
        "sources": {figure: asdict(source) for figure, source in gpu.sources.items()},
        "notes": list(gpu.notes),
    }


def _show_all(rows: tuple[Gpu, ...], seen: tuple[Seen, ...]) -> None:
    show_table(_HEADING, [_row(gpu) for gpu in rows])
    for each in seen:
        typer.echo(_seen_line(each))
    typer.echo(
        "\nMemory in GiB as the driver reports it (~: as the maker names it), bandwidth and link in"
        "\nGB/s (link: per direction), rates in dense TFLOPs; -: not known. Prices are the lowest"
        "\nthat are listed for one GPU; `headrace gpus NAME` has all of them, with their dates."
    )


def _row(gpu: Gpu) -> tuple[str, ...]:
    return (
        gpu.name,
        _memory(gpu),
        _scaled(gpu.bandwidth_bytes_s, 1e9),
        _scaled(gpu.flops.get("bf16"), 1e12),
        _scaled(gpu.flops.get("fp8"), 1e12),
        _scaled(gpu.flops.get("fp4"), 1e12),
        _scaled(gpu.link_bytes_s, 1e9),
        _usd(gpu.price()),
        _usd(gpu.price("spot")),
    )


def _memory(gpu: Gpu) -> str:
    if gpu.memory_bytes is not None:
        return f"{gpu.memory_bytes / GIB:,.1f}"
    return _UNKNOWN if gpu.nominal_bytes is None else f"~{gpu.nominal_bytes / GIB:,.0f}"


def _scaled(value: float | None, unit: float) -> str:
    return _UNKNOWN if value is None else f"{value / unit:,.1f}".removesuffix(".0")


def _usd(price: Price | None) -> str:
    return _UNKNOWN if price is None else f"{price.usd_per_hour:,.2f}"


def _lines(gpu: Gpu, *, sources: bool) -> Iterator[str]:
    numbers: dict[str, int] = {}  # of each document

    def cited(document: str) -> str:
        return f"  [{numbers.setdefault(document, len(numbers) + 1)}]" if sources else ""

    yield f"{gpu.name}  {gpu.label}"
    if gpu.aliases:
        yield from _wrapped(f"  {'also':<14}", ", ".join(gpu.aliases))
    for label, value, figure in _figures(gpu):
        source = gpu.sources[figure]
        remark = f" ({source.remark})" if sources and source.remark else ""
        mark = cited(f"{source.date}: {source.title}")
        yield from _wrapped(f"  {label:<14}", f"{value}{remark}{mark}")
    for price in gpu.prices:
        found = f"${price.usd_per_hour:g}/h  {price.provider}, {price.date}"
        yield f"  {price.kind:<14}{found}{cited(f'{price.date}: {price.source}')}"
    if not gpu.prices:
        yield f"  {'price':<14}none is known"
    for note in gpu.notes:
        yield from _wrapped("  note: ", note)
    for document, number in numbers.items():
        yield from _wrapped(f"  {f'[{number}]':<5}", document)


def _wrapped(head: str, text: str) -> list[str]:
    rest = " " * len(head)
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=rest)


def _figures(gpu: Gpu) -> Iterator[tuple[str, str, str]]:
    """(label, value, the field it is from) for what is known."""
    for label, figure in (("memory", "memory_bytes"), ("nominal", "nominal_bytes")):
        found = getattr(gpu, figure)
        if found is not None:
            yield label, f"{found:,} bytes ({found / GIB:,.1f} GiB)", figure
    if gpu.bandwidth_bytes_s is not None:
        yield "bandwidth", f"{gpu.bandwidth_bytes_s / 1e9:,.1f} GB/s", "bandwidth_bytes_s"
    for kind, rate in gpu.flops.items():
        yield kind, f"{rate / 1e12:,.1f} TFLOPs, dense", f"flops.{kind}"
    if gpu.sms is not None:
        yield "SMs" if gpu.vendor == "NVIDIA" else "compute units", str(gpu.sms), "sms"
    if gpu.capability is not None:
        yield "capability", gpu.capability, "capability"
    for label, figure in (("link", "link_bytes_s"), ("PCIe", "pcie_bytes_s")):
        found = getattr(gpu, figure)
        if found is not None:
            yield label, f"{found / 1e9:,.1f} GB/s per direction", figure


def _all_sources(rows: tuple[Gpu, ...]) -> Iterator[str]:
    """Each document once, with what is from it."""
    found: dict[tuple[str, str], set[str]] = {}
    for gpu in rows:
        for source in gpu.sources.values():
            found.setdefault((source.title, source.date), set()).add(gpu.name)
        for price in gpu.prices:
            found.setdefault((price.source, price.date), set()).add(gpu.name)
    for (title, date), names in found.items():
        yield from _wrapped("", f"{date}: {title}")
        yield from _wrapped("  of ", ", ".join(sorted(names)))


def _seen_line(seen: Seen) -> str:
    row = "not in the table" if seen.gpu is None else seen.gpu.name
    return f"here: {seen.driver_name}, {seen.memory_bytes / GIB:,.1f} GiB ({row})"
