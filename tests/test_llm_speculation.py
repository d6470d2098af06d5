"""Speculation in the library, on the default model and the native kernels: the same answers, and
in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.backends.cpu.backend import CpuBackend
from headrace.core.constraint import GrammarKind, GrammarSpec
from headrace.core.errors import ConfigError, InvalidRequestError, MemoryFitError
from headrace.core.request import BeamParams
from headrace.speculate.speculator import TimedSpeculator
from headrace.speculate.step_curve import StepCurve

POEM = "The rose is red, the violet is blue, the honey is sweet, and so are you. "
PROMPTS = [POEM * 4 + "The rose is", "1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5,", "The moon"]


@pytest.fixture(scope="module")
def plain(default_model_path: Path) -> Iterator[LLM]:
    with LLM(default_model_path, kv_tokens=4096, speculate="off") as model:
        yield model


@pytest.fixture(scope="module")
def guessing(default_model_path: Path) -> Iterator[LLM]:
    """The model is its own draft model: a smaller one with its vocabulary is not in the catalog."""
    setting = f"draft:{default_model_path}"
    with LLM(default_model_path, kv_tokens=4096, speculate=setting) as model:
        yield model


def hurry(model: LLM) -> None:
    """Let it think that steps cost the same however many rows they have, whatever they take: then
    it guesses all it can. What it really decides depends on the machine."""
    found = model._assembled.speculator
    assert isinstance(found, TimedSpeculator)
    curves = [(found.curve, 0.01)]
    if found.model is not None:
        curves.append((found.model.curve, 0.0001))
    for curve, seconds in curves:
        for rows in (1, 4, 16, 64, 256):
            for _ in range(40):
                StepCurve.learn(curve, rows, 0, seconds)
        vars(curve)["learn"] = lambda *_: None


def tokens(model: LLM, params: SamplingParams, speculate: str | None = None) -> list[list[int]]:
    if speculate is not None:
        hurry(model)
    outputs = model.generate(PROMPTS, params, speculate=speculate)
    return [each.token_ids for output in outputs for each in output.outputs]


@pytest.mark.parametrize("speculate", ["suffix", "ngram", "draft", "auto", "off"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_the_same(
    plain: LLM, guessing: LLM, speculate: str, temperature: float
) -> None:
    params = SamplingParams(
        temperature=temperature, max_tokens=24, seed=5, n=2, repetition_penalty=1.05, logprobs=2
    )
    before = guessing.stats.drafts.draft_tokens
    assert tokens(guessing, params, speculate) == tokens(plain, params)
    assert (guessing.stats.drafts.draft_tokens > before) == (speculate != "off")


def test_a_repeating_answer_takes_fewer_steps(plain: LLM, guessing: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    hurry(guessing)
    before = guessing.stats.steps, guessing.stats.drafts.accepted_tokens
    found = guessing.generate(PROMPTS[0], params, speculate="ngram")[0].outputs[0]
    assert found.text == plain.generate(PROMPTS[0], params)[0].outputs[0].text
    assert guessing.stats.drafts.accepted_tokens - before[1] > 10
    assert guessing.stats.steps - before[0] < 35


def test_a_grammar_is_followed_in_fewer_steps(plain: LLM, guessing: LLM) -> None:
    source = '{"const": {"the_first_of_all_properties": "a long and fixed text in the schema"}}'
    grammar = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=source)
    params = SamplingParams(temperature=0.0, max_tokens=60)
    hurry(guessing)
    before = guessing.stats.steps
    found = guessing.generate("JSON:", params, grammar=grammar, speculate="suffix")[0].outputs[0]
    assert found.text == plain.generate("JSON:", params, grammar=grammar)[0].outputs[0].text
    assert guessing.stats.steps - before < len(found.token_ids)


def test_the_draft_model_is_in_the_ledger(plain: LLM, guessing: LLM) -> None:
    ledger = guessing._assembled.ledger
    assert ledger.draft_bytes > ledger.weights_bytes + ledger.kv_pool_bytes
    assert ledger.total_bytes > plain._assembled.ledger.total_bytes + ledger.weights_bytes
    assert "draft model" in guessing.memory_report()
    assert ledger.kv_tokens == 4096


def test_what_was_not_said_is_the_backends_choice(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = replace(CpuBackend.defaults, speculate="auto")
    monkeypatch.setattr(CpuBackend, "defaults", chosen)
    with LLM(default_model_path, device="cpu", kv_tokens=1024) as told_nothing:
        assert isinstance(told_nothing._assembled.speculator, TimedSpeculator)
        assert told_nothing._assembled.config.speculate == "auto"
        assert told_nothing._assembled.ledger.answers_bytes > 30e6
        assert "answers" in told_nothing.memory_report()
        assert told_nothing.generate("a", SamplingParams(max_tokens=1), speculate="suffix")
    with LLM(default_model_path, device="cpu", kv_tokens=1024, speculate="off") as told:
        assert told._assembled.speculator is None
        assert told._assembled.ledger.answers_bytes == 0


def test_a_draft_model_that_does_not_fit_is_refused(default_model_path: Path) -> None:
    setting = f"draft:{default_model_path}"
    with pytest.raises(MemoryFitError, match="With the draft model") as refused:
        LLM(default_model_path, kv_tokens=10**9, speculate=setting)
    assert "--speculate suffix" in refused.value.remedy


def test_bad_requests_are_refused_in_one_line(plain: LLM, guessing: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="guesses no tokens"):
        plain.generate("a", speculate="suffix")
    with pytest.raises(InvalidRequestError, match="Did you mean suffix"):
        guessing.generate("a", speculate="sufix")
    assert plain.generate("a", SamplingParams(max_tokens=1), speculate="off")
    assert guessing.beam_search("a", BeamParams(beam_width=2, max_tokens=3))


def test_bad_settings_are_refused_in_one_line(default_model_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_draft_tokens is 65; expected 1 to 64"):
        LLM(default_model_path, speculate="auto", max_draft_tokens=65)
    with pytest.raises(ConfigError, match="Did you mean ngram"):
        LLM(default_model_path, speculate="ngrm")


def test_nothing_is_left_when_all_answers_are_done(guessing: LLM) -> None:
    tokens(guessing, SamplingParams(temperature=0.0, max_tokens=8), "draft")
    found = guessing._assembled.speculator
    assert isinstance(found, TimedSpeculator)
    assert found.model is not None
    assert found.model.held_blocks == 0
    guessing._engine.idle_check()
