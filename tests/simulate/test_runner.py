"""The simulated runner: it follows plans through blocks, and catches an engine's mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plans import Draw, Found, Row, plan_of, rows_of

from headrace.core.clock import VirtualClock
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.step import PREVIOUS, RunnerLimits
from headrace.simulate.cost import linear_cost
from headrace.simulate.runner import SimulatedRunner

GREEDY = Draw(temperature=0.0)
LIMITS = RunnerLimits(
    max_batch_tokens=64, max_sequences=4, total_blocks=8, block_tokens=4, context_tokens=30
)


def make(limits: RunnerLimits = LIMITS, *, strict: bool = True) -> SimulatedRunner:
    return SimulatedRunner(
        limits, cost=linear_cost(1.0, 0.0), clock=VirtualClock(), vocab_size=50, strict=strict
    )


def entry(
    number: int,
    token_ids: list[int],
    start: int,
    table: list[int],
    *,
    draw: Draw | None = GREEDY,
    targets: list[int] | None = None,
    top_logprobs: int = 0,
) -> Row:
    return Row(
        sequence_id=number,
        token_ids=token_ids,
        start=start,
        block_table=table,
        draw=draw,
        targets=targets,
        top_logprobs=top_logprobs,
    )


def run(
    runner: SimulatedRunner, *entries: Row, copies: tuple[tuple[int, int], ...] = ()
) -> list[Found]:
    runner.submit(plan_of(*entries, copies=list(copies)))
    return rows_of(runner.collect())


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def test_chunks_and_blocks_do_not_matter_but_tokens_do() -> None:
    (whole,) = run(make(), entry(0, TOKENS, 0, [0, 1, 2]))
    runner = make()
    run(runner, entry(0, TOKENS[:3], 0, [5], draw=None), entry(1, [1, 2], 0, [0]))
    run(runner, entry(0, TOKENS[3:7], 3, [5, 2], draw=None))
    (last,) = run(runner, entry(0, TOKENS[7:], 7, [5, 2, 7]))
    assert (last.token_id, last.logprob) == (whole.token_id, whole.logprob)
    (other,) = run(make(), entry(0, [7, *TOKENS[1:]], 0, [0, 1, 2]))
    assert other.logprob != whole.logprob


def test_targets_are_scored_as_the_draw_would_be() -> None:
    runner = make()
    (scored,) = run(
        runner, entry(0, TOKENS, 0, [0, 1, 2], targets=[*TOKENS[1:], 8], top_logprobs=3)
    )
    assert len(scored.target_logprobs) == len(scored.target_top) == len(TOKENS)
    for count in range(1, len(TOKENS)):
        forced = Draw(temperature=0.0, allowed=[TOKENS[count]])
        (drawn,) = run(make(), entry(0, TOKENS[:count], 0, [0, 1, 2], draw=forced, top_logprobs=3))
        assert drawn.token_id == TOKENS[count]
        assert drawn.logprob == scored.target_logprobs[count - 1]
        assert drawn.top == scored.target_top[count - 1]
    assert scored.top == scored.target_top[-1]
    assert scored.top[0] == (scored.token_id, scored.logprob)


def test_a_copied_block_is_as_good_as_its_source() -> None:
    runner = make()
    run(runner, entry(0, TOKENS[:6], 0, [0, 1]))
    found = run(
        runner,
        entry(0, [7], 6, [0, 1]),
        entry(1, TOKENS[6:7], 6, [0, 4]),
        copies=((1, 4),),
    )
    (expected,) = run(make(), entry(0, TOKENS[:7], 0, [0, 1]))
    assert found[1].logprob == expected.logprob
    assert found[0].logprob != expected.logprob


def test_plans_in_flight_take_the_token_before_and_the_tables_as_they_were() -> None:
    solo = make()
    (first,) = run(solo, entry(0, TOKENS, 0, [0, 1, 2]))
    assert first.token_id is not None
    (second,) = run(solo, entry(0, [first.token_id], 9, [0, 1, 2]))

    runner = make(replace(LIMITS, steps_in_flight=2))
    table = [0, 1, 2]
    runner.submit(plan_of(entry(0, TOKENS, 0, table)))
    runner.submit(plan_of(entry(0, [PREVIOUS], 9, table)))
    table.clear()
    with pytest.raises(HeadraceError, match="2 in flight"):
        runner.submit(plan_of(entry(0, [PREVIOUS], 10, [0, 1, 2])))
    assert rows_of(runner.collect()) == [first]
    assert rows_of(runner.collect()) == [second]
    with pytest.raises(HeadraceError, match="the previous step drew none for it"):
        run(runner, entry(1, [PREVIOUS], 0, [6]))


def test_the_clock_moves_by_the_cost_of_each_step_in_turn() -> None:
    clock = VirtualClock(10.0)
    runner = SimulatedRunner(
        replace(LIMITS, steps_in_flight=2), cost=linear_cost(1.0, 0.5, 0.25), clock=clock
    )
    runner.submit(plan_of(entry(0, TOKENS, 0, [0, 1, 2])))  # 1 + 4.5 + 2.25
    runner.submit(plan_of(entry(0, [1], 9, [0, 1, 2])))  # 1 + 0.5 + 2.5
    assert clock.now_s() == 10
    assert runner.collect().compute_s == 7.75
    assert clock.now_s() == 17.75
    clock.advance(1.0)  # someone else's second, while the second step is being computed
    runner.collect()
    assert clock.now_s() == 21.75
    clock.advance(1.0)
    run(runner, entry(0, [1], 10, [0, 1, 2]))
    assert clock.now_s() == 22.75 + 1 + 0.5 + 2.75


def test_faults_come_when_asked_for_and_spoil_what_they_touched() -> None:
    runner = make(replace(LIMITS, steps_in_flight=2))
    runner.fail([1])
    runner.raise_on_step(2)
    runner.submit(plan_of(entry(0, [1], 0, [0]), entry(1, [1], 0, [1])))
    runner.submit(plan_of(entry(0, [PREVIOUS], 1, [0]), entry(1, [PREVIOUS], 1, [1])))
    assert [e.error for e in rows_of(runner.collect())] == [None, "made to fail"]
    assert [e.error for e in rows_of(runner.collect())] == [
        None,
        "the previous step, which this one continues, failed",
    ]
    runner.submit(plan_of(entry(0, [1], 2, [0])))
    with pytest.raises(HeadraceError, match="Step 2 failed"):
        runner.collect()
    assert run(runner, entry(0, [1], 2, [0]))[0].error is None
    with pytest.raises(HeadraceError, match=r"position 0 .*does not follow"):
        run(runner, entry(2, [1], 1, [1]))


def test_nothing_left_to_draw_fails_that_sequence_alone() -> None:
    nothing = Draw(temperature=0.0, allowed=[3], banned=[3])
    found = run(make(), entry(0, [1], 0, [0], draw=nothing), entry(1, [1], 0, [1]))
    assert found[0].error is not None
    assert found[0].token_id is None
    assert found[1].error is None


@pytest.mark.parametrize("strict", [False, True])
def test_reading_what_nobody_wrote_is_caught(strict: bool) -> None:
    runner = make(strict=strict)
    run(runner, entry(0, TOKENS[:5], 0, [0, 1]))
    with pytest.raises(HeadraceError, match=r"was not written|does not follow"):
        run(runner, entry(0, [1], 6, [0, 1]))
    with pytest.raises(HeadraceError, match=r"was not written|does not follow"):
        run(runner, entry(0, [1], 5, [0, 2]))


def test_a_stranger_s_block_far_back_is_caught_by_strict_alone() -> None:
    wrong = entry(0, [1], 9, [3, 1, 2])
    for strict in (True, False):
        runner = make(strict=strict)
        run(runner, entry(0, TOKENS, 0, [0, 1, 2]), entry(1, TOKENS[1:5], 0, [3]))
        if strict:
            with pytest.raises(HeadraceError, match=r"position 4 in block 1, which does not"):
                run(runner, wrong)
        else:
            assert run(runner, wrong)[0].error is None


def test_two_writers_and_a_reader_of_what_is_being_written_are_caught() -> None:
    runner = make()
    run(runner, entry(0, TOKENS[:6], 0, [0, 1]))
    with pytest.raises(HeadraceError, match="block 1 written by sequences 0 and 1"):
        run(runner, entry(0, [1], 6, [0, 1]), entry(1, [1], 6, [0, 1]))
    with pytest.raises(HeadraceError, match="block 1 read by sequence 1 while 0 writes it"):
        run(runner, entry(0, TOKENS[4:8], 4, [0, 1]), entry(1, TOKENS[8:], 8, [0, 1, 2]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": []}, "0 tokens"),
        ({"token_ids": [50]}, "outside the vocabulary"),
        ({"token_ids": [PREVIOUS]}, "PREVIOUS for sequence 0"),
        ({"token_ids": [1] * 65, "block_table": list(range(8))}, "65 tokens"),
        ({"start": 30, "block_table": list(range(8))}, "positions 30 to 30"),
        ({"start": -1}, "positions -1 to -1"),
        ({"start": 4}, "1 blocks of 4 tokens"),
        ({"block_table": [8]}, r"blocks \[8\]"),
        ({"block_table": [-1]}, r"blocks \[-1\]"),
        ({"block_table": [0, 0]}, r"blocks \[0, 0\]"),
        ({"targets": [1, 2]}, "2 targets"),
        ({"targets": [50]}, "outside the vocabulary"),
    ],
)
def test_a_mistaken_entry_is_refused(change: dict[str, object], message: str) -> None:
    good = entry(0, [1], 0, [0])
    with pytest.raises(HeadraceError, match=message):
        make().submit(plan_of(replace(good, **change)))  # type: ignore[arg-type]


def test_a_mistaken_plan_is_refused() -> None:
    good = entry(0, [1], 0, [0])
    for entries, copies, message in (
        ([], [], "no rows"),
        ([good, good], [], "more than one row"),
        ([replace(good, sequence_id=i) for i in range(5)], [], "5 rows"),
        ([good], [(0, 8)], r"a copy of blocks \(0, 8\)"),
    ):
        with pytest.raises(HeadraceError, match=message):
            make().submit(plan_of(*entries, copies=copies))
    with pytest.raises(HeadraceError, match="no plan submitted"):
        make().collect()
    with pytest.raises(ConfigError, match="eos_id is 50"):
        SimulatedRunner(LIMITS, cost=linear_cost(), clock=VirtualClock(), vocab_size=50, eos_id=50)
