"""Stages of a pipeline: every layer once, the rules of engines, and weights that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.models.known import find_known
from headrace.models.kv import kv_bytes
from headrace.models.precision import find_precision, weight_bytes
from headrace.models.stages import stages_of

ENGINES = ("vllm", "sglang", "trtllm", "llama.cpp")


@given(
    layers=st.integers(1, 130), count=st.integers(1, 16), engine=st.sampled_from([*ENGINES, "tgi"])
)
def test_every_layer_is_on_one_stage(layers: int, count: int, engine: str) -> None:
    if count > layers:
        with pytest.raises(ConfigError, match=f"{count} pipeline stages"):
            stages_of(layers, count, engine)
        return
    stages = stages_of(layers, count, engine)
    assert [n for stage in stages for n in range(stage.first, stage.end)] == list(range(layers))
    sizes = [stage.layers for stage in stages]
    assert max(sizes) - min(sizes) <= (2 if engine == "llama.cpp" else 1)
    assert [stage.is_first for stage in stages] == [True] + [False] * (count - 1)
    assert [stage.is_last for stage in stages] == [False] * (count - 1) + [True]


@pytest.mark.parametrize(
    ("engine", "sizes"),
    [
        # vLLM's docstring: the last is left out, and so is the first while there are others.
        ("vllm", {(61, 4): [15, 15, 16, 15], (62, 4): [15, 16, 16, 15], (63, 4): [16, 16, 16, 15]}),
        ("sglang", {(61, 4): [15, 15, 15, 16], (62, 4): [15, 15, 16, 16]}),
        ("trtllm", {(61, 4): [16, 15, 15, 15], (62, 4): [16, 16, 15, 15]}),
        ("llama.cpp", {(32, 2): [17, 15], (80, 2): [41, 39], (31, 2): [16, 15]}),
    ],
)
def test_layers_that_are_left_over(engine: str, sizes: dict[tuple[int, int], list[int]]) -> None:
    for (layers, count), wanted in sizes.items():
        assert [stage.layers for stage in stages_of(layers, count, engine)] == wanted


@pytest.mark.parametrize("precision", ["bf16", "fp8", "q4_k_m"])
@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-ai/DeepSeek-V3", "qwen2.5-0.5b"])
def test_weights_and_keys_of_all_stages_are_those_of_the_model(name: str, precision: str) -> None:
    spec, found = find_known(name).spec, find_precision(precision)
    stages = stages_of(spec.layers, 3)
    parts = [weight_bytes(spec, found, stage=stage) for stage in stages]
    whole = weight_bytes(spec, found)
    again = 1 if spec.tied_embeddings else 0  # the table is on the first and on the last
    tables = sum(part.embedding for part in parts) / (1 + again)
    assert tables == whole.embedding
    assert parts[0].output == 0
    assert parts[-1].output == whole.output
    for name_ in ("attention", "mlp", "experts"):
        assert sum(getattr(part, name_) for part in parts) == pytest.approx(getattr(whole, name_))
    kept = [kv_bytes(stage.of(spec), 100, 2, keeps_windows=False) for stage in stages]
    assert sum(kept) == kv_bytes(spec, 100, 2, keeps_windows=False)
