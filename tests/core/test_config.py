"""The engine's settings: checked by name, none unknown, none silently dropped."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from headrace.core.config import EngineConfig, KvDtype, Policy, SchedulerConfig, StepSizes
from headrace.core.errors import ConfigError


def test_what_is_left_open_has_these_values() -> None:
    config = EngineConfig()
    assert (config.device, config.policy, config.prefix_cache) == ("auto", "fcfs", True)
    assert (config.quantization, config.load_format, config.graphs) == ("none", "auto", "start")
    budgets = (config.kv_memory, config.kv_tokens, config.kv_fraction, config.context_tokens)
    assert budgets == (None, None, None, None)
    assert isinstance(config, SchedulerConfig)  # so that the engine takes it as it is


def test_a_backend_fills_in_only_what_was_left_open() -> None:
    defaults = StepSizes(
        max_batch_tokens=8192,
        max_sequences=512,
        block_tokens=64,
        kv_dtype=KvDtype.BF16,
        overlap=True,
        max_step_growth=24.0,
    )
    assert EngineConfig().sizes(defaults) == defaults
    asked = EngineConfig(max_batch_tokens=512, kv_dtype="f16", overlap=False)  # type: ignore[arg-type]
    sizes = asked.sizes(defaults)
    assert (sizes.max_batch_tokens, sizes.kv_dtype, sizes.overlap) == (512, "f16", False)
    assert (sizes.max_sequences, sizes.block_tokens, sizes.max_step_growth) == (512, 64, 24.0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("reference", "\"backend='reference'\" is now \"device='reference'\". Use the new name."),
        ("tpu", "this setting is now 'device', one of auto, cpu, cuda, reference. Write \"dev"),
        (["cpu"], "this setting is now 'device', one of"),
    ],
)
def test_the_old_name_of_device_answers_with_the_new_one(value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_mapping({"backend": value})
    assert expected in str(error.value)


def test_it_can_not_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().threads = 3  # type: ignore[misc]


def test_values_take_one_shape() -> None:
    settings = {"kv_memory": "1.5 GiB", "kv_dtype": "f32", "policy": "shortest"}
    config = EngineConfig.from_mapping(settings)
    assert config.kv_memory_bytes == config.kv_memory == 3 << 29
    assert config.kv_dtype is KvDtype.F32
    assert config.policy is Policy.SHORTEST


def test_unknown_names_are_refused_with_the_near_one() -> None:
    with pytest.raises(
        ConfigError, match=r"Unknown engine setting 'kv_memmory'.*mean kv_memory\?"
    ) as error:
        EngineConfig.from_mapping({"kv_memmory": "4GiB"})
    assert error.value.param == "kv_memmory"
    with pytest.raises(
        ConfigError, match=r"Unknown engine setting 'xyzzy'.*Choose one of policy, "
    ):
        EngineConfig.from_mapping({"xyzzy": 1})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0; expected 1 or more"),
        ({"max_sequences": -1}, "max_sequences is -1; expected 1 or more"),
        ({"block_tokens": 1.5}, "block_tokens is 1.5; expected a whole number, 1 or more"),
        ({"context_tokens": 0}, "context_tokens is 0; expected 1 or more"),
        ({"context_tokens": True}, "context_tokens is True; expected a whole number, 1 or more"),
        ({"threads": 0}, "threads is 0; expected 1 or more"),
        ({"threads": "2"}, "threads is '2'; expected a whole number, 1 or more"),
        ({"kv_tokens": 0}, "kv_tokens is 0; expected 1 or more"),
        ({"kv_memory": "much"}, "kv_memory is 'much'; expected a number of bytes"),
        ({"kv_fraction": 0}, "kv_fraction is 0; expected above 0 and at most 1"),
        ({"kv_fraction": 1.01}, "kv_fraction is 1.01; expected above 0"),
        ({"kv_fraction": float("nan")}, "kv_fraction is nan; expected a finite number above 0"),
        ({"kv_fraction": "half"}, "kv_fraction is 'half'; expected a finite number above 0"),
        ({"kv_dtype": "f8"}, "kv_dtype is 'f8'; expected one of f32, f16, bf16, int8, fp8"),
        ({"device": "tpu"}, "device is 'tpu'; expected one of auto, cpu, cuda"),
        ({"quantization": "int3"}, "quantization is 'int3'; expected one of none, fp8, int8, int4"),
        ({"load_format": "x"}, "load_format is 'x'; expected one of auto, dummy"),
        ({"graphs": "always"}, "graphs is 'always'; expected one of start, lazy, off"),
        ({"gpu_memory": 0}, "gpu_memory is 0; expected a fraction above 0 and at most 1"),
        ({"gpu_memory": -0.5}, "gpu_memory is -0.5; expected a fraction above 0"),
        ({"gpu_memory": True}, "gpu_memory is True; expected a fraction above 0"),
        ({"gpu_memory": "most"}, "gpu_memory is 'most'; expected a fraction above 0"),
        ({"gpu_memory": float("nan")}, "gpu_memory is nan; expected a fraction above 0"),
        ({"policy": "lottery"}, "policy is 'lottery'; expected one of fcfs, priority, shortest"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no'; expected true or false"),
        ({"overlap": 1}, "overlap is 1; expected true or false"),
        ({"watermark": "x"}, "watermark is 'x'; expected a finite number, 0 to 0.5"),
        ({"watermark": 0.9}, "watermark is 0.9; expected 0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**settings)
    assert str(error.value).startswith(expected)
    assert error.value.param == next(iter(settings))
    assert error.value.remedy


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_memory": "1GiB", "kv_tokens": 5},
        {"kv_memory": "1GiB", "kv_fraction": 0.5},
        {"kv_tokens": 5, "kv_fraction": 0.5},
    ],
)
def test_a_pool_has_one_size(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=" and ".join(settings) + " are given; expected at most"):
        EngineConfig(**settings)


def test_flags_say_what_they_are_for() -> None:
    flags = {
        field.name: field.metadata["help"]
        for field in fields(EngineConfig)
        if "help" in field.metadata
    }
    assert {"kv_memory", "kv_tokens", "kv_fraction", "policy", "threads"} <= set(flags)
    assert all(text.endswith(".") for text in flags.values())
