"""The engine's sampling features through the library, on the default model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, BeamParams, SamplingParams
from headrace.core.errors import ContextLengthError, InvalidRequestError

PROMPT = "My favourite animal is"


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Iterator[LLM]:
    with LLM(default_model_path, context_tokens=512, debug_invariants=True) as model:
        yield model


def test_n_continuations_share_the_prompt_and_each_is_as_if_alone(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
    copies = llm.stats.cow_copies
    (several,) = llm.generate(PROMPT * 5, params)
    assert [o.index for o in several.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in several.outputs}) > 1
    assert llm.stats.cow_copies >= copies + 3
    # The first is the request without n; all are the same when asked for again, among others.
    one = SamplingParams(n=1, temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
    assert llm.generate(PROMPT * 5, one)[0].outputs[0] == several.outputs[0]
    again, _ = llm.generate([PROMPT * 5, "Something else"], [params, one])
    assert again.outputs == several.outputs


def test_best_of_gives_the_likeliest(llm: LLM) -> None:
    common = {"temperature": 1.0, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    (all_of,) = llm.generate(PROMPT, SamplingParams(n=6, **common))  # type: ignore[arg-type]
    (best,) = llm.generate(PROMPT, SamplingParams(n=2, best_of=6, **common))  # type: ignore[arg-type]
    likeliest = sorted(all_of.outputs, key=lambda o: -o.cumulative_logprob)[:2]
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in likeliest]
    assert [o.index for o in best.outputs] == [0, 1]


def test_logprobs_name_the_token_and_the_likeliest(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, logprobs=3, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params)[0].outputs
    assert output.logprobs is not None
    total = 0.0
    for token_id, found in zip(output.token_ids, output.logprobs, strict=True):
        ranked = [entry for entry in found.values() if entry.rank is not None]
        assert [e.rank for e in ranked] == [1, 2, 3]
        assert [e.logprob for e in ranked] == sorted((e.logprob for e in ranked), reverse=True)
        assert 3 <= len(found) <= 4
        own = found[token_id]
        assert own.decoded_token == llm.tokenizer.decode([token_id], skip_special=False)
        total += own.logprob
    assert total == pytest.approx(output.cumulative_logprob, abs=1e-4)
    without = llm.generate(PROMPT, SamplingParams(max_tokens=2))[0].outputs[0]
    assert without.logprobs is None


def test_prompt_logprobs_are_those_of_generating_it(llm: LLM) -> None:
    """Greedy text scored as a prompt gets the logprobs it had as output, bit for bit."""
    ids = llm.tokenizer.encode(PROMPT)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    (output,) = llm.generate([ids], greedy)[0].outputs
    scored = llm.generate(
        [ids + output.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0)
    )[0]
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(ids) + 12
    assert scored.prompt_logprobs[0] is None
    assert output.logprobs is not None
    for token_id, was, now in zip(
        output.token_ids, output.logprobs, scored.prompt_logprobs[len(ids) :], strict=True
    ):
        assert now is not None
        assert now[token_id].logprob == was[token_id].logprob
        assert now[token_id].rank == 1


def naive_beams(llm: LLM, ids: list[int], width: int, steps: int) -> list[tuple[float, list[int]]]:
    """Beam search by asking for one token at a time, without end tokens."""
    one = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * width, ignore_eos=True)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(steps):
        outputs = llm.generate([ids + tokens for _, tokens in beams], one)
        candidates = []
        for (total, tokens), output in zip(beams, outputs, strict=True):
            found = output.outputs[0].logprobs
            assert found is not None
            for token_id, entry in found[0].items():
                candidates.append((total + entry.logprob, [*tokens, token_id]))
        beams = sorted(candidates, key=lambda c: -c[0])[:width]
    return beams


def test_beam_search_finds_what_a_naive_one_finds(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The three primary colours are")
    expected = naive_beams(llm, ids, width=4, steps=9)
    params = BeamParams(beam_width=4, max_tokens=9, ignore_eos=True)
    (output,) = llm.beam_search([ids], params)
    assert [o.token_ids for o in output.outputs] == [tokens for _, tokens in expected]
    for completion, (total, _) in zip(output.outputs, expected, strict=True):
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-6)
        assert completion.finish_reason == "length"
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    alone = llm.generate([ids], greedy)[0].outputs[0]
    assert output.outputs[0].cumulative_logprob >= alone.cumulative_logprob


def test_beam_search_ends_at_end_tokens(llm: LLM) -> None:
    template = llm.chat_template
    assert template is not None
    ids = template.encode([{"role": "user", "content": "What is 2+2?"}])
    (output,) = llm.beam_search([ids], BeamParams(beam_width=3, max_tokens=40))
    assert len(output.outputs) == 3
    scores = [o.cumulative_logprob / len(o.token_ids) for o in output.outputs]
    assert scores == sorted(scores, reverse=True)
    for completion in output.outputs:
        ended = completion.token_ids[-1] in llm.tokenizer.eos_ids
        assert ended == (completion.finish_reason == "stop")
    assert any(o.finish_reason == "stop" for o in output.outputs)


def test_penalties_make_repetition_rarer(llm: LLM) -> None:
    def distinct(**params: float) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, **params)  # type: ignore[arg-type]
        ids = llm.generate("A river, a river, a river,", sampling)[0].outputs[0].token_ids
        return len(set(ids)) / len(ids)

    plain = distinct()
    assert distinct(repetition_penalty=1.5) > plain
    assert distinct(frequency_penalty=1.5) > plain
    assert distinct(presence_penalty=2.0) > plain


def test_bias_allowed_and_bad_words_rule_tokens(llm: LLM) -> None:
    paris = llm.tokenizer.encode(" Paris", add_bos=False)[0]
    rome = llm.tokenizer.encode(" Rome", add_bos=False)[0]
    prompt = "The capital of France is"

    def first(**params: object) -> int:
        sampling = SamplingParams(temperature=0, max_tokens=1, **params)  # type: ignore[arg-type]
        return llm.generate(prompt, sampling)[0].outputs[0].token_ids[0]

    assert first() == paris
    assert first(logit_bias={paris: -100.0}) != paris
    assert first(logit_bias={rome: 100.0}) == rome
    assert first(allowed_token_ids=[rome, rome + 1]) in (rome, rome + 1)
    assert first(bad_words=["Paris"]) != paris
    many = SamplingParams(temperature=1.5, seed=3, max_tokens=80, bad_words=["the", "New York"])
    text = llm.generate("Cities I like: New York,", many)[0].outputs[0].text
    assert "New York" not in text
    assert " the " not in text


def test_min_tokens_holds_the_end_back(llm: LLM) -> None:
    template = llm.chat_template
    assert template is not None
    ids = template.encode([{"role": "user", "content": "What is 2+2?"}])
    short = llm.generate([ids], SamplingParams(temperature=0, max_tokens=60))[0].outputs[0]
    assert short.finish_reason == "stop"
    least = len(short.token_ids) + 5
    params = SamplingParams(temperature=0, max_tokens=60, min_tokens=least)
    longer = llm.generate([ids], params)[0].outputs[0]
    assert len(longer.token_ids) >= least
    assert longer.token_ids[: len(short.token_ids) - 1] == short.token_ids[:-1]


def test_a_seen_prefix_is_not_computed_again_and_changes_nothing(
    llm: LLM, default_model_path: Path
) -> None:
    prefix = "You are a helpful assistant who answers briefly and politely. " * 12
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    before = llm.stats.prefix_hits_tokens
    llm.generate(prefix + "First.", params)
    (warm,) = llm.generate(prefix + "Second?", params)
    assert llm.stats.prefix_hits_tokens - before >= 100
    with LLM(default_model_path, context_tokens=512, prefix_cache=False) as cold_llm:
        (cold,) = cold_llm.generate(prefix + "Second?", params)
        assert cold_llm.stats.prefix_hits_tokens == 0
    assert warm.outputs == cold.outputs
    salted, unseen = llm.stats.prefix_hits_tokens, llm.stats.prefix_misses["never_seen"]
    llm.generate(prefix + "Second?", params, cache_salt="someone else")
    assert llm.stats.prefix_hits_tokens == salted
    assert llm.stats.prefix_misses["never_seen"] == unseen + 1


def test_a_pool_too_small_for_all_preempts_and_changes_nothing(default_model_path: Path) -> None:
    prompts = [f"Number {n} is" for n in range(6)]
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with LLM(default_model_path, kv_tokens=400, watermark=0.0, debug_invariants=True) as small:
        # Answers were short until now, so admission expects short ones.
        small.generate(prompts * 6, SamplingParams(max_tokens=1))
        tight = small.generate(prompts, params)
        assert small.stats.preemptions > 0
        assert small.stats.preempted_tokens > 0
    with LLM(default_model_path, kv_tokens=4000, context_tokens=400) as large:
        assert [o.outputs for o in large.generate(prompts, params)] == [o.outputs for o in tight]
        assert large.stats.preemptions == 0


def test_what_can_never_fit_is_refused_at_once(default_model_path: Path) -> None:
    with LLM(default_model_path, kv_tokens=128, context_tokens=128) as llm:
        with pytest.raises(ContextLengthError, match=r"128 tokens.*200 tokens"):
            llm.generate([[5] * 200])
        with pytest.raises(ContextLengthError, match=r"4 beams of up to 90 tokens.*128 tokens"):
            llm.beam_search([[5] * 50], BeamParams(beam_width=4, max_tokens=40))
        assert not llm._engine.has_work


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"typical_p": 0}, "typical_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {1: 200}}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 0}, "n is 0"),
        ({"n": 65}, "n is 65"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    for params in (
        SamplingParams(logit_bias={49152: 1.0}),
        SamplingParams(allowed_token_ids=[1, 49152]),
        SamplingParams(stop_token_ids=[49152]),
    ):
        with pytest.raises(InvalidRequestError, match="49152"):
            llm.generate("x", params)
