"""Guesses and text, on the default model: stop strings, stop tokens and limits inside a draft cut
the answer where a plain run cuts it, and nothing of what was drawn behind them is seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.guessers import Guesser

from headrace import LLM, SamplingParams
from headrace.core.request import CompletionOutput
from headrace.engine.loop import Engine

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown"
TOKENS = 40


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Iterator[LLM]:
    with LLM(default_model_path, context_tokens=512, speculate="off") as model:
        yield model


def complete(llm: LLM, engine: Engine, params: SamplingParams) -> CompletionOutput:
    before, llm._engine = llm._engine, engine
    try:
        (output,) = llm.generate(PROMPT, params)
    finally:
        llm._engine = before
    assert engine.blocks.used_blocks == 0
    return output.outputs[0]


@pytest.mark.parametrize(("kind", "temperature"), [("long", 0.8), ("mixed", 0.0), ("wrong", 0.8)])
def test_an_answer_ends_where_a_plain_one_does(llm: LLM, kind: str, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=4, max_tokens=TOKENS, logprobs=2, ignore_eos=True
    )
    whole = complete(llm, llm._engine, params)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    guesser = Guesser(kind, llm.spec.vocab_size, lambda _: whole.token_ids, most=12)
    guessing = Engine(llm._engine._runner, llm.tokenizer.eos_ids, speculator=guesser)
    changes: list[dict[str, Any]] = [
        {},
        {"max_tokens": 31},
        {"stop": [stop]},
        {"stop": [stop], "include_stop_str_in_output": True},
        {"stop_token_ids": [whole.token_ids[30]]},
        {"stop_token_ids": [whole.token_ids[20]], "min_tokens": 25},
    ]
    for change in changes:
        changed = replace(params, **change)
        found = complete(llm, guessing, changed)
        assert found == complete(llm, llm._engine, changed)
    assert guesser.proposed > 0
    assert (guesser.accepted > 0) == (kind != "wrong")
