"""The engine of the speculation benchmark that is told to guess, or not, between two runs."""

from __future__ import annotations

from pathlib import Path

from tests.test_llm_speculation import PROMPTS, hurry

from headrace import LLM, SamplingParams
from speculation_roles import Player


def test_without_guesses_it_is_a_plain_engine(default_model_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(default_model_path, kv_tokens=2048, speculate="suffix") as llm:
        player = Player(llm)
        answers, drafts = [], []
        for guesses in (False, True, False):
            hurry(llm)
            player.start(guesses=guesses)
            before = llm.stats.drafts.draft_tokens
            answers.append(llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids)
            drafts.append(llm.stats.drafts.draft_tokens - before)
        assert answers[0] == answers[1] == answers[2]
        assert drafts[1] > 0
        assert drafts[0] == drafts[2] == 0
