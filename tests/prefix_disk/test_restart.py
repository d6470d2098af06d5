"""A prefix cache that survives a restart, on the CPU backend: the same answers and logprobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.test_llm_draft_model import LLAMA, write_model

from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError
from headrace.core.request import SamplingParams
from headrace.llm import LLM

PREFIX = [(7 * at + 3) % 250 for at in range(200)]
PROMPTS = [[*PREFIX, 5, 6], [*PREFIX, 9], PREFIX[:40], [1, 2, 3]]
Load = Callable[..., LLM]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    model = write_model(tmp_path / "model", LLAMA)

    def load(size: str = "1GiB", **settings: object) -> LLM:
        if size:
            settings["prefix_disk"] = f"{tmp_path / 'disk'},{size}"
        return LLM(model, load_format="dummy", device="cpu", **{"kv_tokens": 4096, **settings})  # type: ignore[arg-type]

    return load


def answers(model: LLM, **params: object) -> list[object]:
    asked = SamplingParams(**{"max_tokens": 12, "logprobs": 3, "seed": 5, **params})  # type: ignore[arg-type]
    found = model.generate(PROMPTS, asked)
    return [[(one.token_ids, one.logprobs) for one in each.outputs] for each in found]


def store_of(model: LLM):  # type: ignore[no-untyped-def]
    return model._assembled.store.stats  # type: ignore[union-attr]


KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "n": 2},
    "penalized": {"temperature": 0.7, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_answers_have_the_same_bits_after_a_restart(load: Load, speculate: str) -> None:
    with load(size="", speculate=speculate) as plain:
        expected = {name: answers(plain, **kind) for name, kind in KINDS.items()}
    with load(speculate=speculate) as first:
        assert {name: answers(first, **kind) for name, kind in KINDS.items()} == expected
    written = store_of(first)
    assert written.written_blocks > 12
    assert written.dropped_blocks == 0
    for name, kind in KINDS.items():  # each as the first after a restart
        with load(speculate=speculate) as again:
            assert answers(again, **kind) == expected[name]
            assert store_of(again).hits_tokens >= 192
            assert store_of(again).errors == {"read": 0, "write": 0, "corrupt": 0}


def test_another_model_layout_or_salt_finds_nothing(load: Load) -> None:
    with load() as first:
        expected = answers(first)
    with load(kv_dtype="f32") as other:
        answers(other)
        assert store_of(other).loaded_blocks == 0
    with load() as again:
        again.generate([PROMPTS[0]], SamplingParams(max_tokens=1), cache_salt="other")
        assert store_of(again).loaded_blocks == 0
        assert answers(again) == expected
        assert store_of(again).loaded_blocks > 0


def test_damaged_files_are_computed_again(load: Load, tmp_path: Path) -> None:
    with load() as first:
        expected = answers(first)
    for path in (tmp_path / "disk").rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with load() as again:
        assert answers(again) == expected
        assert store_of(again).errors["corrupt"] >= 1
        assert store_of(again).loaded_blocks == 0


def test_a_small_disk_is_bounded(load: Load, tmp_path: Path) -> None:
    with load(size="40KiB") as model:
        answers(model)
    taken = sum(os.stat(path).st_size for path in (tmp_path / "disk").rglob("*.kv"))
    assert 0 < taken <= 40 << 10
    assert store_of(model).evicted_blocks > 0


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("/tmp/x", "expected a folder and a size"),
        (",4GiB", "expected a folder and a size"),
        ("/tmp/x,much", "whose size is 'much'"),
        ("/tmp/x,", "whose size is ''"),
        ("/tmp/x,0", "whose size is '0'"),
    ],
)
def test_a_setting_that_can_not_be_read_is_refused(value: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found) as error:
        EngineConfig(prefix_disk=value)
    assert error.value.param == "prefix_disk"


def test_what_it_does_not_go_with_is_refused(load: Load) -> None:
    for other in ({"prefix_cache": False}, {"tensor_parallel": 2}):
        with pytest.raises(ConfigError, match="prefix_disk needs"):
            EngineConfig(prefix_disk="/tmp/x,1GiB", **other)
    with pytest.raises(ConfigError, match="one KV block of this model takes"):
        load(size="1KiB")
    assert EngineConfig(prefix_disk="/a,b/c,1GiB").prefix_disk == "/a,b/c,1GiB"
