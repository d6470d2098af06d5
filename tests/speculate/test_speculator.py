"""The speculator behind its seam: what it proposes, learns and forgets. Times are made up."""

from __future__ import annotations

from random import Random

import pytest
from tests.speculate.texts import Text, text

from headrace.core.clock import VirtualClock
from headrace.core.drafter import Method
from headrace.core.speculation import DraftRoom
from headrace.core.step import Drafts, DrawParams, StepPlan, StepResult
from headrace.speculate.speculator import MOST_LEFT_OUT, TimedSpeculator

GREEDY = DrawParams(temperature=0.0)


class Machine:
    """Steps of a made-up machine, whose time is a line over the drawn tokens."""

    def __init__(
        self,
        speculator: TimedSpeculator,
        fixed_s: float,
        row_s: float,
        *,
        compiles: bool = False,  # the first step of every number of rows
    ) -> None:
        self.speculator = speculator
        self.fixed_s, self.row_s = fixed_s, row_s
        self._known: set[int] | None = set() if compiles else None
        self.seconds = 0.0
        self.tokens = self.guesses = self.right = 0

    def step(self, texts: list[Text], answers: list[list[int]]) -> None:
        """One step of all sequences: guesses are asked for, and judged by the answers."""
        room = DraftRoom(
            rows=len(texts),
            context_tokens=sum(len(each.token_ids) for each in texts),
            most_tokens=64,
        )
        guesses = self.speculator.propose(texts, [64] * len(texts), room)
        plan = StepPlan()
        for row, (each, some) in enumerate(zip(texts, guesses, strict=True)):
            drafts = Drafts(uniforms=[0.0] * len(some)) if some else None
            plan.add(
                each.sequence_id,
                [0, *some],
                len(each.token_ids) - 1,
                [],
                draw=GREEDY,
                drafts=drafts,
            )
            assert plan.counts[row] == 1 + len(some)
        time_s = self.fixed_s + self.row_s * plan.batch_tokens
        self.seconds += time_s  # compiling is not counted
        is_warm_up = self._known is not None and plan.batch_tokens not in self._known
        if is_warm_up and self._known is not None:
            self._known.add(plan.batch_tokens)
            time_s *= 100
        for each, answer, some in zip(texts, answers, guesses, strict=True):
            given = len(each.token_ids) - each.prompt_tokens
            right = 0
            while right < len(some) and some[right] == answer[given + right]:
                right += 1
            each.token_ids += answer[given : given + right + 1]
            self.guesses += len(some)
            self.right += right
            self.tokens += right + 1
            if some:
                self.speculator.taken(each, len(some), right)
        result = StepResult(tokens=[], logprobs=[], compute_s=time_s, is_warm_up=is_warm_up)
        self.speculator.stepped(plan, result)


def speculator(method: Method = Method.SUFFIX) -> TimedSpeculator:
    return TimedSpeculator(method, clock=VirtualClock())


def copying(stream: int, length: int = 200) -> tuple[Text, list[int]]:
    """A prompt, and an answer that is the same text again with a few changes."""
    random = Random(stream)
    prompt = [random.randrange(1000) for _ in range(length)]
    answer = [1001 if random.random() < 0.03 else token for token in prompt]
    return text(stream, prompt), answer + list(range(2000, 4000))  # then nothing repeats


def fresh(stream: int, length: int = 200) -> tuple[Text, list[int]]:
    """An answer that repeats nothing but chance pairs of tokens."""
    random = Random(1000 + stream)
    tokens = [random.randrange(12) for _ in range(length + 2000)]
    return text(stream, tokens[:length]), tokens[length:]


def run(machine: Machine, made: list[tuple[Text, list[int]]], tokens: int) -> None:
    texts, answers = [each for each, _ in made], [answer for _, answer in made]
    for each, answer in made:
        each.token_ids.append(answer[0])  # the prompt's step gives the first token
    while min(len(each.token_ids) - each.prompt_tokens for each in texts) < tokens:
        machine.step(texts, answers)


def plain_s(machine: Machine, streams: int) -> float:
    """What the same tokens would have taken without guesses."""
    return machine.tokens / streams * (machine.fixed_s + machine.row_s * streams)


@pytest.mark.parametrize("method", [Method.NGRAM, Method.SUFFIX])
def test_a_text_that_repeats_gets_much_faster_on_a_machine_with_dear_steps(method: Method) -> None:
    machine = Machine(speculator(method), fixed_s=0.02, row_s=0.001)
    run(machine, [copying(0)], 180)
    assert machine.right > 0.6 * machine.guesses > 0
    assert plain_s(machine, 1) / machine.seconds > 2.5


def test_steps_that_compile_something_are_no_reason_to_stop_guessing() -> None:
    # On an H200 the first step of a new size took a hundred times as long, which was learnt.
    machine = Machine(speculator(), fixed_s=0.02, row_s=0.001, compiles=True)
    run(machine, [copying(0)], 180)
    assert plain_s(machine, 1) / machine.seconds > 2.5


def test_nothing_is_lost_where_nothing_repeats() -> None:
    machine = Machine(speculator(), fixed_s=0.004, row_s=0.002)
    run(machine, [fresh(0)], 200)
    assert plain_s(machine, 1) / machine.seconds > 0.97


@pytest.mark.parametrize("streams", [16, 32])
def test_nothing_is_guessed_where_rows_cost_what_they_give(streams: int) -> None:
    machine = Machine(speculator(), fixed_s=0.001, row_s=0.002)
    run(machine, [copying(stream) for stream in range(streams)], 150)
    assert plain_s(machine, streams) / machine.seconds > 0.99
    assert machine.guesses < 0.05 * machine.tokens


def test_many_streams_gain_where_steps_are_dear() -> None:
    machine = Machine(speculator(), fixed_s=0.05, row_s=0.0005)
    run(machine, [copying(stream) for stream in range(16)], 150)
    assert plain_s(machine, 16) / machine.seconds > 1.8


def test_guesses_come_back_after_the_machine_was_busy() -> None:
    """What was learnt of steps with guesses while they were dear is not trusted for long: without
    guesses there is no step that could correct it."""
    machine = Machine(speculator(), fixed_s=0.02, row_s=0.001)
    period = [Random(3).randrange(1000) for _ in range(40)]
    made = text(0, period * 3), period * 1500
    run(machine, [made], 100)
    machine.fixed_s, machine.row_s = 0.0, 0.03  # a row costs what it gives

    def guesses_in(steps: int) -> int:
        before = machine.guesses
        for _ in range(steps):
            machine.step([made[0]], [made[1]])
        return machine.guesses - before

    guesses_in(600)
    assert guesses_in(50) == 0
    machine.fixed_s, machine.row_s = 0.02, 0.001
    guesses_in(1200)  # some ten seconds
    assert guesses_in(50) > 300


class Ticking:
    """A clock that shows a millisecond more each time it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        self.now += 0.001
        return self.now


def test_looking_in_vain_takes_a_bounded_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = TimedSpeculator(Method.SUFFIX, clock=Ticking())
    looks = 0

    def look(*given: object) -> list[tuple[int, ...]]:
        nonlocal looks
        looks += 1
        return [()]

    monkeypatch.setattr(found, "_choose", look)
    machine = Machine(found, fixed_s=0.02, row_s=0.001)
    run(machine, [fresh(0)], 200)
    assert 200 / (MOST_LEFT_OUT + 1) <= looks < 200 / MOST_LEFT_OUT + 20


def test_good_streams_are_served_before_bad_ones() -> None:
    machine = Machine(speculator(), fixed_s=0.02, row_s=0.002)
    good, bad = copying(0), fresh(1)
    run(machine, [good, bad], 120)
    given = [len(each.token_ids) - each.prompt_tokens for each, _ in (good, bad)]
    assert given[0] > 1.4 * given[1]


def test_a_request_says_who_guesses() -> None:
    tokens = list(range(50)) + list(range(30))
    room = DraftRoom(rows=1, context_tokens=80, most_tokens=64)

    def proposed(asked: Method | None, usual: Method = Method.SUFFIX) -> list[int]:
        found = speculator(usual)
        plan = StepPlan()
        plan.add(9, [0], 5, [], draw=GREEDY)
        found.stepped(plan, StepResult(tokens=[], logprobs=[], compute_s=0.01))
        return list(found.propose([text(1, tokens, answer=2, speculate=asked)], [9], room)[0])

    assert proposed(None)[:3] == [30, 31, 32]
    assert proposed(Method.AUTO)[:3] == [30, 31, 32]
    assert proposed(Method.NGRAM)[:3] == [30, 31, 32]
    assert proposed(Method.OFF) == []
    assert proposed(None, Method.OFF) == []
    assert proposed(Method.SUFFIX, Method.OFF)[:3] == [30, 31, 32]


def test_past_answers_are_found_by_the_same_key_alone() -> None:
    found = speculator()
    plan = StepPlan()
    plan.add(9, [0], 5, [], draw=GREEDY)
    found.stepped(plan, StepResult(tokens=[], logprobs=[], compute_s=0.01))
    found.ended(text(1, list(range(100, 160)), answer=50, salt="mine"))
    room = DraftRoom(rows=1, context_tokens=80, most_tokens=64)
    start = [7, 3, 120, 121, 122, 123, 124, 125, 126]
    mine = found.propose([text(2, start, answer=3, salt="mine")], [9], room)[0]
    other = found.propose([text(3, start, answer=3, salt="other")], [9], room)[0]
    assert list(mine)[:3] == [127, 128, 129]
    assert list(other) == []


def test_what_a_grammar_forces_comes_first() -> None:
    found = speculator()
    plan = StepPlan()
    plan.add(9, [0], 5, [], draw=GREEDY)
    found.stepped(plan, StepResult(tokens=[], logprobs=[], compute_s=0.01))
    each = text(1, [1, 2, 3, 4, 1, 2], answer=1)
    each.forced = (50, 51, 52)
    room = DraftRoom(rows=1, context_tokens=6, most_tokens=64)
    assert list(found.propose([each], [9], room)[0]) == [50, 51, 52]


def test_nothing_is_kept_of_sequences_that_ended() -> None:
    machine = Machine(speculator(Method.NGRAM), fixed_s=0.02, row_s=0.001)
    made = [copying(stream) for stream in range(4)]
    run(machine, made, 50)
    for each, _ in made:
        machine.speculator.ended(each)
        machine.speculator.ended(each)  # as for one that never was
    assert not machine.speculator._guessing


def test_before_any_step_was_seen_nothing_is_guessed() -> None:
    room = DraftRoom(rows=1, context_tokens=80, most_tokens=64)
    repeated = text(1, [1, 2, 3] * 20, answer=2)
    assert list(speculator().propose([repeated], [9], room)) == [()]


def test_with_two_steps_in_flight_it_waits_while_guesses_pay() -> None:
    found = speculator()
    machine = Machine(found, fixed_s=0.02, row_s=0.004)
    assert found.waits()  # to have a look
    run(machine, [copying(0)], 60)
    assert found.waits()
    for stream in range(3):
        run(machine, [fresh(stream)], 80)
    assert not found.waits()
