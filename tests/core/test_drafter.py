"""The words of --speculate: what each means, and one line with a remedy for everything else."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import EngineConfig
from headrace.core.drafter import Drafter, Method, check_asked, kept_bytes, read_drafter
from headrace.core.errors import ConfigError, InvalidRequestError
from headrace.core.request import GenerateRequest, SamplingParams


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("off", Drafter(Method.OFF)),
        ("auto", Drafter(Method.AUTO)),
        ("NGRAM", Drafter(Method.NGRAM)),
        ("suffix", Drafter(Method.SUFFIX)),
        ("draft:org/name:file.gguf", Drafter(Method.DRAFT, model="org/name:file.gguf")),
        ("synthetic:0.8", Drafter(Method.SYNTHETIC, rate=0.8)),
    ],
)
def test_words(text: str, meant: Drafter) -> None:
    assert read_drafter(text, "speculate", ConfigError) == meant


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("sufix", "Did you mean suffix?"),
        ("ngrams", "Did you mean ngram?"),
        ("drft:x", "Did you mean draft:MODEL?"),
        ("eagle3", "Use auto, off, ngram"),
        ("3", "max_draft_tokens for 3"),
        ("draft", "Name a smaller model"),
        ("draft:", "Name a smaller model"),
        ("suffix:3", "Write suffix"),
        ("synthetic", "as in synthetic:0.8"),
        ("synthetic:1.5", "as in synthetic:0.8"),
        ("", "Use auto"),
    ],
)
def test_other_words_are_refused_in_one_line(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(speculate=text)
    assert remedy in refused.value.remedy
    assert "\n" not in str(refused.value)
    assert refused.value.param == "speculate"


@pytest.mark.parametrize("count", [0, -1, 65, 2.5, True])
def test_drafts_have_a_range(count: object) -> None:
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        EngineConfig(max_draft_tokens=count)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["auto", "off", "ngram", "suffix", "draft"])
def test_a_request_names_a_method(word: str) -> None:
    request = GenerateRequest(
        request_id="a",
        prompt_token_ids=[1],
        params=SamplingParams(),
        speculate=word,  # type: ignore[arg-type]
    )
    assert request.speculate is Method(word)


@pytest.mark.parametrize("word", ["sufix", "draft:x", "synthetic:1", "", 3, ["off"]])
def test_a_request_with_another_word_is_refused(word: object) -> None:
    with pytest.raises(InvalidRequestError, match="speculate"):
        GenerateRequest(
            request_id="a",
            prompt_token_ids=[1],
            params=SamplingParams(),
            speculate=word,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("asked", "engine", "is_beam_search", "cause"),
    [
        (Method.SUFFIX, "off", False, "guesses no tokens"),
        (Method.DRAFT, "auto", False, "has no draft model"),
        (Method.NGRAM, "auto", True, "beam search"),
    ],
)
def test_what_an_engine_does_not_have_is_refused(
    asked: Method, engine: str, is_beam_search: bool, cause: str
) -> None:
    with pytest.raises(InvalidRequestError, match=cause):
        check_asked(asked, engine, is_beam_search=is_beam_search)


@pytest.mark.parametrize(
    ("drafter", "keeps"),
    [("auto", True), ("suffix", True), ("ngram", False), ("draft:x", False), ("off", False)],
)
def test_only_who_keeps_answers_takes_memory_for_them(drafter: str, keeps: bool) -> None:
    assert (kept_bytes(drafter) > 0) == keeps


@pytest.mark.parametrize("asked", [None, Method.OFF, Method.AUTO])
@pytest.mark.parametrize("engine", ["off", "auto", "draft:x"])
@pytest.mark.parametrize("is_beam_search", [False, True])
def test_what_needs_nothing_is_never_refused(
    asked: Method | None, engine: str, is_beam_search: bool
) -> None:
    check_asked(asked, engine, is_beam_search=is_beam_search)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    words = ("auto", "off", "ngram", "suffix", "draft", "synthetic")
    with contextlib.suppress(ConfigError):
        read = read_drafter(text, "speculate", ConfigError)
        assert text.strip().lower().startswith(words)
        assert read.method in words
