"""Beginnings of simulated prompts: equal as far as the tokens are."""

from __future__ import annotations

from headrace.simulate.prefixes import prefixes_of
from headrace.workload.ask import Ask, answer_name, question_name


def keys(ask: Ask, most: int = 10_000) -> dict[int, int]:
    return {tokens: key for key, tokens in prefixes_of(ask, most)}


def document(name: str, own: int = 50) -> Ask:
    shared = (("system", 200), (name, 300))
    return Ask(at_s=0.0, prompt_tokens=500 + own, output_tokens=1, shared=shared)


def test_prompts_share_keys_up_to_where_they_part() -> None:
    one, two = keys(document("a")), keys(document("b"))
    assert list(one) == list(two) == [64, 128, 192, 256, 320, 400, 500]
    assert [one[tokens] == two[tokens] for tokens in one] == [True] * 3 + [False] * 4
    assert keys(document("a", own=500)) == one  # nobody shares the rest
    assert list(keys(document("a"), most=130)) == [64, 128]


def test_a_turn_begins_with_the_turn_before() -> None:
    first = Ask(at_s=0.0, prompt_tokens=300, output_tokens=100, session=7)
    history = ((question_name(7, 0), 300), (answer_name(7, 0), 100))
    second = Ask(
        at_s=1.0,
        prompt_tokens=500,
        output_tokens=10,
        shared=history,
        session=7,
        turn=1,
        after_s=0.0,
    )
    before, after = keys(first), keys(second)
    assert before.items() <= after.items()
    assert max(before) == 256
    assert max(after) == 500
    other = Ask(at_s=0.0, prompt_tokens=300, output_tokens=100, session=8)
    assert not keys(other).items() & before.items()


def test_what_is_alone_has_none() -> None:
    assert prefixes_of(Ask(at_s=0.0, prompt_tokens=900, output_tokens=1), 10_000) == ()
