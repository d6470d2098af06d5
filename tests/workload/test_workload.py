"""Requests drawn from distributions: the same by seed, sessions that grow, loops that close."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.workload.arrivals import ClosedLoop, OpenLoop
from headrace.workload.ask import Ask, answer_name, question_name
from headrace.workload.distribution import Constant, Exponential, Lognormal, Uniform
from headrace.workload.named import NAMED, find_workload
from headrace.workload.tokens import prompt_ids
from headrace.workload.workload import Lengths, Synthetic, fixed, summarize

SESSIONS = Synthetic(
    prompts=Lengths(Lognormal(50, 1.0), most=400),
    outputs=Lengths(Uniform(1, 60)),
    arrivals=OpenLoop(rate_s=2.0),
    prefixes=3,
    prefix_tokens=32,
    turns=Lengths(Uniform(1, 6)),
    follow_ups=fixed(9),
    waits=Exponential(1.5),
    context_tokens=300,
)

synthetics = st.builds(
    replace,
    st.just(SESSIONS),
    arrivals=st.one_of(
        st.builds(OpenLoop, rate_s=st.floats(0.01, 100), cv=st.floats(0, 4)),
        st.builds(ClosedLoop, clients=st.integers(1, 9)),
    ),
    prefixes=st.integers(0, 3),
    prefix_tokens=st.integers(0, 500),
    turns=st.builds(lambda most: Lengths(Uniform(1, most)), st.integers(1, 9)),
    context_tokens=st.integers(2, 2000),
)


@settings(max_examples=60, deadline=None)
@given(synthetics, st.integers(0, 2**40))
def test_every_request_is_whole(workload: Synthetic, seed: int) -> None:
    asks = list(workload.asks(seed, 60))
    assert asks == list(workload.asks(seed, 60))
    assert len(asks) == 60
    last: dict[int, Ask] = {}
    for ask in asks:
        assert ask.session is not None
        assert ask.prompt_tokens >= 1
        assert ask.output_tokens >= 1
        assert ask.total_tokens <= max(workload.context_tokens, 2)
        assert ask.shared_tokens <= ask.prompt_tokens
        before = last.get(ask.session)
        assert (ask.after_s is None) == (before is None)
        assert ask.turn == (before.turn + 1 if before else 0)
        last[ask.session] = ask
    assert all(one.at_s <= other.at_s for one, other in pairwise(asks))


def test_a_turn_begins_with_the_turn_before_it_and_its_answer() -> None:
    asks = [ask for ask in SESSIONS.asks(5, 200) if ask.turn]
    assert len(asks) > 50
    whole = {(ask.session, ask.turn): ask for ask in SESSIONS.asks(5, 200)}
    for ask in asks:
        before = whole[ask.session, ask.turn - 1]
        assert ask.session is not None
        question = before.prompt_tokens - before.shared_tokens
        assert ask.shared == (
            *before.shared,
            (question_name(ask.session, before.turn), question),
            (answer_name(ask.session, before.turn), before.output_tokens),
        )
        assert ask.prompt_tokens == before.total_tokens + 9


def test_sessions_are_the_same_at_any_rate_and_seeds_differ() -> None:
    def lengths(workload: Synthetic, seed: int) -> list[tuple[int, int]]:
        return [(ask.prompt_tokens, ask.output_tokens) for ask in workload.asks(seed, 50)]

    assert lengths(SESSIONS, 1) == lengths(SESSIONS.at_rate(77.0), 1)
    assert lengths(SESSIONS, 1) != lengths(SESSIONS, 2)


def test_a_rate_counts_requests_not_sessions() -> None:
    workload = replace(SESSIONS, context_tokens=100_000).at_rate(6.0)
    found = summarize(workload.asks(3, 20_000))
    assert found.rate_s == pytest.approx(6.0, rel=0.05)


def test_a_closed_loop_gives_every_client_its_own_chain() -> None:
    asks = list(SESSIONS.with_clients(4).asks(0, 40))
    assert [ask.session for ask in asks] == [0, 1, 2, 3] * 10
    assert [ask.turn for ask in asks[::4]] == list(range(10))
    with pytest.raises(ConfigError, match="closed loop"):
        SESSIONS.with_clients(4).at_rate(2.0)


def test_shared_tokens_are_counted_once_they_were_seen() -> None:
    one = Synthetic(
        prompts=fixed(30), outputs=fixed(5), arrivals=OpenLoop(rate_s=1.0, cv=0.0),
        prefixes=1, prefix_tokens=70,
    )  # fmt: skip
    found = summarize(one.asks(0, 10))
    assert found.prompt_tokens == 100
    assert found.output_tokens == 5
    assert found.shared_share == pytest.approx(9 * 70 / 1000)
    assert found.rate_s == pytest.approx(1.0)
    # Two turns: the second shares the prefix, the first question (30) and its answer (5).
    twice = replace(one, turns=fixed(2))
    assert summarize(twice.asks(0, 2)).shared_share == pytest.approx(105 / (100 + 135))
    with pytest.raises(ConfigError, match="no requests"):
        summarize([])


def test_prompts_as_ids_share_what_asks_share() -> None:
    vocabulary = range(10, 500)
    first, second = list(replace(SESSIONS, turns=fixed(2), context_tokens=9999).asks(1, 2))
    assert first.session is not None
    said = list(range(1000, 1000 + first.output_tokens))
    one = prompt_ids(first, question_name(first.session, 0), vocabulary, {})
    answers = {answer_name(first.session, 0): said}
    two = prompt_ids(second, question_name(first.session, 1), vocabulary, answers)
    assert len(one) == first.prompt_tokens
    assert len(two) == second.prompt_tokens
    assert two[: len(one) + len(said)] == one + said
    # An answer that ended early leaves the prompt as long as it was planned.
    short = prompt_ids(second, "own", vocabulary, {answer_name(first.session, 0): said[:1]})
    assert len(short) == second.prompt_tokens


def test_five_workloads_have_names_and_all_but_batch_an_objective() -> None:
    assert list(NAMED) == ["chat", "rag", "code", "batch", "agent"]
    assert [one.name for one in NAMED.values() if one.slo is None] == ["batch"]
    for one in NAMED.values():
        asks = list(one.asks(0, 3000))
        assert all(ask.total_tokens <= one.context_tokens for ask in asks)
    assert summarize(NAMED["code"].asks(0, 5000)).prompt_tokens == pytest.approx(912, rel=0.05)
    assert summarize(NAMED["code"].asks(0, 5000)).output_tokens == pytest.approx(256, rel=0.05)
    with pytest.raises(ConfigError, match="chat, rag, code, batch, agent"):
        find_workload("chats")


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefixes"):
        replace(SESSIONS, prefixes=-1)
    with pytest.raises(ConfigError, match="context_tokens"):
        replace(SESSIONS, context_tokens=1)
    with pytest.raises(ConfigError):
        Lengths(Constant(1), least=5, most=4)
    with pytest.raises(ConfigError):
        SESSIONS.at_rate(0)
