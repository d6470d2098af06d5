"""The closed form against the counted step, for every public model; and the counted step against
the plain decoder, parameters, weight bytes, and sums taken one by one."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.closed_form import ClosedForm, closed_form
from headrace.models.counting import Chunk, StepCount, count_step
from headrace.models.counting_ops import experts_used
from headrace.models.known import Known, all_known, find_known
from headrace.models.layers import ExpertsSpec, LatentSpec, Mixer
from headrace.models.matrices import layer_matrices
from headrace.models.mixing import entry_pairs, mixing
from headrace.models.precision import PRECISIONS, Precision, weight_bytes
from headrace.models.sizes import size_spec
from headrace.models.spec import ModelSpec

BF16 = PRECISIONS["bf16"]
# One of each set of numbers.
MODELS = sorted({known.config_id: known for known in all_known()}.values(), key=lambda k: k.id)

chunks = st.builds(
    Chunk,
    tokens=st.one_of(st.just(1), st.integers(1, 5000)),
    start=st.one_of(st.just(0), st.integers(0, 200_000)),
    wanted=st.integers(0, 3),
)


def assert_equal(found: StepCount, expected: StepCount) -> None:
    assert (found.matmul_flops, found.attention_flops) == (
        expected.matmul_flops, expected.attention_flops,
    )  # fmt: skip
    assert astuple(found) == pytest.approx(astuple(expected), rel=1e-12)


@settings(max_examples=250, deadline=None)
@given(
    known=st.sampled_from(MODELS),
    precision=st.sampled_from(list(PRECISIONS.values())),
    step=st.lists(chunks, min_size=1, max_size=12),
    kv_value_bytes=st.sampled_from([1.0, 2.0]),
    activation_value_bytes=st.sampled_from([2.0, 4.0]),
)
def test_equal_to_the_counted_step(
    known: Known,
    precision: Precision,
    step: list[Chunk],
    kv_value_bytes: float,
    activation_value_bytes: float,
) -> None:
    weights = size_spec(known.spec, precision)
    sizes = {
        "kv_value_bytes": kv_value_bytes,
        "activation_value_bytes": activation_value_bytes,
    }
    form = closed_form(known.spec, weights, **sizes)
    load = form.load()
    for chunk in step:
        load.add(chunk.tokens, chunk.start, chunk.wanted)
    assert_equal(form(load), count_step(known.spec, weights, step, **sizes))


@settings(max_examples=50, deadline=None)
@given(kept=st.lists(chunks, max_size=5), gone=st.lists(chunks, max_size=5))
def test_chunks_come_and_go(kept: list[Chunk], gone: list[Chunk]) -> None:
    spec = find_known("qwen3.5-35b-a3b").spec
    form = closed_form(spec, size_spec(spec, BF16))
    load, plain = form.load(), form.load()
    for chunk in gone + kept:
        load.add(chunk.tokens, chunk.start, chunk.wanted)
    for chunk in gone:
        load.remove(chunk.tokens, chunk.start, chunk.wanted)
    for chunk in kept:
        plain.add(chunk.tokens, chunk.start, chunk.wanted)
    assert_equal(form(load), form(plain))
    assert load.sequences == len(kept)


@settings(max_examples=150, deadline=None)
@given(
    known=st.sampled_from(MODELS),
    starts=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 200_000)), max_size=9),
)
def test_many_decodes_at_once(known: Known, starts: list[int]) -> None:
    form = _form(known.config_id)
    at_once, one_by_one = form.load(), form.load()
    at_once.add(17, 3, 1)
    at_once.add_decodes(starts)
    one_by_one.add(17, 3, 1)
    for start in starts:
        one_by_one.add(1, start)
    assert astuple(at_once)[2:] == pytest.approx(astuple(one_by_one)[2:], rel=1e-12)
    assert at_once.flops == one_by_one.flops


@cache
def _form(config_id: str) -> ClosedForm:
    spec = next(known.spec for known in MODELS if known.config_id == config_id)
    return closed_form(spec, size_spec(spec, BF16))


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "qwen2.5-0.5b", "qwen3-8b", "gemma-2-9b", "gemma-3-4b", "olmo-2-7b"]
)
def test_plain_layers_count_the_same_on_both_walks(name: str) -> None:
    """The decoder that backends run, and the walk for layers that are only counted."""
    spec = find_known(name).spec
    stacked = replace(spec, attention=(), stack=spec.layer_specs)
    step = [Chunk(tokens=700, start=5000, wanted=1), Chunk(tokens=1, start=30), Chunk(tokens=9)]
    expected = count_step(spec, size_spec(spec, BF16), step)
    assert_equal(count_step(stacked, size_spec(stacked, BF16), step), expected)


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.id)
def test_products_follow_from_active_parameters(known: Known) -> None:
    """A token is multiplied with each active matrix once: two operations for each value."""
    spec = known.spec
    found = count_step(spec, size_spec(spec, BF16), [Chunk(tokens=3, wanted=0)])
    values = 0
    for layer in spec.layer_specs:
        for matrix in layer_matrices(layer, spec.hidden_size):
            experts = layer.experts.active if layer.experts and matrix.copies > 1 else 1
            values += experts * matrix.rows * matrix.columns
    assert found.matmul_flops == 3 * 2 * values
    rest = spec.active_parameters - values - spec.vocab_size * spec.hidden_size
    assert rest - (0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size) >= 0
    assert rest < 0.35 * spec.active_parameters


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.id)
@pytest.mark.parametrize("name", ["int4", "q4_k_m"])
def test_a_large_step_reads_every_weight(known: Known, name: str) -> None:
    spec, precision = known.spec, PRECISIONS[name]
    tokens = 20_000
    weights = size_spec(spec, precision)
    found = count_step(spec, weights, [Chunk(tokens=tokens)])
    total = weight_bytes(spec, precision).total
    assert weights.embed is not None
    rows = tokens * weights.embed.bytes / weights.embed.rows
    table = 0 if spec.tied_embeddings else weights.embed.bytes
    assert found.weight_bytes == pytest.approx(total - table + rows, rel=1e-9)


def test_mlp_share_of_the_products() -> None:
    """What the seeds call 71%: it depends on the model."""
    for name, share in (("llama-2-7b", 65.5), ("llama-3-8b", 75.1), ("llama-3-70b", 81.1)):
        parts = weight_bytes(find_known(name).spec, BF16)
        multiplied = parts.attention + parts.mlp + parts.output
        assert round(100 * parts.mlp / multiplied, 1) == share


@given(count=st.integers(1, 6), tokens=st.integers(0, 3), data=st.data())
def test_experts_that_random_tokens_use(count: int, tokens: int, data: st.DataObject) -> None:
    """Over all ways in which so many tokens can choose."""
    active = data.draw(st.integers(1, count))
    choices = list(combinations(range(count), active))
    ways = list(product(choices, repeat=tokens))
    mean = sum(len({e for chosen in way for e in chosen}) for way in ways) / len(ways)
    experts = ExpertsSpec(count=count, active=active, width=1)
    assert experts_used(experts, tokens) == pytest.approx(mean)


@given(
    tokens=st.integers(1, 60),
    start=st.integers(0, 90),
    ratio=st.integers(1, 9),
    top=st.one_of(st.none(), st.integers(1, 12)),
)
def test_entries_that_are_seen(tokens: int, start: int, ratio: int, top: int | None) -> None:
    seen = [(position + 1) // ratio for position in range(start, start + tokens)]
    limited = [count if top is None else min(count, top) for count in seen]
    assert entry_pairs(tokens, start, ratio, top) == sum(limited)


def _mixer(name: str, layer: int) -> Mixer:
    mixer = find_known(name).spec.stack[layer].mixer
    assert mixer is not None
    return mixer


def test_latent_attention_is_done_the_cheaper_way() -> None:
    mixer = _mixer("deepseek-v3", 0)
    assert isinstance(mixer, LatentSpec)
    # One token after 999: all heads score the latent of 512 and the key of 64, then sum latents.
    assert mixing(mixer, 1, 999, 2).flops == 2 * 1000 * 128 * (512 + 64 + 512)
    # A prompt: keys of 192 and values of 128.
    assert mixing(mixer, 1000, 0, 2).flops == 2 * 500_500 * 128 * (192 + 128)
    assert mixing(mixer, 1, 999, 2).read_bytes == 1000 * 576 * 2
    assert mixing(mixer, 10, 999, 2).written_bytes == 10 * 576 * 2


def test_an_index_limits_what_is_read() -> None:
    mixer = _mixer("deepseek-v3.2", 0)
    found = mixing(mixer, 1, 99_999, 2)
    assert found.read_bytes == 2048 * 576 * 2 + 100_000 * 132
    assert found.flops == 2 * 2048 * 128 * 1088 + 2 * 100_000 * 64 * 128


def test_recurrent_layers_cost_the_same_at_any_length() -> None:
    spec: ModelSpec = find_known("nemotron-h-56b").spec
    weights = size_spec(spec, BF16)
    mamba = next(layer.mixer for layer in spec.stack if layer.mixer is not None)
    assert mixing(mamba, 1, 10, 2) == mixing(mamba, 1, 100_000, 2)
    early, late = (count_step(spec, weights, [Chunk(tokens=1, start=at)]) for at in (10, 100_000))
    assert early.state_bytes == late.state_bytes > 0
    assert late.kv_read_bytes > early.kv_read_bytes
