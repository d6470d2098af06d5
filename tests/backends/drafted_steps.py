"""A row with drafts against as many plain steps: the same tokens at every place, for every kind of
draw. Used by the tests of each runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from tests.plans import Draw, Row, plan_of

from headrace.core.step import Drafts, RowResult, Runner, StepPlan, TopLogprobs

PLACES = 6  # of a drafted row
MASK_BYTES = 64  # covers the vocabularies of tests


def mask_of(seed: int, vocab_size: int) -> bytes:
    """Allows about half of the tokens."""
    bits = np.random.default_rng(seed).integers(0, 2, 8 * MASK_BYTES)
    bits[vocab_size:] = 0
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


KINDS: dict[str, Draw] = {
    "greedy": Draw(temperature=0.0),
    "sampled": Draw(temperature=1.0),
    "top_p": Draw(temperature=0.8, top_p=0.8, min_p=0.01),
    "top_k": Draw(temperature=1.3, top_k=7),
    "typical": Draw(temperature=1.0, typical_p=0.7),
    "bias": Draw(temperature=0.9, bias={5: 2.0, 90: -3.0}),
    "allowed": Draw(temperature=0.9, allowed=list(range(0, 90, 3))),
    "penalties": Draw(
        temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "greedy penalties": Draw(temperature=0.0, frequency_penalty=1.5),
    "masks": Draw(temperature=1.0, mask=b""),  # one for each place
    "banned": Draw(temperature=0.0, banned=[0]),  # likewise
    "all": Draw(
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        bias={3: 1.0},
        mask=b"",
        banned=[0],
    ),
}


def draw_at(kind: str, tokens: list[int], prompt_tokens: int, place: int, vocab: int) -> Draw:
    """The draw after these tokens, by itself."""
    draw = replace(KINDS[kind], uniform=(0.137 + 0.311 * place) % 1.0)
    if draw.params.penalizes:
        draw = replace(draw, history=tokens, prompt_tokens=prompt_tokens)
    if draw.mask is not None:
        draw = replace(draw, mask=mask_of(place, vocab))
    if len(draw.banned):
        draw = replace(draw, banned=list(range(place % 3, vocab, 3)))
    return draw


@dataclass(frozen=True, kw_only=True)
class Drawn:
    token_id: int
    logprob: float
    top: TopLogprobs


def collected(runner: Runner, plan: StepPlan) -> list[list[Drawn]]:
    runner.submit(plan)
    result = runner.collect()
    found = []
    for row, (tokens, logprobs) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        extra = result.extras.get(row, RowResult())
        assert extra.error is None
        tops = extra.tops or [()] * len(tokens)
        columns = zip(tokens, logprobs, tops, strict=True)
        found.append([Drawn(token_id=t, logprob=p, top=top) for t, p, top in columns])
    return found


def both_ways(
    make: Callable[[], Runner], vocab: int, kinds: list[str], prompt_tokens: int = 19
) -> tuple[list[list[Drawn]], list[list[Drawn]]]:
    """Of a sequence for each kind: what plain steps draw at each place, and what one step with
    drafts draws. The steps are followed by one that begins at the second draft, as if that had been
    wrong, with another token in its place."""
    rng = np.random.default_rng(11)
    blocks = -(-(prompt_tokens + PLACES + 1) // 16)
    prompts = [rng.integers(0, vocab, prompt_tokens).tolist() for _ in kinds]
    drafts = [rng.integers(0, vocab, PLACES - 1).tolist() for _ in kinds]
    tables = [list(range(at * blocks, (at + 1) * blocks))[::-1] for at in range(len(kinds))]
    tops = [2 * (at % 2) for at in range(len(kinds))]

    def row(at: int, tokens: list[int], start: int, draw: Draw | None, drafted: int = 0) -> Row:
        row = Row(
            sequence_id=at,
            token_ids=tokens[start:],
            start=start,
            block_table=tables[at],
            draw=draw,
            top_logprobs=tops[at] if draw else 0,
        )
        if drafted:
            places = [
                draw_at(kinds[at], tokens[: len(tokens) - drafted + j], prompt_tokens, j, vocab)
                for j in range(1, drafted + 1)
            ]
            row.drafts = Drafts(
                uniforms=[each.uniform for each in places],
                banned=[each.banned for each in places] if draw and len(draw.banned) else (),
                masks=[each.mask for each in places] if draw and draw.mask is not None else (),
            )
        return row

    def fill(runner: Runner) -> None:
        each = range(len(kinds))
        collected(runner, plan_of(*[row(at, prompts[at][:-1], 0, None) for at in each]))

    def draw(at: int, tokens: list[int], place: int) -> Draw:
        return draw_at(kinds[at], tokens, prompt_tokens, place, vocab)

    def after_a_wrong_one(runner: Runner) -> list[list[Drawn]]:
        rows = []
        for at in range(len(kinds)):
            tokens = [*prompts[at], drafts[at][0], (drafts[at][1] + 1) % vocab]
            rows.append(row(at, tokens, len(tokens) - 1, draw(at, tokens, 2)))
        return collected(runner, plan_of(*rows))

    plain: list[list[Drawn]] = [[] for _ in kinds]
    runner = make()
    fill(runner)
    for place in range(PLACES):
        rows = []
        for at in range(len(kinds)):
            tokens = prompts[at] + drafts[at][:place]
            rows.append(row(at, tokens, len(tokens) - 1, draw(at, tokens, place)))
        for at, found in enumerate(collected(runner, plan_of(*rows))):
            plain[at] += found
    for at, found in enumerate(after_a_wrong_one(runner)):
        plain[at] += found
    runner.close()

    runner = make()
    fill(runner)
    rows = []
    for at in range(len(kinds)):
        tokens, known = prompts[at] + drafts[at], prompts[at]
        rows.append(row(at, tokens, prompt_tokens - 1, draw(at, known, 0), PLACES - 1))
    drafted = collected(runner, plan_of(*rows))
    for at, found in enumerate(after_a_wrong_one(runner)):
        drafted[at] += found
    runner.close()
    return plain, drafted
