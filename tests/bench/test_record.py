"""Figures of one request: each way in which load-test clients lie, with the naive answer beside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.record import CountedBy, Record, chunk_tokens
from headrace.client.answer import Answer
from headrace.workload.ask import Ask

ASK = Ask(at_s=0.0, prompt_tokens=10, output_tokens=8)


def record(
    times_s: list[float],
    *,
    tokens: int | None = None,
    chars: list[int] | None = None,
    counts: list[int] | None = None,
    scheduled_s: float = 0.0,
) -> Record:
    answer = Answer(
        times_s=times_s,
        chars=chars or [1] * len(times_s),
        counts=counts or [0] * len(times_s),
        output_tokens=tokens,
        finish="length",
    )
    return Record(ask=ASK, scheduled_s=scheduled_s, began_s=scheduled_s + 0.25, answer=answer)


def test_latency_counts_from_the_schedule_and_service_time_from_sending() -> None:
    one = record([3.0, 4.0], tokens=2, scheduled_s=1.0)
    one.sent_s = 2.5
    assert (one.ttft_s, one.e2e_s, one.late_s) == (2.0, 3.0, 0.25)
    assert (one.service_ttft_s, one.service_s) == (0.5, 1.5)


def test_gaps_are_of_tokens_and_not_of_chunks() -> None:
    """Speculation: three chunks, eight tokens. By chunks, TPOT would be 0.3 s and not 0.6 / 7."""
    one = record([1.0, 1.3, 1.6], tokens=8, counts=[2, 3, 3])
    assert one.tpot_s == pytest.approx(0.6 / 7)
    assert one.gaps_s == pytest.approx([0.0] + [0.1] * 6)
    assert sum(one.chunk_gaps_s) / 2 == pytest.approx(0.3)


def test_where_chunks_do_not_say_their_tokens_the_text_shares_them_out() -> None:
    one = record([1.0, 1.4, 1.5], tokens=6, chars=[2, 8, 2])
    assert len(one.gaps_s) == 5
    assert sum(one.gaps_s) == pytest.approx(0.5)


def test_without_usage_a_chunk_is_a_token_and_the_record_says_so() -> None:
    one = record([1.0, 1.1, 1.2])
    assert (one.tokens, one.counted_by) == (3, CountedBy.CHUNKS)
    one.retokenized = 5
    assert (one.tokens, one.counted_by) == (5, CountedBy.TOKENIZER)


def test_one_token_has_no_tpot() -> None:
    one = record([1.0], tokens=1)
    assert (one.tpot_s, one.gaps_s) == (None, [])


@given(
    chunks=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 10)), min_size=1, max_size=30),
    tokens=st.integers(1, 120),
)
def test_gaps_are_one_less_than_tokens_and_their_mean_is_tpot(
    chunks: list[tuple[int, float]], tokens: int
) -> None:
    times, at_s = [], 1.0
    for _, gap_s in chunks:
        at_s += gap_s
        times.append(at_s)
    one = record(times, tokens=tokens, chars=[chars for chars, _ in chunks])
    shares = chunk_tokens(one.answer.counts, one.answer.chars, tokens)
    assert sum(shares) == tokens
    assert shares[0] >= 1
    assert min(shares) >= 0
    assert len(one.gaps_s) == tokens - 1
    if tokens > 1:
        assert one.tpot_s is not None
        assert sum(one.gaps_s) == pytest.approx(times[-1] - times[0])
        assert sum(one.gaps_s) / (tokens - 1) == pytest.approx(one.tpot_s)
