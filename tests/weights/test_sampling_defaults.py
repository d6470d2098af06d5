"""How a model is sampled where nobody says: one rule, whoever asks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.async_engine import AsyncEngine
from headrace.core.config import EngineConfig, GenerationConfig
from headrace.core.errors import ConfigError, WeightsError
from headrace.core.request import GenerateRequest
from headrace.core.sampling import NEUTRAL, DrawNumbers, model_defaults
from headrace.core.server_config import ServerConfig
from headrace.fetch.catalog import CATALOG, DEFAULT_NAME
from headrace.server.start.model import read_model
from headrace.weights.files.gguf import GgufFile
from headrace.weights.load import open_weights
from headrace.weights.sampling_defaults import read_sampling_defaults

AUTO, NONE = GenerationConfig.AUTO, GenerationConfig.NONE
OWN = CATALOG[DEFAULT_NAME].sampling_defaults


def folder_with(tmp_path: Path, default_model_path: Path, advice: object) -> Path:
    """A folder of the default model's GGUF and a file of advice beside it."""
    (tmp_path / "model.gguf").symlink_to(default_model_path)
    text = advice if isinstance(advice, str) else json.dumps(advice)
    (tmp_path / "generation_config.json").write_text(text)
    return tmp_path


def defaults_of(path: Path, wanted: GenerationConfig = AUTO) -> DrawNumbers:
    file = open_weights(path)
    try:
        return read_sampling_defaults(path, file, wanted)
    finally:
        file.close()


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        (
            # As Qwen2.5-Instruct's.
            {
                "bos_token_id": 1,
                "do_sample": True,
                "repetition_penalty": 1.05,
                "temperature": 0.7,
                "top_k": 20,
                "top_p": 0.8,
            },
            DrawNumbers(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
        ),
        ({"temperature": 0.6}, DrawNumbers(temperature=0.6)),
        ({"eos_token_id": 2}, NEUTRAL),  # says nothing of sampling: nobody's, not the catalog's
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
            DrawNumbers(temperature=0, top_p=0.9),
        ),
        ({"temperature": None, "top_k": -1}, NEUTRAL),
        ({"temperature": 0}, DrawNumbers(temperature=0)),
    ],
)
def test_a_folders_advice(
    tmp_path: Path, default_model_path: Path, advice: dict[str, Any], expected: DrawNumbers
) -> None:
    folder = folder_with(tmp_path, default_model_path, advice)
    assert defaults_of(folder) == expected
    assert defaults_of(folder, NONE) == NEUTRAL


@pytest.mark.parametrize(
    ("advice", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": "much"}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": True}, "top_k"),
        ("{", "JSON"),
    ],
)
def test_advice_that_is_no_good_is_said_with_its_file(
    tmp_path: Path, default_model_path: Path, advice: object, name: str
) -> None:
    folder = folder_with(tmp_path, default_model_path, advice)
    with pytest.raises(WeightsError) as caught:
        defaults_of(folder)
    assert "generation_config.json" in caught.value.cause
    assert name in caught.value.cause
    assert defaults_of(folder, NONE) == NEUTRAL  # the way around it


def test_the_catalogs_advice_and_a_copy_without_any(
    tmp_path: Path, default_model_path: Path
) -> None:
    assert defaults_of(default_model_path) == OWN
    copy = tmp_path / "copy.gguf"
    copy.symlink_to(default_model_path)
    assert defaults_of(copy) == NEUTRAL


def test_a_gguf_headers_advice(
    tmp_path: Path, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GgufFile.open(default_model_path)
    file.metadata |= {
        "general.sampling.temp": 0.25,
        "general.sampling.top_k": 40,
        "general.sampling.penalty_repeat": 1.5,
    }
    found = read_sampling_defaults(default_model_path, file, AUTO)
    assert found == DrawNumbers(temperature=0.25, top_k=40, repetition_penalty=1.5)
    file.close()


def test_what_is_unset_is_told_from_what_is_neutral() -> None:
    model = DrawNumbers(temperature=0.2, top_p=0.9, top_k=5, repetition_penalty=1.1)
    assert SamplingParams().settled(model).chosen == model
    given = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
    assert given.settled(model) == given
    one = SamplingParams(temperature=1.0).settled(model)
    assert (one.temperature, one.top_p, one.top_k) == (1.0, 0.9, 5)
    assert SamplingParams().chosen == NEUTRAL  # an engine with no model's word for it


@pytest.mark.parametrize("setting", ["auto", "none"])
def test_library_and_server_sample_alike(default_model_path: Path, setting: str) -> None:
    """LLM().chat was at temperature 1 where `headrace run` and the server were at 0.2."""
    expected = OWN if setting == "auto" else NEUTRAL
    engine = EngineConfig(generation_config=GenerationConfig(setting), kv_tokens=512)
    served = read_model(default_model_path, "x", server=ServerConfig(), engine=engine)
    assert served.model.sampling_defaults == expected
    assert served.identity["sampling"] == model_defaults(expected)
    messages = [{"role": "user", "content": "Name a river."}]
    with LLM(default_model_path, config=engine) as llm:
        assert llm.sampling_defaults == expected
        spoken = SamplingParams(
            temperature=expected.temperature, top_p=expected.top_p, seed=7, max_tokens=24
        )
        left_open = SamplingParams(seed=7, max_tokens=24)
        other = SamplingParams(temperature=1.3, seed=7, max_tokens=24)
        texts = [
            llm.chat(messages, params)[0].outputs[0].text for params in (spoken, left_open, other)
        ]
    assert texts[0] == texts[1] != texts[2]


def test_who_gives_no_parameters_gets_the_models(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """generate() without any was at temperature 1, unlike generate(prompts, SamplingParams())."""
    asked: list[GenerateRequest] = []
    monkeypatch.setattr(LLM, "_complete", lambda llm, requests, prompts: asked.extend(requests))
    with LLM(default_model_path, kv_tokens=512) as llm:
        llm.generate("Once")
        llm.generate("Once", SamplingParams())
    assert [request.params.chosen for request in asked] == [OWN, OWN]


def test_an_async_engine_does_too(default_model_path: Path) -> None:
    asked: list[GenerateRequest] = []

    async def ask() -> None:
        async with AsyncEngine(default_model_path, kv_tokens=512) as engine:
            loop = engine._loop
            taken = loop.add

            def add(request: GenerateRequest, caller: Any, constraint: Any) -> None:
                asked.append(request)
                taken(request, caller, constraint)

            loop.add = add  # type: ignore[method-assign]
            async for _ in engine.generate("Once"):
                break

    asyncio.run(ask())
    assert [request.params.chosen for request in asked] == [OWN]


def test_the_setting_is_checked() -> None:
    with pytest.raises(
        ConfigError, match="generation_config is 'vllm'; expected one of auto, none"
    ):
        EngineConfig(generation_config="vllm")  # type: ignore[arg-type]
