"""Native sampling and scoring against the reference's, draw for draw, on every kernel path."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.backends.random_models import run_draws
from tests.plans import Draw, Found, Row, plan_of, reference_adjust, reference_draw, rows_of

from headrace.backends.cpu import _native
from headrace.backends.cpu.ops import emit
from headrace.backends.reference.sampling import log_probability, top_log_probabilities
from headrace.backends.shared.recorder import RecordingOps
from headrace.core.errors import HeadraceError

Floats = NDArray[np.float32]
WIDTH = 1500
PATHS = _native.paths()


def native(logits: Floats, entries: list[Row], path: str | None = None) -> list[Found]:
    """Rows of logits for the entries' tokens, one after the other."""
    rows, width = logits.shape
    program = _native.Program(_native.Pool(2), None, rows, 3, 16, path)
    ops = RecordingOps()
    value = ops.input(width)
    selected = ops.select(value)
    slots = emit(program, ops.instructions, selected)
    program.finish(slots[selected])
    program.slot_view(slots[value], rows)[:] = logits
    return rows_of(run_draws(program, plan_of(*entries)))


def drawing(how: Draw, top_logprobs: int = 0) -> Row:
    return Row(
        sequence_id=0, token_ids=[0], start=0, block_table=[0], draw=how, top_logprobs=top_logprobs
    )


def draw_all(logits: Floats, draws: list[Draw], path: str | None = None) -> list[Found]:
    return native(logits, [drawing(how) for how in draws], path)


def tokens_of(results: list[Found]) -> list[int | None]:
    return [result.token_id for result in results]


token_ids = st.integers(0, WIDTH - 1)
numbers = {
    "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5]),
    "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    "top_k": st.sampled_from([0, 1, 2, 40, 900, WIDTH, 5000, 2**40]),
    "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    "typical_p": st.sampled_from([1.0, 0.95, 0.4, 0.05]),
    "uniform": st.floats(0, 1, exclude_max=True),
}
plain_draws = st.builds(Draw, **numbers)


def packed(ids: frozenset[int], size_bytes: int) -> bytes:
    """A mask of so many bytes, spelled from its definition."""
    mask = bytearray(size_bytes)
    for token in ids:
        if token >> 3 < size_bytes:
            mask[token >> 3] |= 1 << (token & 7)
    return bytes(mask)


ALL = frozenset(range(WIDTH + 99))
# Sparse and dense, whole and cut off, ending anywhere in a word of 64 tokens, and too long.
masks = st.builds(
    packed,
    st.frozensets(token_ids, max_size=60)
    | st.frozensets(token_ids, max_size=60).map(lambda few: ALL - few),
    st.sampled_from([0, 1, 8, 100, 183, 187, 188, 192, 200]),
)
full_draws = st.builds(
    Draw,
    **numbers,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 100.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1]),
    history=st.lists(token_ids | st.integers(0, 9), max_size=30),  # with repeats
    prompt_tokens=st.integers(0, 31),
    bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=8),
    allowed=st.none() | st.frozensets(token_ids, max_size=200),
    banned=st.frozensets(token_ids, max_size=30),
    mask=st.none() | masks,
)


def logits_of(seed: int, spread: float, steps: int) -> Floats:
    """Logits; with steps, only on a grid, so that many are equal."""
    logits = np.random.default_rng(seed).standard_normal((1, WIDTH)) * spread
    if steps:
        logits = np.round(logits * steps / spread) * spread / steps
    return logits.astype(np.float32)


def edges(logits: Floats, how: Draw) -> set[int]:
    """What the reference draws with every threshold moved by as much as float32 rounds."""
    by = (-3e-6, 3e-6)
    return {
        reference_draw(
            logits,
            replace(
                how,
                uniform=min(max(0.0, how.uniform + u), 1 - 1e-16),
                top_p=how.top_p + p * (how.top_p < 1),
                min_p=max(0.0, how.min_p + m),
                typical_p=how.typical_p + t * (how.typical_p < 1),
            ),
        )[0]
        for u, p, m, t in product((-2e-5, 2e-5), by, by, by)
    }


def check(logits: Floats, how: Draw, path: str) -> None:
    (found,) = draw_all(logits, [how], path)
    if np.isneginf(reference_adjust(logits[0], how)).all():
        with pytest.raises(HeadraceError) as caught:
            reference_draw(logits[0], how)
        assert (found.token_id, found.error) == (None, caught.value.cause)
        return
    token, logprob = reference_draw(logits[0], how)
    assert found.error is None
    assert found.token_id is not None
    # Weights are float32 there and float64 here: only a draw on the very edge may differ.
    if found.token_id == token:
        assert found.logprob == pytest.approx(logprob, abs=2e-5)
    else:
        assert how.temperature > 0
        assert found.token_id in edges(logits[0], how)


row_kinds = st.tuples(
    st.integers(0, 2**32), st.sampled_from([0.01, 1.0, 6.0]), st.sampled_from([0, 0, 1, 4])
)


@settings(deadline=None, max_examples=300)
@given(how=plain_draws, kind=row_kinds, path=st.sampled_from(PATHS))
def test_the_same_token_as_the_reference(
    how: Draw, kind: tuple[int, float, int], path: str
) -> None:
    check(logits_of(*kind), how, path)


@settings(deadline=None, max_examples=400)
@given(how=full_draws, kind=row_kinds, path=st.sampled_from(PATHS))
def test_the_same_token_with_everything_at_once(
    how: Draw, kind: tuple[int, float, int], path: str
) -> None:
    check(logits_of(*kind), how, path)


@settings(deadline=None, max_examples=200)
@given(how=full_draws, kind=row_kinds)
def test_adjusted_logits_are_the_same_to_the_bit(how: Draw, kind: tuple[int, float, int]) -> None:
    """Greedy draws that ban what came before walk down the whole order."""
    logits = logits_of(*kind)
    banned = set(how.banned)
    greedy = replace(how, temperature=0.0)
    for _ in range(12):
        (found,) = draw_all(logits, [replace(greedy, banned=banned)])
        left = reference_adjust(logits[0], replace(greedy, banned=banned))
        if np.isneginf(left).all():
            assert found.token_id is None
            return
        assert found.token_id == int(np.argmax(left))
        banned = {*banned, found.token_id}


@pytest.mark.parametrize(
    "only",
    [{}, {"top_k": 30}, {"top_k": 700}, {"top_p": 0.7}, {"top_p": 0.999}, {"min_p": 1e-4},
     {"min_p": 1e-7}, {"typical_p": 0.3}, {"typical_p": 0.999}, {"top_k": 300, "typical_p": 0.9}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_one_filter_at_a_time_far_into_the_tail(
    only: dict[str, float], temperature: float, path: str
) -> None:
    """Uniforms up to the very end: however likely the others, no token that is left is missed."""
    row = logits_of(11, 6.0, 0)
    ends = [1 - 10.0**-exponent for exponent in range(1, 7)]
    hows = [
        Draw(temperature=temperature, uniform=u, **only)  # type: ignore[arg-type]
        for u in [*np.linspace(0, 0.99, 30).tolist(), *ends]
    ]
    found = draw_all(np.repeat(row, len(hows), axis=0), hows, path)
    for how, token in zip(hows, tokens_of(found), strict=True):
        first, last = (  # of those that float32 weights may lead to
            reference_draw(row[0], replace(how, uniform=min(max(0, u), 1 - 1e-16)))[0]
            for u in (how.uniform - 2e-7, how.uniform + 2e-7)
        )
        assert token is not None
        assert first <= token <= last


def test_rows_of_one_step_do_not_touch_each_other() -> None:
    """Adjusted, plain, scored and failing rows side by side are what they are alone."""
    logits = np.concatenate([logits_of(seed, 3.0, 0) for seed in range(10)])
    penal = Draw(
        temperature=0.9, repetition_penalty=1.5, history=array("i", [3, 3, 9, 9]), prompt_tokens=2,
        frequency_penalty=0.5, uniform=0.6,
    )  # fmt: skip
    hows = [
        penal,
        Draw(temperature=0.8, top_p=0.9, uniform=0.37),
        Draw(temperature=0.0, allowed=[5, 6], banned=[6]),
        Draw(temperature=0.7, allowed=[5], banned=[5]),
        Draw(temperature=1.0, typical_p=0.6, uniform=0.2, mask=packed(frozenset({3, 900}), 150)),
        Draw(temperature=1.0, uniform=0.2),
        replace(penal, history=[4, 5], bias={7: 30.0}),
    ]
    entries = [drawing(how, top_logprobs=number) for number, how in enumerate(hows)]
    entries.insert(
        2,
        Row(
            sequence_id=0, token_ids=[0] * 3, start=0, block_table=[0], targets=[1, 2, 3],
            draw=penal, top_logprobs=4,
        ),
    )  # fmt: skip
    together = native(logits, entries)
    at = 0
    for entry, found in zip(entries, together, strict=True):
        rows = logits[at : at + len(entry.token_ids)]
        at += len(entry.token_ids)
        assert native(rows, [entry]) == [found]
    assert together[3].token_id == 5
    assert [result.error is None for result in together] == [True] * 4 + [False] + [True] * 3
    assert together[5].token_id in (3, 900)


@pytest.mark.parametrize("path", PATHS)
def test_scores_and_draws_in_one_step(path: str) -> None:
    """More wanted rows than the head holds at a time, scored and drawn, on every path."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((8, 4099)) * 4).astype(np.float32)
    how = Draw(temperature=0.8, top_p=0.9, uniform=0.37)
    targets = [17, 4098, 0, 5]
    scored = Row(
        sequence_id=1, token_ids=[0] * 4, start=0, block_table=[0], targets=targets, top_logprobs=20
    )
    found = native(
        logits, [drawing(how), drawing(how), scored, drawing(how, 3), drawing(how)], path
    )
    for row, result in zip((0, 1, 6, 7), (*found[:2], *found[3:]), strict=True):
        token, logprob = reference_draw(logits[row], how)
        assert result.token_id == token
        assert result.logprob == pytest.approx(logprob, abs=2e-5)
    expected = [log_probability(logits[2 + i], target) for i, target in enumerate(targets)]
    assert found[2].target_logprobs == pytest.approx(expected, abs=2e-5)
    assert [len(top) for top in found[2].target_top] == [20] * 4
    tops = [*zip(range(2, 6), found[2].target_top, strict=True), (6, found[3].top)]
    for row, top in tops:
        wanted = top_log_probabilities(logits[row], len(top))
        assert [token for token, _ in top] == [token for token, _ in wanted]
        assert [p for _, p in top] == pytest.approx([p for _, p in wanted], abs=2e-5)
    assert (found[0].top, found[4].top, found[3].target_top) == ((), (), ())
    assert len(found[3].top) == 3


@settings(deadline=None, max_examples=100)
@given(
    count=st.sampled_from([1, 2, 7, 63, 64, 65, 300]),
    width=st.sampled_from([300, 301, 4097]),
    levels=st.sampled_from([1, 2, 50, 10**6]),
    seed=st.integers(0, 2**32),
    path=st.sampled_from(PATHS),
)
def test_the_likeliest_tokens_with_ties(
    count: int, width: int, levels: int, seed: int, path: str
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.integers(0, levels, (1, width)) * (8 / levels)).astype(np.float32)
    (found,) = native(logits, [drawing(Draw(temperature=0.0), count)], path)
    order = np.lexsort((np.arange(width), -logits[0]))[:count]
    assert [token for token, _ in found.top] == order.tolist()
    assert found.top[0] == (found.token_id, found.logprob)


@pytest.mark.parametrize("top_p", [0.1, 0.3, 0.7])
def test_a_whole_vocabulary_of_equals(top_p: float) -> None:
    """No order but that of ids, and exact sums: thresholds must not be rounded on their way."""
    logits = np.zeros((4, 10_000), np.float32)
    hows = [
        Draw(temperature=1.0, top_p=top_p, uniform=u, top_k=k)
        for u, k in ((0.0, 0), (1 - 2**-53, 0), (0.5, 0), (1 - 2**-53, 100))
    ]
    assert tokens_of(draw_all(logits, hows)) == [reference_draw(logits[0], h)[0] for h in hows]
    assert tokens_of(draw_all(logits, hows))[1] == round(top_p * 10_000) - 1


def test_ties_go_to_the_lower_id() -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[:, [7, 9]] = 5
    greedy, one, two = (
        Draw(temperature=0.0),
        Draw(temperature=1.0, top_k=1, uniform=0.99),
        Draw(temperature=1.0, top_k=2, uniform=0.99),
    )
    assert tokens_of(draw_all(logits, [greedy, one, two])) == [7, 7, 9]


def test_a_tiny_temperature_is_greedy() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((1, 1000)).astype(np.float32)
    for temperature in (1e-6, 1e-30, 1e-44, 1e-300):
        for typical_p in (1.0, 0.5):
            how = Draw(temperature=temperature, typical_p=typical_p, uniform=0.999)
            assert tokens_of(draw_all(logits, [how])) == [int(np.argmax(logits))]


@pytest.mark.parametrize("outlier", [-1e30, 1e4])
def test_outliers_do_not_upset_the_order(outlier: float) -> None:
    """A huge temperature keeps all, and one token far away leaves the others close together."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((20, 5000)).astype(np.float32)
    logits[:, 77] = outlier
    hows = [
        Draw(temperature=1e5, uniform=u, top_k=k, typical_p=t)
        for u in np.linspace(0.01, 0.97, 5).tolist()
        for k, t in ((0, 1.0), (700, 1.0), (0, 0.7), (4999, 0.9))
    ]
    expected = [reference_draw(row, how)[0] for row, how in zip(logits, hows, strict=True)]
    found = tokens_of(draw_all(logits, hows))
    differing = [i for i in range(20) if found[i] != expected[i]]
    assert all(found[i] in edges(logits[i], hows[i]) for i in differing)
    assert len(differing) < 4


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_give_no_token(bad: float) -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[0, 3] = logits[2, 3] = bad
    logits[1, 4] = 1
    scored = Row(
        sequence_id=1, token_ids=[0] * 2, start=0, block_table=[0], targets=[1, 2], top_logprobs=2
    )
    for how in (
        Draw(temperature=0.0),
        Draw(temperature=1.0, top_k=5, uniform=0.5),
        Draw(temperature=1.0, banned=[3]),
    ):
        found = native(logits, [drawing(how, 5), drawing(Draw(temperature=0.0)), scored])
        assert tokens_of(found) == [None, 4, None]
        assert [result.error is None for result in found] == [False, True, False]
        assert found[0].error == "The model's logits are not finite numbers."


def test_a_penalty_that_overflows_fails_that_sequence_alone() -> None:
    logits = np.full((2, 100), 3, np.float32)
    wild = Draw(temperature=1.0, repetition_penalty=1e-40, history=[5])
    found = draw_all(logits, [wild, replace(wild, history=[])])
    assert "beyond the range of float32" in (found[0].error or "")
    assert found[1].token_id == 0
    with pytest.raises(HeadraceError, match=r"beyond the range of float32"):
        reference_draw(logits[0], wild)


@pytest.mark.parametrize(
    "how",
    [
        Draw(temperature=0.0, bias={100: 1.0}),
        Draw(temperature=0.0, allowed=[3, 100]),
        Draw(temperature=0.0, banned=[-1]),
        Draw(temperature=0.0, repetition_penalty=2.0, history=[100]),
        Draw(temperature=0.0, presence_penalty=1.0, history=[-1]),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(how: Draw) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        draw_all(np.zeros((1, 100), np.float32), [how])


def test_more_alternatives_than_tokens_are_refused() -> None:
    logits = np.zeros((1, 100), np.float32)
    (found,) = native(logits, [drawing(Draw(temperature=0.0), 100)])
    assert [token for token, _ in found.top] == list(range(100))
    with pytest.raises(ValueError, match="more top tokens"):
        native(logits, [drawing(Draw(temperature=0.0), 101)])


def test_offsets_that_do_not_fit_are_refused() -> None:
    none = np.zeros(2, np.int32), np.zeros(0, np.int32)
    nothing = (*none, np.zeros(0, np.float32))
    no_masks = none[0], np.zeros(0, np.uint8)
    ids = np.zeros(2, np.int32)
    row, limited, penalties = np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones((1, 3), "f4")
    for offsets in ([0, 3], [1, 2], [0, 1], [0, 2, 2], [0]):
        seen = np.array(offsets, np.int32), ids
        with pytest.raises(ValueError, match="bad offsets"):
            _native.Adjustments(
                row, penalties, limited, nothing, none, none, seen, nothing, no_masks
            )
        masks = np.array(offsets, np.int32), ids.astype(np.uint8)
        with pytest.raises(ValueError, match="bad offsets of masks"):
            _native.Adjustments(row, penalties, limited, nothing, none, none, none, nothing, masks)
