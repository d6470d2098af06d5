"""Grammars in the engine: who is asked when, and who pays for a failure. They are scripts here."""

from __future__ import annotations

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.constraint import Allowed, Foreseen, GrammarKind, GrammarSpec
from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.core.request import (
    BeamParams,
    FinishReason,
    GenerateRequest,
    SampledToken,
    SamplingParams,
)
from headrace.core.step import RunnerLimits
from headrace.engine.loop import Engine
from headrace.simulate.cost import linear_cost
from headrace.simulate.runner import SimulatedRunner

VOCAB, EOS = 64, 63
SPEC = GrammarSpec(kind=GrammarKind.REGEX, source="scripted")


class Script:
    """Allows the given tokens, place by place, then nothing more. A place may be an error."""

    def __init__(self, *places: set[int] | Exception, fork: Exception | None = None) -> None:
        self.places = places
        self.fork_error = fork
        self.taken: list[int] = []
        self.closed = False

    def mask(self) -> bytes:
        place = self.places[len(self.taken)]
        if isinstance(place, Exception):
            raise place
        return sum(1 << token for token in place).to_bytes(VOCAB // 8, "little")

    def accept(self, *token_ids: int) -> None:
        for token_id in token_ids:
            allowed = self.places[len(self.taken)]
            assert isinstance(allowed, set)
            if token_id not in allowed:
                raise HeadraceError(f"Token {token_id} may not come here.")
            self.taken.append(token_id)

    def foresee(self, *token_ids: int, forced: int = 0) -> None:
        raise AssertionError("nobody guesses here")

    def foreseen(self, wait_s: float = 0.0) -> Foreseen | None:
        raise AssertionError("nobody guesses here")

    @property
    def is_stopped(self) -> bool:
        return len(self.taken) == len(self.places)

    def allowed(self, wait_s: float = 0.0) -> Allowed | None:
        return Allowed(b"", is_stopped=True) if self.is_stopped else Allowed(self.mask())

    def fork(self) -> Script:
        if self.fork_error is not None:
            raise self.fork_error
        other = Script(*self.places)
        other.taken = list(self.taken)
        return other

    def close(self) -> None:
        self.closed = True


def make(total_blocks: int = 64, steps_in_flight: int = 2) -> Engine:
    limits = RunnerLimits(
        max_batch_tokens=16,
        max_sequences=8,
        total_blocks=total_blocks,
        block_tokens=4,
        context_tokens=64,
        steps_in_flight=steps_in_flight,
    )
    clock = VirtualClock()
    runner = SimulatedRunner(
        limits, cost=linear_cost(), clock=clock, vocab_size=VOCAB, eos_id=EOS, strict=True
    )
    config = SchedulerConfig(debug_invariants=True)
    return Engine(runner, frozenset({EOS}), config, clock)


def request(name: str = "r", *, grammar: bool = True, **params: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3, 4, 5],
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}),  # type: ignore[arg-type]
        grammar=SPEC if grammar else None,
    )


def run(engine: Engine) -> list[SampledToken]:
    tokens: list[SampledToken] = []
    for _ in range(300):
        if not engine.has_work:
            return tokens
        tokens += engine.step()
    raise AssertionError("still at work")


def test_what_may_not_follow_is_not_drawn_and_the_grammar_ends_the_sequence() -> None:
    engine = make()
    script = Script({7}, {8, 9}, {EOS}, {11})
    engine.add(request(ignore_eos=True, temperature=1.0, seed=3), script)
    found = run(engine)
    assert [t.token_id for t in found] in ([7, 8, EOS, 11], [7, 9, EOS, 11])
    assert [t.finish_reason for t in found] == [None] * 3 + [FinishReason.STOP]
    assert script.taken == [t.token_id for t in found]


def test_an_end_token_that_the_grammar_allows_ends_it_early() -> None:
    engine = make()
    engine.add(request(), Script({7}, {EOS}, {11}))
    assert [(t.token_id, t.finish_reason) for t in run(engine)] == [
        (7, None),
        (EOS, FinishReason.STOP),
    ]


def test_max_tokens_ends_it_unfinished() -> None:
    engine = make()
    engine.add(request(max_tokens=2), Script({7}, {8}, {9}))
    assert [(t.token_id, t.finish_reason) for t in run(engine)] == [
        (7, None),
        (8, FinishReason.LENGTH),
    ]


def test_every_continuation_walks_by_itself() -> None:
    engine = make()
    odd, even = set(range(1, 60, 2)), set(range(0, 60, 2))
    script = Script(odd, even, {9})
    engine.add(request(n=4, temperature=1.0, seed=1), script)
    by_index: dict[int, list[int]] = {}
    for token in run(engine):
        by_index.setdefault(token.index, []).append(token.token_id)
    assert sorted(by_index) == [0, 1, 2, 3]
    for tokens in by_index.values():
        assert tokens[0] in odd
        assert tokens[1] in even
        assert tokens[2:] == [9]
    assert len({tuple(tokens) for tokens in by_index.values()}) > 1


def test_preemption_does_not_feed_a_token_twice() -> None:
    places = [{place, place + 20} for place in range(1, 13)]
    engine = make(total_blocks=9)
    # The engine expects short answers, admits all, and runs out of blocks.
    engine.add(request("short", grammar=False, max_tokens=1, n=64))
    run(engine)
    scripts = [Script(*places) for _ in range(3)]
    for number, script in enumerate(scripts):
        engine.add(request(str(number), temperature=1.0, seed=number), script)
    found = run(engine)
    assert engine.stats.preemptions > 0
    for number, script in enumerate(scripts):
        mine = [t for t in found if t.request_id == str(number)]
        assert script.taken == [t.token_id for t in mine]
        assert [t % 20 for t in script.taken] == list(range(1, 13))
        assert mine[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidRequestError("Too deep."), FinishReason.REFUSED),
        (RuntimeError("Too deep."), FinishReason.ERROR),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_a_constraint_that_raises_ends_its_own_request_only(
    error: Exception, reason: FinishReason, n: int
) -> None:
    engine = make()
    engine.add(request("bad", n=n), Script({7}, {8}, error))
    engine.add(request("good"), Script({7}, {8}, {9}))
    engine.add(request("free", grammar=False))
    found = run(engine)
    bad = [t for t in found if t.request_id == "bad" and t.finish_reason is not None]
    assert [t.finish_reason for t in bad] == [reason] * n
    assert sorted(t.index for t in bad) == list(range(n))
    assert all("Too deep." in (t.error or "") for t in bad)
    assert [t.token_id for t in found if t.request_id == "good"] == [7, 8, 9]
    assert len([t for t in found if t.request_id == "free"]) == 12
    assert engine.blocks.used_blocks == 0


def test_a_constraint_that_cannot_start_or_fork_refuses_or_ends_the_request() -> None:
    engine = make()
    for script in (Script(RuntimeError("no")), Script({7}, fork=RuntimeError("no"))):
        with pytest.raises(InvalidRequestError, match="can't be started") as caught:
            engine.add(request(n=2), script)
        assert caught.value.param == "grammar"
    assert not engine.has_work

    class ForksOnce(Script):
        def fork(self) -> Script:
            return Script(*self.places, fork=RuntimeError("no more"))

    engine.add(request("late", n=3), ForksOnce({7}, {8}))
    engine.add(request("good"), Script({7}, {8}))
    found = run(engine)
    late = [t for t in found if t.request_id == "late"]
    assert [(t.index, t.finish_reason) for t in late] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
        (2, FinishReason.ERROR),
    ]
    assert [t.token_id for t in found if t.request_id == "good"] == [7, 8]


def test_nothing_left_between_grammar_and_sampling_parameters_fails_alone() -> None:
    engine = make()
    engine.add(request("allowed", allowed_token_ids=[8]), Script({7}, {8}))
    engine.add(request("early", min_tokens=2), Script({EOS}, {8}))
    engine.add(request("biased", logit_bias={7: -100.0}), Script({7}, {8}))
    engine.add(request("good"), Script({7}, {8}))
    found = run(engine)
    for name in ("allowed", "early"):
        (only,) = [t for t in found if t.request_id == name]
        assert only.finish_reason is FinishReason.REFUSED
        assert "no token is left" in (only.error or "")
    for name in ("biased", "good"):  # a bias makes unlikely, it does not forbid
        assert [t.token_id for t in found if t.request_id == name] == [7, 8]


def test_bad_words_combine_with_the_grammar() -> None:
    engine = make()
    asked = request(temperature=1.0, seed=5)
    asked.bad_token_ids = [[7, 8]]
    engine.add(asked, Script({7}, {8, 9}, {10}))
    assert [t.token_id for t in run(engine)] == [7, 9, 10]


def test_a_runner_that_ignores_the_mask_is_found_out() -> None:
    engine = make()
    script = Script({7}, {8})
    engine.add(request(), script)
    script.places = ({9}, {8})  # what was drawn is no longer allowed
    (only,) = run(engine)
    assert only.finish_reason is FinishReason.ERROR
    assert "may not come here" in (only.error or "")


def test_grammar_and_constraint_come_together_and_without_beams() -> None:
    engine = make()
    with pytest.raises(HeadraceError, match="a grammar without constraint"):
        engine.add(request())
    with pytest.raises(HeadraceError, match="only a constraint"):
        engine.add(request(grammar=False), Script({7}))
    beamed = request()
    beamed.beam = BeamParams(beam_width=2)
    with pytest.raises(InvalidRequestError, match="beam search and a grammar") as caught:
        engine.add(beamed, Script({7}))
    assert (caught.value.param, caught.value.status) == ("grammar", 400)
    assert not engine.has_work


def test_a_grammar_that_takes_long_holds_up_its_own_request_only() -> None:
    class Slow(Script):
        questions = 0

        def allowed(self, wait_s: float = 0.0) -> Allowed | None:
            self.questions += 1
            if self.taken and self.questions < 100:
                return None
            return super().allowed()

    engine = make()
    slow = Slow({7}, {8}, {9})
    engine.add(request("slow"), slow)
    engine.add(request("quick"), Script({7}, {8}, {9}))
    engine.add(request("free", grammar=False))
    found = run(engine)
    assert [t.token_id for t in found if t.request_id == "slow"] == [7, 8, 9]
    order = [t.request_id for t in found]
    assert max(order.index("slow"), 0) > len(order) - 4, "others waited for it"
    assert slow.closed


def test_a_request_can_be_ended_while_its_grammar_thinks() -> None:
    class Never(Script):
        def allowed(self, wait_s: float = 0.0) -> Allowed | None:
            return None if self.taken else super().allowed()

    engine = make()
    never = Never({7}, {8})
    engine.add(request("never"), never)
    for _ in range(10):
        assert engine.step() == []
    assert engine.has_work
    engine.cancel("never")
    run(engine)
    assert never.closed
    engine.idle_check()
