"""Every figure is plausible and has a source and a date; names are found or explained."""

from __future__ import annotations

import contextlib
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace.hardware
from headrace.core.errors import ConfigError
from headrace.core.sizes import GIB, MIB
from headrace.hardware.gpus import PRICE_KINDS, Gpu, all_gpus, find_gpu, find_price_kind

FOLDER = Path(headrace.hardware.__file__).parent
FILES = ("gpus.toml", "cpus.toml")
FIGURES = {"memory_mib", "nominal_gb", "bandwidth_gb_s", "sms", "capability", "link_gb_s",
           "pcie_gb_s"}  # fmt: skip
WORDS = {"name", "label", "vendor", "kind", "family", "aliases", "prices", "notes", "tflops"}
TYPES = {"fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4"}
DATE = re.compile(r"20[12]\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")
GPUS = [gpu for gpu in all_gpus() if gpu.kind == "gpu"]
HOSTS = [gpu for gpu in all_gpus() if gpu.kind == "cpu"]

each_row = pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
each_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)


@pytest.mark.parametrize("name", FILES)
def test_rows_have_known_keys_and_every_source_is_used(name: str) -> None:
    table = tomllib.loads((FOLDER / name).read_text("utf-8"))
    used = set()
    for row in table["gpu"]:
        assert set(row) <= FIGURES | WORDS, row["name"]
        assert set(row.get("tflops", {})) <= TYPES, row["name"]
        cells = [row[key] for key in FIGURES & set(row)] + list(row.get("tflops", {}).values())
        for _value, source, *remark in cells:
            assert len(remark) <= 1
            used.add(source)
        used |= {source for *_, source in row.get("prices", ())}
    assert used == set(table["sources"])  # none is missing and none is left over


@each_row
def test_each_figure_has_a_source_and_a_date(gpu: Gpu) -> None:
    figures = ["memory_bytes", "nominal_bytes", "bandwidth_bytes_s", "sms", "capability",
               "link_bytes_s", "pcie_bytes_s"]  # fmt: skip
    known = {name for name in figures if getattr(gpu, name) is not None}
    assert set(gpu.sources) == known | {f"flops.{kind}" for kind in gpu.flops}
    for source in gpu.sources.values():
        assert len(source.title) > 10
        assert DATE.fullmatch(source.date), source
    for price in gpu.prices:
        assert DATE.fullmatch(price.date), price
        assert price.kind in ("on-demand", "spot", "reserved")
        assert price.provider
        assert 0.05 < price.usd_per_hour < 30


@each_gpu
def test_figures_are_plausible(gpu: Gpu) -> None:
    assert gpu.nominal_bytes is not None
    assert gpu.bandwidth_bytes_s is not None
    if gpu.memory_bytes is None:
        assert any("driver reports was not found" in note for note in gpu.notes)
    else:
        assert 0.9 <= gpu.memory_bytes / gpu.nominal_bytes <= 1.0
    assert 250e9 <= gpu.bandwidth_bytes_s <= 10e12
    # A whole memory is read in 5 to 100 ms: nothing has ever been outside of that.
    assert 0.005 < gpu.nominal_bytes / gpu.bandwidth_bytes_s < 0.1
    half = gpu.flops.get("bf16", gpu.flops["fp16"])
    assert 50 < half / gpu.bandwidth_bytes_s < 500  # operations a byte
    assert gpu.flops["fp32"] < half
    assert gpu.link_bytes_s is None or gpu.link_bytes_s < gpu.bandwidth_bytes_s / 4
    if gpu.link_bytes_s and gpu.pcie_bytes_s:
        assert gpu.link_bytes_s > gpu.pcie_bytes_s


@each_gpu
def test_rates_are_dense_and_double_as_types_halve(gpu: Gpu) -> None:
    """A figure with sparsity between dense ones shows as a factor of four, or of one."""
    half = gpu.flops.get("bf16", gpu.flops["fp16"])
    if "bf16" in gpu.flops:
        assert gpu.flops["fp16"] == pytest.approx(half, rel=0.01)
    if "tf32" in gpu.flops:
        assert half / gpu.flops["tf32"] == pytest.approx(2, rel=0.02)
    if "fp8" in gpu.flops:
        assert gpu.flops["fp8"] / half == pytest.approx(2, rel=0.03)
    if "fp4" in gpu.flops and "fp8" in gpu.flops:
        assert 1.9 < gpu.flops["fp4"] / gpu.flops["fp8"] < 4.1
    if gpu.capability is not None:
        major, minor = map(int, gpu.capability.split("."))
        assert ("fp8" in gpu.flops) == ((major, minor) >= (8, 9))
        assert ("fp4" in gpu.flops) == (major >= 10)


@pytest.mark.parametrize("gpu", HOSTS, ids=lambda gpu: gpu.name)
def test_hosts_have_a_bandwidth_and_no_memory_of_their_own(gpu: Gpu) -> None:
    assert gpu.memory_bytes is None
    assert gpu.bandwidth_bytes_s is not None
    assert 20e9 < gpu.bandwidth_bytes_s < 1.5e12


def test_facts_that_the_seeds_had_wrong() -> None:
    """SEEDS-ERRATA: 989.5 / 3.35 = 295 operations a byte; NVLink is 900 GB/s in both directions."""
    h100 = find_gpu("h100-sxm")
    assert h100.flops["bf16"] == 989.5e12
    assert h100.bandwidth_bytes_s == 3.35e12
    assert round(h100.flops["bf16"] / h100.bandwidth_bytes_s) == 295
    assert h100.link_bytes_s == 450e9
    assert h100.memory_bytes == 81559 * MIB == 85_520_809_984  # "85.5e9 B"
    assert h100.nominal_bytes == 80 * GIB
    assert find_gpu("l40s").flops["fp8"] == 733e12  # 1,466 is with sparsity
    assert find_gpu("h200-sxm").memory_bytes == 143771 * MIB  # 140.4 GiB, not 141
    assert "fp8" not in find_gpu("a100-sxm-80gb").flops


def test_the_cards_that_people_rent_are_there() -> None:
    names = {gpu.name for gpu in GPUS}
    assert names >= {"h100-sxm", "h100-pcie", "h200-sxm", "b200", "b300", "gb200", "gb300", "gh200",
                     "a100-sxm-80gb", "a100-sxm-40gb", "a100-pcie-80gb", "a100-pcie-40gb", "l4",
                     "l40s", "a10", "a10g", "a30", "a40", "mi300x", "mi325x", "mi355x",
                     "h100-nvl", "h200-nvl", "rtx-3090", "rtx-4090", "rtx-5090", "rtx-pro-6000",
                     "rtx-a6000", "rtx-6000-ada", "t4", "v100-sxm-16gb"}  # fmt: skip


def test_no_name_means_two_rows() -> None:
    plain = [
        re.sub(r"[^a-z0-9]", "", name.lower())
        for gpu in all_gpus()
        for name in (gpu.name, *gpu.aliases)
    ]
    assert len(plain) == len(set(plain))


@each_row
def test_every_name_and_alias_is_found_however_it_is_written(gpu: Gpu) -> None:
    for name in (gpu.name, *gpu.aliases):
        for written in (name, name.upper(), name.replace("-", " "), name.replace("-", "_")):
            assert find_gpu(written) is gpu
    if gpu.kind == "gpu":
        assert find_gpu(f"{gpu.vendor} {gpu.name}") is gpu


def test_several_of_a_name_are_listed() -> None:
    with pytest.raises(ConfigError) as refused:
        find_gpu("H100")
    assert "more than one GPU" in refused.value.cause
    assert "h100-sxm" in refused.value.cause
    assert "h100-pcie" in refused.value.cause
    assert "h100-nvl" in refused.value.cause
    with pytest.raises(ConfigError, match="h200-sxm, h200-nvl"):
        find_gpu("H200")
    assert find_gpu("NVIDIA H200").name == "h200-sxm"  # what the driver calls it
    with pytest.raises(ConfigError, match="a100-sxm-80gb, a100-pcie-80gb"):
        find_gpu("A100 80GB")
    with pytest.raises(ConfigError, match="a100-sxm-80gb, a100-sxm-40gb"):
        find_gpu("a100-sxm")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("h1000-sxm", "h100-sxm"), ("mi300", "mi300x"), ("l40", "l40s"), ("b20", "b200")],
)
def test_unknown_names_get_near_ones(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_gpu(typed)
    assert f"No GPU called {typed!r}" in refused.value.cause
    assert meant in refused.value.cause
    assert "headrace gpus" in refused.value.remedy


@given(st.text(max_size=40))
def test_any_text_is_a_gpu_or_a_refusal(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert find_gpu(text) in all_gpus()


def test_the_price_is_the_lowest_of_its_kind() -> None:
    h100 = find_gpu("h100-sxm")
    lowest = h100.price()
    assert lowest is not None
    assert lowest.usd_per_hour == min(p.usd_per_hour for p in h100.prices if p.kind == "on-demand")
    spot = h100.price("spot")
    assert spot is not None
    assert spot.usd_per_hour < lowest.usd_per_hour
    assert h100.price("reserved") is None
    assert find_gpu("gb300").price() is None  # GPUs without money


def test_rows_are_frozen() -> None:
    with pytest.raises(TypeError):
        find_gpu("h100-sxm").flops["bf16"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize("typed", ["spot", "Spot", "on_demand", "ON-DEMAND", "reserved"])
def test_kinds_of_prices(typed: str) -> None:
    assert find_price_kind(typed) in PRICE_KINDS


def test_a_kind_of_price_that_nobody_has() -> None:
    with pytest.raises(ConfigError, match="'spott'; expected on-demand, spot, reserved") as error:
        find_price_kind("spott")
    assert "Did you mean spot?" in error.value.remedy
