"""A replica on a virtual clock, against queueing theory, identities and the engine by itself."""

from __future__ import annotations

import gc
import logging
import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config import SchedulerConfig
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.step import RunnerLimits, StepPlan
from headrace.simulate.cost import linear_cost
from headrace.simulate.replica import UNBOUNDED, Edge, QueueLimits, Setup
from headrace.simulate.report import Report
from headrace.simulate.serve import serve
from headrace.simulate.verdict import present
from headrace.workload.ask import Ask, answer_name, question_name


def limits(slots: int = 8, blocks: int = 4096, steps_in_flight: int = 1) -> RunnerLimits:
    return RunnerLimits(
        max_batch_tokens=512,
        max_sequences=slots,
        total_blocks=blocks,
        block_tokens=16,
        context_tokens=4096,
        steps_in_flight=steps_in_flight,
    )


def poisson(rate: float, count: int, seed: int, prompt: int = 1, output: int = 1) -> Iterator[Ask]:
    chooser, at_s = random.Random(seed), 0.0
    for _ in range(count):
        at_s += chooser.expovariate(rate)
        yield Ask(at_s=at_s, prompt_tokens=prompt, output_tokens=output)


def one_at_a_time(service: Callable[[], float]) -> Setup:
    """A server that serves one request in one step."""
    return Setup(
        limits=limits(slots=1),
        cost=lambda plan: service(),
        config=SchedulerConfig(prefix_cache=False),
        queue=UNBOUNDED,
    )


# -- queueing theory ---------------------------------------------------------------------------


def lindley(arrivals_s: list[float], services_s: list[float]) -> list[float]:
    """Waits at one server: each waits for what was left of the one before it."""
    waits_s = [0.0]
    for at in range(1, len(arrivals_s)):
        left_s = waits_s[-1] + services_s[at - 1] - (arrivals_s[at] - arrivals_s[at - 1])
        waits_s.append(max(0.0, left_s))
    return waits_s


def test_waits_are_those_of_one_exponential_server() -> None:
    """M/M/1: the mean wait is rho / (mu - lambda), and a share 1 - rho does not wait. Each single
    wait is Lindley's."""
    chooser, services_s = random.Random(5), []

    def service() -> float:
        services_s.append(chooser.expovariate(1.0))
        return services_s[-1]

    report = serve(poisson(0.5, 12_000, 1), one_at_a_time(service))
    waits_s = [each.queue_s for each in report.served]
    expected = lindley([each.arrival_s for each in report.served], services_s)
    assert waits_s == pytest.approx(expected, abs=1e-6)
    assert math.fsum(waits_s) / len(waits_s) == pytest.approx(0.5 / (1.0 - 0.5), rel=0.12)
    assert sum(1 for wait in waits_s if wait > 1e-6) / len(waits_s) == pytest.approx(0.5, rel=0.05)


def test_waits_are_those_of_one_constant_server() -> None:
    """M/D/1: half the wait of M/M/1."""
    report = serve(poisson(0.6, 8_000, 2), one_at_a_time(lambda: 1.0))
    assert report.queue_s is not None
    assert report.queue_s.mean == pytest.approx(0.6 / (2 * (1 - 0.6)), rel=0.08)


def erlang_c(servers: int, load: float) -> float:
    """The share that waits, of M/M/c with this load in Erlangs."""
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (math.fsum(terms) + last)


def test_waits_are_those_of_several_exponential_servers() -> None:
    """M/M/c: an engine whose steps take the same time for any batch serves each of its slots by
    itself, and outputs of a geometric length are exponential times in small steps."""
    slots, step_s, mean_tokens = 4, 0.05, 20
    chooser, at_s, asks = random.Random(11), 0.0, []
    for _ in range(5_000):
        at_s += chooser.expovariate(3.0)  # 3 Erlangs: a request takes 1 s in the mean
        tokens = 1 + int(math.log(1.0 - chooser.random()) / math.log(1 - 1 / mean_tokens))
        asks.append(Ask(at_s=at_s, prompt_tokens=1, output_tokens=tokens))
    setup = Setup(
        limits=limits(slots=slots),
        cost=lambda plan: step_s,
        # Prompts join decoding steps at once: no step is kept free of them to measure its time.
        config=SchedulerConfig(prefix_cache=False, max_step_growth=1e9),
        queue=UNBOUNDED,
    )
    report = serve(asks, setup)
    assert report.queue_s is not None
    expected = erlang_c(slots, 3.0) / (slots - 3.0)
    # A request that finds a free slot waits for the step under way: half a step in the mean.
    assert report.queue_s.mean == pytest.approx(expected + step_s / 2, rel=0.1)


# -- identities --------------------------------------------------------------------------------


@st.composite
def workloads(draw: st.DrawFn) -> list[Ask]:
    at_s, asks = 0.0, []
    for number in range(draw(st.integers(1, 12))):
        at_s += draw(st.floats(0, 0.5))
        prompt = draw(st.integers(1, 300))
        shared = draw(st.integers(0, prompt))
        asks.append(
            Ask(
                at_s=at_s,
                prompt_tokens=prompt,
                output_tokens=draw(st.integers(1, 40)),
                shared=((f"family {number % 2}", shared),) if shared else (),
            )
        )
    return asks


@given(
    asks=workloads(),
    slots=st.sampled_from((1, 3, 8)),
    steps_in_flight=st.sampled_from((1, 2)),
    blocks=st.sampled_from((30, 60, 4096)),
)
@settings(max_examples=60, deadline=None)
def test_every_token_is_accounted_for(
    asks: list[Ask], slots: int, steps_in_flight: int, blocks: int
) -> None:
    setup = Setup(
        limits=limits(slots, blocks, steps_in_flight),
        cost=linear_cost(0.01, 0.001),
        host=lambda plan: 0.002,
        edge=Edge(before_s=0.01, before_token_s=1e-5, busy_s=0.001, after_s=0.003),
        queue=UNBOUNDED,
    )
    report = serve(asks, setup)
    assert [each.ask for each in report.served] == asks
    for each in report.served:
        assert each.is_done
        assert each.tokens == each.ask.output_tokens
        assert each.started_s is not None
        assert each.first_s is not None
        assert each.end_s is not None
        ready_s = each.arrival_s + setup.edge.delay_s(each.ask) + setup.edge.work_s(each.ask)
        assert each.arrival_s < ready_s <= each.started_s + 1e-9
        assert each.started_s < each.first_s <= each.end_s
        assert 0 <= each.cached_tokens < each.ask.prompt_tokens
    # Little's law: requests in the system, summed over time, are their times in it.
    last_s = max(each.end_s or 0.0 for each in report.served)
    (mean,) = present(report.served, 0.0, last_s, 1)
    assert mean * last_s == pytest.approx(math.fsum(each.e2e_s for each in report.served))
    assert serve(asks, setup).served[-1].end_s == report.served[-1].end_s


def test_a_closed_loop_is_as_fast_as_its_requests() -> None:
    """Clients that ask at once again: requests a second = clients / time of a request."""
    clients, turns = 6, 40
    asks = [
        Ask(
            at_s=0.0,
            prompt_tokens=40,
            output_tokens=20,
            session=client,
            turn=turn,
            after_s=0.0 if turn else None,
        )
        for turn in range(turns)
        for client in range(clients)
    ]
    report = serve(asks, Setup(limits=limits(), cost=linear_cost(0.01, 0.0001)))
    last_s = max(each.end_s or 0.0 for each in report.served)
    mean_s = math.fsum(each.e2e_s for each in report.served) / len(report.served)
    assert len(report.served) / last_s == pytest.approx(clients / mean_s, rel=0.02)
    assert report.requests_s == pytest.approx(clients / mean_s, rel=0.02)
    (mean,) = present(report.served, 0.0, last_s, 1)
    assert mean == pytest.approx(clients, rel=0.02)


# -- what a server does ------------------------------------------------------------------------


def test_a_session_finds_its_own_answers_in_the_prefix_cache() -> None:
    first = Ask(at_s=0.0, prompt_tokens=160, output_tokens=64, session=7)
    history = ((question_name(7, 0), 160), (answer_name(7, 0), 64))
    second = Ask(
        at_s=0.0,
        prompt_tokens=256,
        output_tokens=4,
        session=7,
        turn=1,
        after_s=2.5,
        shared=history,
    )
    report = serve([first, second], Setup(limits=limits(), cost=linear_cost(0.01, 0.001)))
    one, two = report.served
    assert one.end_s is not None
    assert two.arrival_s == pytest.approx(one.end_s + 2.5)
    assert one.cached_tokens == 0
    # All but the last token of the answer is computed, and only full blocks are kept.
    assert two.cached_tokens == (160 + 64 - 1) // 16 * 16


def test_a_full_queue_refuses_as_the_server_does() -> None:
    asks = [Ask(at_s=0.0, prompt_tokens=10, output_tokens=100) for _ in range(20)]
    setup = Setup(
        limits=limits(slots=2),
        cost=linear_cost(0.01),
        queue=QueueLimits(max_waiting_requests=5),
    )
    report = serve(asks, setup)
    # All come before the first step, so the queue has them all; five fit.
    assert report.refused == 15
    assert len(report.done) == 5
    assert {each.refused for each in report.served} == {None, "TooManyRequestsError"}


def test_work_before_the_engine_is_done_for_all_that_have_come_and_delays_overlap() -> None:
    asks = [Ask(at_s=0.0, prompt_tokens=10, output_tokens=1) for _ in range(4)]

    def ready(edge: Edge) -> list[float]:
        setup = Setup(limits=limits(), cost=lambda plan: 1e-6, edge=edge)
        return [each.started_s or 0.0 for each in serve(asks, setup).served]

    assert ready(Edge(before_s=0.1, before_token_s=0.01)) == pytest.approx([0.2] * 4, abs=1e-4)
    # The first goes through by itself; the others have come by then, and go through together.
    assert ready(Edge(busy_s=0.1, busy_token_s=0.01, before_s=1.0)) == pytest.approx(
        [1.2, 1.8, 1.8, 1.8], abs=1e-4
    )


def test_a_prompt_that_can_not_run_is_refused_and_the_others_are_not() -> None:
    asks = [
        Ask(at_s=0.0, prompt_tokens=5000, output_tokens=1),
        Ask(at_s=0.0, prompt_tokens=10, output_tokens=3),
    ]
    report = serve(asks, Setup(limits=limits(), cost=linear_cost()))
    assert [each.refused for each in report.served] == ["ContextLengthError", None]


def test_requests_out_of_order_and_turns_without_a_beginning_are_refused() -> None:
    late, early = (Ask(at_s=at_s, prompt_tokens=1, output_tokens=1) for at_s in (2.0, 1.0))
    setup = Setup(limits=limits(), cost=linear_cost())
    with pytest.raises(InvalidRequestError, match="in order of time"):
        serve([late, early], setup)
    orphan = Ask(at_s=0.0, prompt_tokens=1, output_tokens=1, session=1, turn=3, after_s=1.0)
    with pytest.raises(HeadraceError, match="1 waited for a turn that never came"):
        serve([orphan], setup)
    with pytest.raises(InvalidRequestError, match="shares 20 tokens of a prompt of 10"):
        serve([Ask(at_s=0.0, prompt_tokens=10, output_tokens=1, shared=(("a", 20),))], setup)


def test_prompts_and_decoding_share_steps() -> None:
    """A prompt that comes while others decode is computed in their steps, in pieces."""
    mixed: list[tuple[int, int]] = []

    def cost(plan: StepPlan) -> float:
        prompts = sum(count for count in plan.counts if count > 1)
        mixed.append((prompts, plan.batch_tokens - prompts))
        return 0.01 + 1e-5 * plan.batch_tokens

    asks = [Ask(at_s=0.0, prompt_tokens=20, output_tokens=200) for _ in range(6)]
    asks.append(Ask(at_s=0.5, prompt_tokens=2000, output_tokens=2))
    serve(asks, Setup(limits=limits(), cost=cost))
    both = [prompts for prompts, decoding in mixed if prompts and decoding]
    assert len(both) >= 4
    assert sum(both) >= 1900


def test_continuous_batching_wastes_none_of_what_a_static_batch_wastes() -> None:
    """15 answers of 50 tokens and one of 500: a batch that waits for its longest computes 16 x 500
    places for 1,250 tokens, 84% of them for nothing. The engine's steps have only rows that want a
    token, and its 16 requests are done in the same 500 steps."""
    outputs = [50] * 15 + [500]
    wasted = 1 - sum(outputs) / (len(outputs) * max(outputs))
    assert wasted == pytest.approx(0.84, abs=0.005)
    rows: list[int] = []

    def cost(plan: StepPlan) -> float:
        rows.append(len(plan))
        return 0.01

    asks = [Ask(at_s=0.0, prompt_tokens=8, output_tokens=tokens) for tokens in outputs]
    report = serve(asks, Setup(limits=limits(slots=16), cost=cost))
    assert sum(rows) == sum(outputs)
    assert len(rows) == max(outputs)
    short = [each.e2e_s for each in report.served[:15]]
    assert max(short) == pytest.approx(50 * 0.01)  # static: 5 s, as long as the longest


def test_the_report_of_nothing() -> None:
    report = Report(served=())
    assert report.ttft_s is None
    assert report.output_tokens_s == 0.0
    assert report.measured == ()


def test_a_run_leaves_the_process_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """Preemptions are counted, not logged; the log and the collector are as before."""
    log, before = logging.getLogger("headrace.engine"), gc.get_threshold()
    level = log.level
    asks = [Ask(at_s=0.0, prompt_tokens=8, output_tokens=1) for _ in range(80)]
    asks += [Ask(at_s=1.0, prompt_tokens=100, output_tokens=300) for _ in range(8)]
    with caplog.at_level(logging.WARNING):
        report = serve(asks, Setup(limits=limits(blocks=40), cost=linear_cost(), queue=UNBOUNDED))
    assert report.preemptions > 0
    assert caplog.records == []
    assert (log.level, gc.get_threshold()) == (level, before)
