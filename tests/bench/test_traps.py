"""Twelve ways in which load-test clients lie, each met in a public tool: the naive answer is worked
out beside ours, and is wrong. The issues in which they were found are named where there is one."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.bench.fake_endpoint import FakeEndpoint, answered, changed, event
from tests.bench.test_compare import written
from tests.bench.test_session import measured
from tests.bench.test_summary import failed, summary_of, whole
from tests.bench.virtual import Scripted, VirtualLoop, run_virtually
from tests.client.test_connection import HEAD, LAST, TOKEN, Wire, chunked

from headrace.bench.compare import compare, read_run
from headrace.bench.feed import Feed
from headrace.bench.prompts import WORDS, Scale, Writer
from headrace.bench.record import Record
from headrace.bench.run import Run, Stop
from headrace.bench.summary import summarize
from headrace.bench.table import lines
from headrace.client.answer import Answer, Failure
from headrace.core.ratio import Verdict
from headrace.workload.arrivals import ClosedLoop
from headrace.workload.ask import Ask
from headrace.workload.workload import Synthetic, fixed

Clock = Callable[[], float]


def once(at_s: float) -> Ask:
    return Ask(at_s=at_s, prompt_tokens=10, output_tokens=3)


def test_1_waiting_for_our_own_limit_counts_from_the_schedule() -> None:
    """Coordinated omission (vllm#54101): who counts from sending says 1 s to everyone."""

    async def work(clock: Clock) -> list[Record]:
        run = Run(Scripted(clock, first_s=1.0), clock=clock, spin_s=0.0, most_at_once=1)
        return await run.run(Feed(iter([once(0.1 * n) for n in range(5)])), Stop())

    records = run_virtually(work)
    naive = [one.service_ttft_s for one in records]
    assert naive == pytest.approx([1.0] * 5)
    assert [one.ttft_s for one in records] == pytest.approx([1 + 0.92 * n for n in range(5)])
    assert [one.late_s for one in records] == pytest.approx([0.0] * 5)  # the client was not late


def test_2_a_client_that_is_the_bottleneck_says_so() -> None:
    """vllm#39963, aiperf#1424: the endpoint gives everyone its first token after 0.1 s, but each
    request takes the client 50 ms of its own. From sending, everything looks well."""

    class Busy(Scripted):
        async def send(self, record: Record, request: bytes, began_s: float) -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.compute(0.05)
            await super().send(record, request, began_s)

    async def work(clock: Clock) -> Run:
        run = Run(Busy(clock), clock=clock, spin_s=0.0)
        await run.run(Feed(iter([once(0.0)] * 16)), Stop())
        return run

    run = run_virtually(work)
    records = run.progress.records
    found = summarize(records, lags_s=run.pulse.lags_s, cpu_share=0.5)
    assert not found.health.is_valid
    assert any("sent" in wrong for wrong in found.health.wrong)
    assert any("event loop" in wrong for wrong in found.health.wrong)
    assert statistics.median(one.ttft_s for one in records) > 0.5


def test_2_a_chunk_larger_than_any_buffer_is_read_whole() -> None:
    text = "x" * 1_000_000

    def reply(body: dict[str, Any]) -> bytes:
        return changed(answered(body), b'" a"', b'"' + text.encode() + b'"', 1)

    summary, _ = measured(FakeEndpoint(reply), stop=Stop(requests=2))
    assert [one.answer.text[0] for one in summary.good] == [text] * 2


def test_3_a_burst_is_all_there_before_the_first_answer() -> None:
    """aiperf#1424: the endpoint answers nobody before the last of 64 has come. A client that goes
    through them one by one never gets an answer."""

    class Gate(FakeEndpoint):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await super()._serve(reader, _Gated(writer, self))  # type: ignore[arg-type]

    class _Gated:
        """Holds what is written until 64 requests of the run are there."""

        def __init__(self, writer: asyncio.StreamWriter, gate: Gate) -> None:
            self._writer, self._gate = writer, gate

        def write(self, data: bytes) -> None:
            asked = len(self._gate.bodies) - 3  # three questions come before the run
            if asked <= 0:
                self._writer.write(data)
                return
            held.append((self._writer, data))
            if asked == 64:
                for writer, answer in held:
                    writer.write(answer)

        def close(self) -> None:
            self._writer.close()

    held: list[tuple[asyncio.StreamWriter, bytes]] = []
    workload = Synthetic(prompts=fixed(20), outputs=fixed(2), arrivals=ClosedLoop(clients=64))
    summary, _ = measured(Gate(), workload, stop=Stop(requests=64), timeout_s=30.0)
    assert (len(summary.good), summary.most_at_once) == (64, 64)


class _Slow(Answer):
    """Parsing takes 5 ms a call, by the test's clock."""

    wire: Wire

    def feed(self, data: bytes, at_s: float) -> None:
        super().feed(data, at_s)
        self.wire.now_s += 0.005


def test_4_time_is_taken_before_parsing() -> None:
    """Three chunks come in one read. Who looks at the clock after each has parsing in its gaps."""
    wire = Wire([(1.0, HEAD), (2.0, chunked(TOKEN, TOKEN, TOKEN, LAST))])
    answer = _Slow()
    answer.wire = wire
    naive: list[float] = []
    feed = answer.feed

    def watched(data: bytes, at_s: float) -> None:
        feed(data, at_s)
        naive.append(wire.now_s)

    answer.feed = watched  # type: ignore[method-assign]
    asyncio.run(wire.exchange.ask(b"request", answer, 60.0))
    assert naive[:3] == pytest.approx([2.005, 2.01, 2.015])
    assert answer.times_s == [2.0] * 3


def test_4_an_answer_ends_with_its_last_token_and_not_with_done() -> None:
    wire = Wire([(1.0, HEAD + chunked(TOKEN, TOKEN)), (3.0, chunked(LAST) + b"0\r\n\r\n")])
    answer = Answer()
    asyncio.run(wire.exchange.ask(b"request", answer, 60.0))
    one = Record(ask=once(0.0), scheduled_s=0.0, began_s=0.0, end_s=wire.now_s, answer=answer)
    found = summary_of([one])
    assert one.end_s == 3.0  # the naive end: two seconds of nothing
    assert (one.e2e_s, found.wall_s, found.output_tokens_s) == (1.0, 1.0, 2.0)


def test_4_an_error_with_status_200_is_no_success_and_201_is_one() -> None:
    def reply(body: dict[str, Any]) -> bytes:
        found = answered(body)
        if len(endpoint.bodies) <= 3:
            return found
        if len(endpoint.bodies) % 2:
            return found.replace(b"200 OK", b"201 Created")
        bad = b'event: error\ndata: {"message": "no"}\n\n'  # in place of the last bytes
        return found[: -len(bad)] + bad

    endpoint = FakeEndpoint(reply)
    summary, _ = measured(endpoint)
    by_status = {"whole": 6, "failed": 6}  # who takes 200 alone has these the wrong way round
    assert (len(summary.good), summary.failed) == (by_status["whole"], by_status["failed"])
    assert summary.failures == {"error in the stream": 6}


def test_5_a_chunk_is_not_a_token() -> None:
    """vllm#35471: with speculation a chunk carries three. By chunks, a stream of 30 tokens/s has
    10, and its gaps are three times as long."""
    answer = Answer(
        times_s=[0.1 * n for n in range(1, 11)], chars=[9] * 10, counts=[3] * 10, output_tokens=30
    )
    one = Record(ask=once(0.0), scheduled_s=0.0, began_s=0.0, answer=answer)
    found = summary_of([one])
    naive_gap_s, naive_peak = statistics.fmean(one.chunk_gaps_s), len(answer.times_s)
    assert naive_gap_s == pytest.approx(0.1)
    assert naive_peak == 10
    assert one.tpot_s == pytest.approx(0.9 / 29)
    assert statistics.fmean(one.gaps_s) == pytest.approx(0.9 / 29)
    assert found.most_tokens_in_a_second == pytest.approx(30, abs=3)  # the last are at 1.0 s
    assert found.output_tokens_s == pytest.approx(30.0)


def test_6_reasoning_is_counted_once_and_is_the_first_token_but_not_the_first_text() -> None:
    def delta(**fields: Any) -> bytes:
        return event({"choices": [{"index": 0, "delta": fields}]})

    answer = Answer()
    answer.feed(delta(role="assistant", content=""), 0.5)
    answer.feed(delta(reasoning_content="Let me think"), 1.0)
    answer.feed(delta(content="42"), 4.0)
    usage = {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3}}
    answer.feed(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n", 4.5)
    answer.end(4.5)
    one = Record(ask=once(0.0), scheduled_s=0.0, began_s=0.0, answer=answer)
    naive_tokens = (answer.output_tokens or 0) + (answer.reasoning_tokens or 0)
    assert (naive_tokens, one.tokens) == (8, 5)
    naive_ttft_s = 0.5  # the role's chunk, which says nothing
    assert (naive_ttft_s, one.ttft_s, one.visible_s) == (0.5, 1.0, 4.0)


def test_7_tokens_are_the_endpoints_and_a_tokenizer_that_disagrees_is_said() -> None:
    """inference-perf#580: half of the counts differed. What a text becomes when it is tokenized
    again is not what was generated, and chunks are not tokens at all."""
    records = [whole(0.1 * n, tokens=6) for n in range(4)]
    for one, again in zip(records, (6, 5, 4, 6), strict=True):
        one.retokenized = again
        one.answer.times_s = one.answer.times_s[:3]  # two tokens a chunk
        one.answer.chars = [2, 2, 2]
        one.answer.counts = [0, 0, 0]
    found = summary_of(records)
    by_tokenizer = sum(one.retokenized or 0 for one in records)
    by_chunks = sum(len(one.answer.times_s) for one in records)
    assert (found.output_tokens, by_tokenizer, by_chunks) == (24, 21, 12)
    assert found.disagreed == (2, 4)
    assert "usage and tokenizer disagree on 2 of 4" in "\n".join(lines(found))


def test_8_what_failed_has_no_latency() -> None:
    """guidellm#444 and #216: a first token that never came is at 0, so that TTFT is negative."""
    records = [whole(10.0 + n, ttft_s=0.4) for n in range(6)]
    records += [failed(20.0 + n, Failure.HTTP, "503: busy") for n in range(4)]
    naive = [(one.answer.times_s or [0.0])[0] - one.scheduled_s for one in records]
    assert statistics.fmean(naive) < 0
    spread = summary_of(records).spreads["ttft"]
    assert spread is not None
    assert spread.count == 6
    assert spread.mean == pytest.approx(0.4)
    assert summary_of(records).failures == {"HTTP 503": 4}


def test_9_a_median_tells_what_a_mean_hides() -> None:
    """Most requests wait longer while the mean falls: a few that took very long are gone."""
    few = [whole(0.1 * n, ttft_s=0.1) for n in range(36)] + [whole(3.6, ttft_s=9.0)] * 4
    many = [whole(0.1 * n, ttft_s=0.5) for n in range(40)]
    before, after = (summary_of(records).spreads["ttft"] for records in (few, many))
    assert before is not None
    assert after is not None
    assert after.mean < before.mean
    assert after.median > before.median


class _Cold(Scripted):
    """The first answer takes 5 s longer: something is compiled."""

    async def _answer(self, record: Record, began_s: float) -> None:
        if len(self.sent) == 1:
            await asyncio.sleep(5.0)
        await super()._answer(record, began_s)


def _warmed(warm_up_clients: int | None) -> tuple[list[Record], int]:
    """Two clients on an endpoint with two places, after a warm-up of 20 requests; None: without
    one. Also: how many were at once in the warm-up."""
    two = Synthetic(prompts=fixed(10), outputs=fixed(3), arrivals=ClosedLoop(clients=2))

    async def work(clock: Clock) -> tuple[list[Record], int]:
        server = _Cold(clock, places=2)
        if warm_up_clients is not None:
            warm = Synthetic(
                prompts=fixed(10), outputs=fixed(3), arrivals=ClosedLoop(clients=warm_up_clients)
            )
            run = Run(server, clock=clock, spin_s=0.0)
            await run.run(Feed(warm.asks(), warm_up_clients), Stop(requests=20))
        most = server.most_at_once
        run = Run(server, clock=clock, spin_s=0.0)
        return await run.run(Feed(two.asks(), 2), Stop(requests=12)), most

    return run_virtually(work)


def test_10_warm_up_takes_the_cold_start_and_keeps_the_concurrency() -> None:
    """sglang#39398, dynamo#5287. What a session does is in test_session.py."""
    cold, _ = _warmed(None)
    warm, most = _warmed(2)
    assert max(one.ttft_s for one in cold) == pytest.approx(5.1)
    assert [one.ttft_s for one in warm] == pytest.approx([0.1] * 12)
    assert most == 2
    assert _warmed(20)[1] == 20  # the naive burst
    endpoint = FakeEndpoint()
    measured(endpoint, warm_up=20)
    assert endpoint.connections == 3  # the run has three clients


def _cached_share(prompts: list[str], block: int = 16) -> float:
    """Of words, by a prefix cache that keeps everything."""
    known: set[tuple[str, ...]] = set()
    hits = every = 0
    for prompt in prompts:
        words = prompt.split()
        every += len(words)
        for end in range(block, len(words) + 1, block):
            prefix = tuple(words[:end])
            hits += block * (prefix in known)
            known.add(prefix)
    return hits / every


def test_11_a_second_run_finds_nothing_of_the_first_in_the_cache() -> None:
    """vllm#20083: random prompts with 98% of hits. The same seed gives the same prompts, so that a
    second run measures the cache."""
    naive = []
    for _ in range(2):
        random = Random(0)
        naive += [" ".join(random.choices(WORDS, k=128)) for _ in range(50)]
    asks = [Ask(at_s=0.0, prompt_tokens=128, output_tokens=1) for _ in range(50)]
    ours = [
        Writer(Scale(), f"{salt} run 1").messages(ask, number, {})[0]["content"]
        for salt in ("a", "b")
        for number, ask in enumerate(asks)
    ]
    assert (_cached_share(naive), _cached_share(ours)) == (0.5, 0.0)


def test_12_runs_of_the_same_server_that_differ_are_inconclusive(tmp_path: Path) -> None:
    """Requests of one run are alike; between runs everything moves by 10%. Two medians, and even
    resampled requests, would call that a difference."""
    sides = [
        [read_run(written(tmp_path / f"{side}{n}", 10 * n, slower=slower, count=150))
         for n, slower in enumerate(moved)]
        for side, moved in (("a", (0.9, 1.0, 1.1)), ("b", (1.12, 1.02, 0.93)))
    ]  # fmt: skip
    assert compare(*sides).rows[0].verdict is Verdict.INCONCLUSIVE
    single = compare(sides[0][:1], sides[1][:1]).rows[0]
    assert single.verdict is Verdict.WORSE  # the naive answer
