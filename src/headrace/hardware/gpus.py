"""GPUs and CPU hosts by name: memory, bandwidth, rates, links and prices, each with its source.

The figures are in gpus.toml and cpus.toml beside this file, which say what each one means; here
they become bytes and operations per second. What has no source is None (or absent from `flops`),
and readers must cope. Knows no model and measures nothing: this_machine.py looks at this host.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, get_args

from headrace.core.errors import ConfigError
from headrace.core.sizes import GIB, MIB

Kind = Literal["gpu", "cpu"]
PriceKind = Literal["on-demand", "spot", "reserved"]
PRICE_KINDS: tuple[PriceKind, ...] = get_args(PriceKind)

_FILES = ("gpus.toml", "cpus.toml")
# Rows of the files -> (field of Gpu, its unit as a factor).
_FIGURES: Mapping[str, tuple[str, float]] = {
    "memory_mib": ("memory_bytes", MIB),
    "nominal_gb": ("nominal_bytes", GIB),
    "bandwidth_gb_s": ("bandwidth_bytes_s", 1e9),
    "sms": ("sms", 1),
    "capability": ("capability", 1),
    "link_gb_s": ("link_bytes_s", 1e9),
    "pcie_gb_s": ("pcie_bytes_s", 1e9),
}
_WHOLE = frozenset({"memory_mib", "nominal_gb", "sms"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a figure was read: the document, and its date (or the day on which it was read)."""

    title: str
    date: str  # YYYY-MM-DD or YYYY-MM
    remark: str = ""  # about this figure: what was halved, what it includes


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one GPU costs for an hour, with its share of the host."""

    usd_per_hour: float
    kind: PriceKind
    provider: str
    date: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator or one CPU host. `flops` is dense, by type: "fp32", "bf16", "fp8", "fp4" …"""

    name: str
    label: str
    vendor: str
    kind: Kind
    family: str  # what people call it when they forget which one: "h100"
    aliases: tuple[str, ...]
    memory_bytes: int | None  # as the driver reports it
    nominal_bytes: int | None  # as the maker names it
    bandwidth_bytes_s: float | None
    flops: Mapping[str, float]
    sms: int | None
    capability: str | None  # CUDA compute capability
    link_bytes_s: float | None  # to the other GPUs, per direction
    pcie_bytes_s: float | None  # to the host, per direction
    prices: tuple[Price, ...]
    sources: Mapping[str, Source]  # by field, and "flops.bf16" for a rate
    notes: tuple[str, ...] = ()

    def price(self, kind: PriceKind = "on-demand") -> Price | None:
        """The lowest price of a kind that is listed; None: none is known."""
        found = [price for price in self.prices if price.kind == kind]
        return min(found, key=lambda price: price.usd_per_hour, default=None)


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every row, in the order of the files: GPUs, then CPU hosts."""
    return tuple(gpu for name in _FILES for gpu in _read(name))


def find_gpu(name: str) -> Gpu:
    """By its name, an alias or what its driver calls it, whatever the case and the separators:
    "H100 SXM", "h100_sxm", "NVIDIA H100 80GB HBM3".

    A name that fits several ("H100") is refused with the list of them, an unknown one with those
    that are spelled like it.
    """
    wanted = _without_maker(_plain(name))
    found = _by_plain_name().get(_plain(name)) or _by_plain_name().get(wanted)
    if found is not None:
        return found
    variants = [gpu.name for gpu in all_gpus() if wanted in map(_plain, _beginnings(gpu))]
    if len(variants) == 1:
        return _by_plain_name()[_plain(variants[0])]
    if variants:
        raise ConfigError(
            f"{name!r} is more than one GPU: {_listed(variants)}.",
            "Name one of them; `headrace gpus` shows how they differ.",
            param="gpu",
        )
    near = _near(wanted)
    raise ConfigError(
        f"No GPU called {name!r} is known"
        + (f"; names like it: {_listed(near)}." if near else "."),
        "`headrace gpus` lists all names.",
        param="gpu",
    )


def find_price_kind(name: str) -> PriceKind:
    """As it is typed: in any case, with any separator."""
    by_plain = {_plain(kind): kind for kind in PRICE_KINDS}
    found = by_plain.get(_plain(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(_plain(name), by_plain, n=1)
    raise ConfigError(
        f"--price-kind is {name[:40]!r}; expected {_listed(PRICE_KINDS)}.",
        f"Did you mean {by_plain[near[0]]}?" if near else "Choose one of them.",
        param="price_kind",
    )


def _plain(name: str) -> str:
    """ "H100_80GB-HBM3", "h100 80gb hbm3" -> "h10080gbhbm3"."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _without_maker(plain: str) -> str:
    return re.sub(r"^(nvidia(geforce)?|geforce|amd(instinct)?|instinct|apple)", "", plain) or plain


def _beginnings(gpu: Gpu) -> Iterable[str]:
    """What a name may be cut to and still mean this one: "a100" and "a100-sxm" of a100-sxm-80gb;
    its sizes too: "a100-80gb"."""
    parts = gpu.name.split("-")
    yield gpu.family
    yield from ("-".join(parts[:count]) for count in range(1, len(parts)))
    if len(parts) > 2:
        yield f"{parts[0]}-{parts[-1]}"


def _near(wanted: str) -> list[str]:
    names = {_plain(gpu.name): gpu.name for gpu in all_gpus()}
    by_alias = {plain: gpu.name for plain, gpu in _by_plain_name().items()}
    close = difflib.get_close_matches(wanted, [*names, *by_alias], n=8, cutoff=0.6)
    inside = [plain for plain in names if len(wanted) > 1 and wanted in plain]
    return list(dict.fromkeys((names | by_alias)[plain] for plain in [*close, *inside]))[:5]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


@cache
def _by_plain_name() -> Mapping[str, Gpu]:
    return {_plain(name): gpu for gpu in all_gpus() for name in (*gpu.aliases, gpu.name)}


def _read(file_name: str) -> list[Gpu]:
    text = resources.files("headrace.hardware").joinpath(file_name).read_text("utf-8")
    table = tomllib.loads(text)
    sources = {
        key: Source(title=title, date=date) for key, (date, title) in table["sources"].items()
    }
    return [_gpu(row, sources) for row in table["gpu"]]


def _gpu(row: Mapping[str, Any], sources: Mapping[str, Source]) -> Gpu:
    read: dict[str, Source] = {}
    figures: dict[str, Any] = {}
    for key, (field, unit) in _FIGURES.items():
        figures[field] = None
        if key in row:
            value, *where = row[key]
            scaled = value if isinstance(value, str) else value * unit
            figures[field] = int(scaled) if key in _WHOLE else scaled
            read[field] = _source(where, sources)
    flops = {}
    for kind, (value, *where) in row.get("tflops", {}).items():
        flops[kind] = value * 1e12
        read[f"flops.{kind}"] = _source(where, sources)
    return Gpu(
        name=row["name"],
        label=row["label"],
        vendor=row["vendor"],
        kind=row.get("kind", "gpu"),
        family=row["family"],
        aliases=tuple(row.get("aliases", ())),
        flops=MappingProxyType(flops),
        prices=tuple(_price(entry, sources) for entry in row.get("prices", ())),
        sources=MappingProxyType(read),
        notes=tuple(row.get("notes", ())),
        **figures,
    )


def _source(where: list[str], sources: Mapping[str, Source]) -> Source:
    found = sources[where[0]]
    remark = where[1] if len(where) > 1 else ""
    return Source(title=found.title, date=found.date, remark=remark) if remark else found


def _price(entry: tuple[Any, ...], sources: Mapping[str, Source]) -> Price:
    usd, kind, provider, key = entry
    found = sources[key]
    return Price(
        usd_per_hour=float(usd), kind=kind, provider=provider, date=found.date, source=found.title
    )
