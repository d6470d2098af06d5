"""Public models by name: figures that are published or calculated elsewhere, names that people
type, and config.json files with fields missing or odd."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError, HeadraceError, UnsupportedModelError
from headrace.models.config_spec import COUNTED_FAMILIES
from headrace.models.known import all_known, find_known, spec_of_config
from headrace.models.kv import kv_bytes, kv_heads_of_rank, kv_layers, state_bytes
from headrace.models.layers import ExpertsSpec, RecurrentSpec

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Llama 3 70B", 70.55, 70.55),
        ("llama-3.1-405b", 405.85, 405.85),
        ("mixtral-8x7b", 46.70, 12.88),
        ("qwen2-72b", 72.71, 72.71),
        ("deepseek-v3", 671.03, 37.55),
        ("deepseek-v2", 235.74, 21.38),
        ("gpt-oss-120b", 116.83, 5.71),
        ("nemotron-super-49b", 49.87, 49.87),
        ("llama-3.2-1b", 1.24, 1.24),
        ("smollm2-135m", 0.13, 0.13),
    ],
)
def test_parameters(name: str, billions: float, active: float) -> None:
    spec = find_known(name).spec
    assert round(spec.parameters / 1e9, 2) == billions
    assert round(spec.active_parameters / 1e9, 2) == active


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("deepseek-v3", 70_272),
        ("deepseek-v2", 69_120),
        ("mixtral-8x7b", 131_072),
        ("llama-3-70b", 327_680),
        ("llama-2-7b", 524_288),
        ("qwen3.6-27b", 65_536),
        ("nemotron-3-nano", 6_144),
    ],
)
def test_kv_bytes_of_a_token(name: str, token_bytes: int) -> None:
    spec = find_known(name).spec
    assert spec.kv_bytes_per_token(2) == token_bytes
    assert kv_bytes(spec, 1000, 2, keeps_windows=False) == 1000 * token_bytes


def test_70b_of_4096_tokens_times_32() -> None:
    spec = find_known("llama-3-70b").spec
    assert 32 * kv_bytes(spec, 4096, 2, keeps_windows=True) == 42_949_672_960


def test_hybrid_layers_keep_kv_in_a_quarter_and_state_in_the_rest() -> None:
    """lmstudio-bug-tracker#1862: 16 GiB of KV at 262k for 16 layers of 64."""
    spec = find_known("Qwen3.6-27B").spec
    assert (spec.layers, kv_layers(spec)) == (64, 16)
    assert kv_bytes(spec, 262_144, 2, keeps_windows=True) == 16 * GIB
    # 48 value heads of 128 x 128 in float32, and 3 inputs of 10,240 channels in 16 bits, 48 times.
    assert state_bytes(spec) == 48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2)
    assert state_bytes(spec, tp=2) == state_bytes(spec) // 2
    assert state_bytes(find_known("llama-3-8b").spec) == 0


def test_windows_are_kept_in_full_or_alone() -> None:
    spec = find_known("gpt-oss-20b").spec
    full = 24 * 2 * 8 * 64 * 2
    assert kv_bytes(spec, 10_000, 2, keeps_windows=False) == 10_000 * full
    assert kv_bytes(spec, 10_000, 2, keeps_windows=True) == (10_000 + 128) * full // 2
    assert kv_bytes(spec, 100, 2, keeps_windows=True) == 100 * full


def test_index_keys_are_counted_beside_the_latent() -> None:
    """DeepSeek V3.2: 132 bytes a token and layer (128 FP8 values and a float32 scale)."""
    v32, v3 = find_known("deepseek-v3.2").spec, find_known("deepseek-v3").spec
    difference = kv_bytes(v32, 500, 2, keeps_windows=False) - kv_bytes(
        v3, 500, 2, keeps_windows=False
    )
    assert difference == 500 * 61 * 132


def test_compressed_layers_keep_entries_and_a_window() -> None:
    spec = find_known("deepseek-v4-flash").spec
    ratios = [layer.mixer.ratio for layer in spec.stack]  # type: ignore[union-attr]
    tokens = 4096
    entries = sum(tokens // ratio for ratio in ratios if ratio) + len(ratios) * 128
    index = sum(tokens // 4 * 132 for ratio in ratios if ratio == 4)
    assert kv_bytes(spec, tokens, 1, keeps_windows=True) == entries * 512 + index


def test_kv_heads_are_divided_or_repeated() -> None:
    spec = find_known("llama-3-70b").spec
    whole = kv_bytes(spec, 100, 2, keeps_windows=False)
    assert kv_bytes(spec, 100, 2, keeps_windows=False, tp=4) == whole // 4
    assert kv_bytes(spec, 100, 2, keeps_windows=False, tp=16) == whole // 8
    latent = find_known("deepseek-v3").spec
    each = kv_bytes(latent, 100, 2, keeps_windows=False, tp=8)
    assert each == kv_bytes(latent, 100, 2, keeps_windows=False)
    with pytest.raises(
        ConfigError, match=r"3 ranks does not divide 8 key/value heads.*Use 2 ranks"
    ):
        kv_heads_of_rank(8, 3)


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B"),
        ("Llama 3.1 70B", "meta-llama/Meta-Llama-3.1-70B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
        ("META-LLAMA/META-LLAMA-3.1-405B", "meta-llama/Meta-Llama-3.1-405B"),
        ("llama3-70b", "meta-llama/Meta-Llama-3-70B"),
        ("qwen-2.5-7b", "Qwen/Qwen2.5-7B"),
        ("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("mistral-7b-instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("Mixtral", "mistralai/Mixtral-8x7B-v0.1"),
        ("qwen3.6-27b", "Qwen/Qwen3.6-27B"),
        ("nvidia/Qwen3.6-27B-NVFP4", "nvidia/Qwen3.6-27B-NVFP4"),
        ("gpt_oss_20b", "openai/gpt-oss-20b"),
    ],
)  # fmt: skip
def test_names_that_people_type(typed: str, found: str) -> None:
    assert find_known(typed).id == found


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'lama-3.1-8b'.*llama-3.1-8b"):
        find_known("lama-3.1-8b")
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        find_known("")


def test_every_known_model_is_complete_and_found_by_its_names() -> None:
    ids = [known.id for known in all_known()]
    assert len(ids) == len(set(ids)) >= 76
    for known in all_known():
        spec = known.spec
        assert known.source
        assert find_known(known.id) == known
        assert spec.parameters >= spec.active_parameters > 0
        assert spec.layers == len(spec.layer_specs) > 0
        assert spec.context_tokens >= 2048
        assert spec.served == (not spec.stack) == bool(spec.attention)
        for layer in spec.layer_specs:
            assert layer.mixer or layer.mlp or layer.experts
    assert {find_known(name).id for known in all_known() for name in known.names} == set(ids)


def test_parts_that_are_not_counted_are_said() -> None:
    assert find_known("qwen3.5-27b").spec.left_out == (
        "vision or audio encoder", "multi-token prediction layers",
    )  # fmt: skip
    assert "multi-token prediction layers" in find_known("deepseek-v3").spec.left_out
    assert find_known("llama-3-8b").spec.left_out == ()


def test_layers_of_each_kind() -> None:
    nano = find_known("nemotron-3-nano").spec
    kinds = [type(layer.mixer).__name__ for layer in nano.stack]
    assert (kinds.count("RecurrentSpec"), kinds.count("HeadsSpec")) == (23, 6)
    assert sum(layer.experts is not None for layer in nano.stack) == 23
    v3 = find_known("deepseek-v3").spec
    assert [layer.experts is None for layer in v3.stack] == [True] * 3 + [False] * 58
    assert isinstance(v3.stack[3].experts, ExpertsSpec)
    assert (v3.stack[3].experts.count, v3.stack[3].experts.active) == (256, 8)
    k3 = find_known("kimi-k3").spec
    assert sum(isinstance(layer.mixer, RecurrentSpec) for layer in k3.stack) == 69


CONFIGS = {known.config_id: dict(known.config) for known in all_known()}
ODD: list[Any] = [
    None,
    0,
    -1,
    1,
    3,
    2**40,
    1.5,
    float("nan"),
    True,
    "",
    "x",
    [],
    [1],
    ["x"],
    {},
    {"a": 1},
]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_odd_fields_are_errors_or_specs_never_tracebacks(data: st.DataObject) -> None:
    config = json.loads(json.dumps(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))]))
    place = config
    inner = config.get("text_config")
    if inner and data.draw(st.booleans()):
        place = inner
    for name in data.draw(st.lists(st.sampled_from(sorted(place)), min_size=1, max_size=3)):
        if data.draw(st.booleans()):
            place.pop(name, None)
        else:
            place[name] = data.draw(st.sampled_from(ODD))
    try:
        spec = spec_of_config(config)
    except HeadraceError:
        return
    assert spec.parameters > 0
    kv_bytes(spec, 100, 2, keeps_windows=True)


@pytest.mark.parametrize("config", [{}, {"model_type": "bert"}, {"model_type": 3}, [], None, "x"])
def test_what_is_no_known_config_is_refused(config: Any) -> None:
    with pytest.raises(HeadraceError):
        spec_of_config(config)


def test_an_unknown_model_type_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'bert'.*deepseek_v3.*llama.*qwen3_5"):
        spec_of_config({"model_type": "bert"})


def test_counted_families_are_not_served() -> None:
    """The way to a served model refuses them."""
    from headrace.models.registry import describe_config

    for kind in COUNTED_FAMILIES:
        with pytest.raises(UnsupportedModelError, match="model_type"):
            describe_config({"model_type": kind}, [])
