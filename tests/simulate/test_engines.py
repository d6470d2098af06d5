"""Coefficients of engines: within what is physical, with a fallback, and bands around 1."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from headrace.core.errors import ConfigError
from headrace.hardware.gpus import all_gpus, find_gpu
from headrace.simulate.engines import MOST, engines, generation_of, profile, weights_of
from headrace.simulate.step_work import Format, Formats

KEPT = {"bf16": Format(value_bytes=2.0), "fp8": Format(value_bytes=1.0, computes="fp8"),
        "fp4": Format(value_bytes=0.5625, computes="fp4")}  # fmt: skip


def formats(kind: str) -> Formats:
    return Formats(attention=KEPT[kind], mlp=KEPT[kind], experts=KEPT[kind])


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("engine", engines())
def test_coefficients_are_physical_on_every_gpu(engine: str, kind: str) -> None:
    assert weights_of(formats(kind)) == kind
    for gpu in all_gpus():
        found = profile(engine, gpu, formats(kind))
        for name, value in asdict(found.efficiencies).items():
            assert 0 < value <= MOST.get(name, 0.01), name
        for name, value in asdict(found.waits).items():
            assert 0 < value < 10, name
        for band in (found.ttft, found.tpot):
            assert 0.1 < band.low < 1 < band.high < 10


def test_generations() -> None:
    names = ("h100-sxm", "gh200", "b200", "b300", "a100-sxm-80gb", "l40s", "mi300x")
    found = [generation_of(find_gpu(name)) for name in names]
    assert found == ["hopper", "hopper", "blackwell", "blackwell", "ampere", "ada", "amd"]
    assert generation_of(find_gpu("rtx-5090")) not in ("blackwell", "ada")


def test_what_was_never_measured_is_said() -> None:
    assert profile("vllm", find_gpu("h100-sxm"), formats("bf16")).unmeasured == ()
    assert profile("vllm", find_gpu("l40s"), formats("fp8")).unmeasured == ("generation ada",)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tgi") as caught:
        profile("tgi", find_gpu("h100-sxm"), formats("bf16"))
    assert "vllm" in str(caught.value.remedy)
