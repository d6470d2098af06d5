"""What a grammar foresees is what it says when the tokens really come; looking ahead changes
nothing, and neither do the guesses that it is for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.config import SchedulerConfig
from headrace.core.constraint import GrammarKind, GrammarSpec
from headrace.core.request import GenerateRequest, SampledToken, SamplingParams
from headrace.core.speculation import Draftable, DraftRoom
from headrace.core.step import RunnerLimits, StepPlan, StepResult
from headrace.engine.loop import Engine
from headrace.grammar import GrammarCompiler, Matched
from headrace.simulate.cost import linear_cost
from headrace.simulate.runner import SimulatedRunner
from headrace.tokenizer.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "likes": {"enum": ["nothing at all", "everything"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "likes", "age"],
    "additionalProperties": False,
}
SPECS = [
    GrammarSpec(kind=GrammarKind.REGEX, source="(true|false) (and|or) not (true|false)"),
    GrammarSpec(kind=GrammarKind.CHOICE, source='["a long answer", "a longer answer", "no"]'),
    GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(PERSON)),
]


def allowed_ids(mask: bytes) -> list[int]:
    return [t for t in range(8 * len(mask)) if mask[t >> 3] >> (t & 7) & 1]


def expected(at: Matched, token_ids: Sequence[int]) -> tuple[list[int], list[bytes]]:
    """A step at a time."""
    walk, found, masks = at.fork(), [], []
    for token_id in token_ids:
        if walk.is_stopped or token_id not in allowed_ids(walk.mask()):
            break
        walk.accept(token_id)
        if walk.is_stopped:
            break
        found.append(token_id)
        masks.append(walk.mask())
    return found, masks


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind.value)
def test_a_grammar_foresees_what_will_be_so(spec: GrammarSpec, compiler: GrammarCompiler) -> None:
    dice = random.Random(3)
    walk = compiler.compile(spec)
    undisturbed = walk.fork()
    for _ in range(40):
        assert walk.is_stopped == undisturbed.is_stopped
        if walk.is_stopped:
            break
        walk.foresee(forced=dice.choice([0, 1, 16]))
        walk.foreseen()
        before = walk.mask()
        assert before == undisturbed.mask()
        # A path of allowed tokens, in half of the cases with one that is not.
        ahead, path = walk.fork(), []
        for _ in range(dice.randint(0, 5)):
            if ahead.is_stopped:
                break
            path.append(dice.choice(allowed_ids(ahead.mask())))
            ahead.accept(path[-1])
        if path and dice.random() < 0.5:
            path[dice.randrange(len(path))] = dice.randrange(300)
        walk.foresee(*path)
        seen = walk.foreseen()
        assert seen is not None
        assert (list(seen.token_ids), list(seen.masks)) == expected(walk, path)
        assert walk.mask() == before
        chosen = dice.choice(allowed_ids(before))
        walk.accept(chosen)
        undisturbed.accept(chosen)
        assert walk.foreseen() is None, "it was about another place"


def test_forced_tokens_are_foreseen(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text = "nothing but this will ever come out of here"
    walk = compiler.compile(GrammarSpec(kind=GrammarKind.REGEX, source=f"(a|b) {text}"))
    assert walk.foreseen() is None
    first = next(t for t in allowed_ids(walk.mask()) if tokenizer.token_bytes(t) == b"a")
    walk.foresee(first, forced=4)
    seen = walk.foreseen()
    assert seen is not None
    assert seen.token_ids[0] == first
    assert len(seen.token_ids) == len(seen.masks) == 5
    assert (list(seen.token_ids), list(seen.masks)) == expected(walk, seen.token_ids)
    said = b"".join(map(tokenizer.token_bytes, seen.token_ids))
    assert f"a {text}".encode().startswith(said)
    walk.foresee(forced=16)  # there is a choice: nothing is forced
    assert walk.foreseen() is not None
    assert not walk.foreseen().token_ids  # type: ignore[union-attr]
    walk.accept(*seen.token_ids)
    walk.foresee(forced=100)
    rest = walk.foreseen()
    assert rest is not None
    whole = said + b"".join(map(tokenizer.token_bytes, rest.token_ids))
    assert f"a {text}".encode().startswith(whole)
    assert len(whole) > len(text) / 2


def test_a_grammar_that_is_too_complex_ahead_can_still_be_followed(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    walk = compiler.compile(
        GrammarSpec(kind=GrammarKind.LARK, source='start: "b" | s\ns: s s s | s s | "a"')
    )
    ids = {t: tokenizer.token_bytes(t) for t in allowed_ids(walk.mask())}
    a = next(t for t, data in ids.items() if data == b"a")
    b = next(t for t, data in ids.items() if data == b"b")
    walk.foresee(*[a] * 400)  # minutes of work, if nothing ended it
    seen = walk.foreseen()
    assert seen is not None
    assert len(seen.token_ids) == len(seen.masks) < 400
    walk.accept(b)
    assert walk.is_stopped


# -- in the engine ---------------------------------------------------------------------------------


class Sure:
    """Proposes what grammars force, and with `also` a guess of its own after it."""

    def __init__(self, also: int | None) -> None:
        self.also = also
        self.proposed = self.accepted = self.forced = 0

    def waits(self) -> bool:
        return True

    def propose(
        self, sequences: Sequence[Draftable], most: Sequence[int], room: DraftRoom
    ) -> list[list[int]]:
        self.forced += sum(len(sequence.forced) for sequence in sequences)
        also = [] if self.also is None else [self.also] * 3
        return [[*sequence.forced, *also] for sequence in sequences]

    def taken(self, sequence: Draftable, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted

    def stepped(self, plan: StepPlan, result: StepResult) -> None:
        pass

    def ended(self, sequence: Draftable) -> None:
        pass


def run(
    tokenizer: Tokenizer, compiler: GrammarCompiler, spec: GrammarSpec, sure: Sure | None
) -> tuple[list[SampledToken], int]:
    """All tokens in order of request, and the number of steps."""
    clock = VirtualClock()
    limits = RunnerLimits(
        max_batch_tokens=64, max_sequences=8, total_blocks=400, block_tokens=4,
        context_tokens=200, draws_drafts=True,
    )  # fmt: skip
    runner = SimulatedRunner(
        limits, cost=linear_cost(), clock=clock, vocab_size=tokenizer.vocab_size, strict=True
    )
    config = SchedulerConfig(debug_invariants=True)
    engine = Engine(runner, tokenizer.eos_ids, config, clock, sure)
    started = compiler.compile(spec)
    for number in range(4):
        params: dict[str, Any] = {"temperature": 0.5 * (number % 3), "seed": number, "n": 2}
        asked = GenerateRequest(
            request_id=str(number),
            prompt_token_ids=[3, 4, number],
            params=SamplingParams(max_tokens=100, logprobs=1, **params),
            grammar=spec,
        )
        engine.add(asked, started.fork())
    found: list[SampledToken] = []
    while engine.has_work:
        found += engine.step()
    assert all(token.error is None for token in found)
    return sorted(found, key=lambda token: (token.request_id, token.index)), engine.stats.steps


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind.value)
def test_guesses_under_a_grammar_change_nothing(
    spec: GrammarSpec, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    plain, steps = run(tokenizer, compiler, spec, None)
    for also in (None, 11, 40):
        sure = Sure(also)
        found, fewer = run(tokenizer, compiler, spec, sure)
        assert found == plain
        assert sure.forced > 0
        assert sure.accepted > 0
        assert fewer < steps
