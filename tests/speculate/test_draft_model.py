"""A draft model over the simulated runner, which draws by a hash of all tokens before: a token that
was computed at a wrong place, or not computed again after a wrong guess, changes what is drawn."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.speculate.texts import Text, text

from headrace.core.clock import VirtualClock
from headrace.core.step import DrawParams, RowExtra, RunnerLimits
from headrace.simulate.cost import linear_cost
from headrace.simulate.distribution import ROOT, Distribution, Vocabulary, extend
from headrace.simulate.runner import SimulatedRunner
from headrace.speculate.draft_model import CATCH_UP_TOKENS, DraftModel

VOCAB = 100
GREEDY = DrawParams(temperature=0.0)


def drawn_after(tokens: list[int]) -> int:
    """What the simulated model draws after these tokens."""
    prefix = ROOT
    for token in tokens:
        prefix = extend(prefix, token)
    found = Distribution(prefix, Vocabulary(VOCAB)).draw(GREEDY, 0.0, RowExtra())
    assert found is not None
    return found


def continued(tokens: list[int], count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        found.append(drawn_after(tokens + found))
    return found


def draft_model(total_blocks: int = 200, max_sequences: int = 8) -> DraftModel:
    limits = RunnerLimits(
        max_batch_tokens=256,
        max_sequences=max_sequences,
        total_blocks=total_blocks,
        block_tokens=4,
        context_tokens=600,
    )
    clock = VirtualClock()
    cost = linear_cost(0.01, 0.001)
    runner = SimulatedRunner(limits, cost=cost, clock=clock, vocab_size=VOCAB, strict=True)
    return DraftModel(runner, VOCAB)


def ready(model: DraftModel, texts: list[Text]) -> None:
    for _ in range(20):
        model.prepare(texts)
    assert all(model.is_ready(each) for each in texts)


def test_a_draft_is_what_the_model_would_write() -> None:
    model, each = draft_model(), text(1, [5, 6, 7])
    assert model.draft([each], [4]) == [[]]  # nothing of it is computed yet
    ready(model, [each])
    assert model.draft([each], [4]) == [continued([5, 6, 7], 4)]
    assert model.draft_s(1, 3) > 0


def test_a_long_prompt_is_computed_in_parts() -> None:
    model = draft_model()
    each = text(1, [at % VOCAB for at in range(2 * CATCH_UP_TOKENS + 50)])
    parts = 0
    while not model.is_ready(each):
        model.prepare([each])
        parts += 1
    assert parts == 2
    assert model.draft([each], [3]) == [continued(each.token_ids, 3)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=6),
)
def test_wrong_guesses_are_computed_over(
    prompts: list[list[int]], rounds: list[tuple[int, int]]
) -> None:
    model = draft_model()
    texts = [text(at, tokens) for at, tokens in enumerate(prompts)]
    ready(model, texts)
    for count, accepted in rounds:
        counts = [max(0, count - at) for at in range(len(texts))]
        drafts = model.draft(texts, counts)
        for each, draft, wanted in zip(texts, drafts, counts, strict=True):
            assert draft == continued(each.token_ids, wanted)
            # Some of them are right, then the model itself writes something else.
            each.token_ids += draft[:accepted]
            each.token_ids.append((drawn_after(each.token_ids) + 1) % VOCAB)
    for each in texts:
        model.forget(each)
    assert model.held_blocks == 0


def test_without_room_there_is_no_draft_and_nothing_fails() -> None:
    model = draft_model(total_blocks=2, max_sequences=2)
    texts = [text(at, [at + 1] * 6) for at in range(4)]
    for _ in range(5):
        model.prepare(texts)
    drafts = model.draft(texts, [3] * 4)
    assert sum(map(bool, drafts)) <= 1
    for each, draft in zip(texts, drafts, strict=True):
        assert draft == continued(each.token_ids, len(draft))
        model.forget(each)
    assert model.held_blocks == 0


def test_tokens_that_the_draft_model_does_not_have_get_no_draft() -> None:
    model, each = draft_model(), text(1, [5, 6, VOCAB + 3, 7])
    for _ in range(3):
        model.prepare([each])
    assert model.draft([each], [3]) == [[]]
