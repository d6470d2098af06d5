"""Recorded programs: joined, in place and in shared slots they compute what the decoder computes.

Programs are run by the reference's operations over memory that has one array for each slot, as
backends have it: a value that was overwritten too early is found by what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.plans import Row, plan_of

from headrace.backends.cpu import ops as cpu
from headrace.backends.cuda import ops as cuda
from headrace.backends.reference.ops import KvBlocks, ReferenceOps, ReferenceWeight
from headrace.backends.shared.recorder import (
    Add,
    Attend,
    Embed,
    Gate,
    HeadNorm,
    Input,
    Instruction,
    Multiply,
    Norm,
    RecordingOps,
    Rotate,
    Select,
    Softcap,
    Value,
    assign_slots,
    join,
    last_uses,
    record,
    slot_values,
    write_in_place,
)
from headrace.models.decoder import DecoderWeights, hidden_states, logits
from headrace.models.refs import WeightRef
from headrace.models.registry import CONFIG_FAMILIES, describe_config
from headrace.models.spec import Activation, AttentionSpec, ModelSpec, RopeSpec

Floats = NDArray[np.float32]
Fuse = Callable[[list[Instruction], Value], list[Instruction]]

FUSES: dict[str, Fuse] = {
    "as recorded": lambda instructions, result: instructions,
    "cpu": cpu.fuse,
    "cuda": cuda.fuse,
}
ROWS, WANTED = 5, (1, 4)
NOTHING: Floats = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Weight(ReferenceWeight):
    quantized: bool = False

    @property
    def outputs(self) -> int:
        return len(self.values)

    @property
    def columns(self) -> int:
        return int(self.values.shape[-1])


def reference(spec: ModelSpec) -> ReferenceOps:
    """Of a step with five tokens of one sequence, two of which want logits."""
    entry = Row(sequence_id=0, token_ids=[3, 1, 4, 1, 5], start=0, block_table=[0])
    ops = ReferenceOps(KvBlocks(spec, 1, 16), plan_of(entry))
    ops.wanted = WANTED
    return ops


def compute(ops: ReferenceOps, instruction: Instruction, x: Floats, *more: Floats) -> Floats:
    """What an instruction means, a backend's joined ones included; an Embed has no use for x."""
    match instruction:
        case Embed(table=table, scale=scale):
            return ops.embed(table, scale)
        case Norm(weight=weight, eps=eps):
            return ops.norm(x, weight, eps)
        case cpu.JoinedMultiply(matrix=matrix, before=before):
            product = ops.linear(x if before is None else compute(ops, before, x), matrix)
            return ops.add(more[0], product) if more else product
        case cuda.JoinedMultiply(matrix=matrix, norm=norm, activation=activation):
            product = ops.linear(x if norm is None else compute(ops, norm, x), matrix)
            product = product if activation is None else ops.gated(product, activation)
            return ops.add(more[0], product) if more else product
        case Multiply(matrix=matrix):
            return ops.linear(x, matrix)
        case cuda.AddNormed(weight=weight, eps=eps):
            return ops.add(x, ops.norm(more[0], weight, eps))
        case HeadNorm(q_weight=q_weight, k_weight=k_weight, attention=attention):
            return ops.head_norm(x, q_weight, k_weight, attention)
        case cuda.NormedRotate(attention=attention, head_norm=head_norm):
            return ops.rope(compute(ops, head_norm, x), attention)
        case Rotate(attention=attention):
            return ops.rope(x, attention)
        case cuda.RotatedAttend(attention=attention, head_norm=normed):
            qkv = x if normed is None else compute(ops, normed, x)
            out = ops.attention(ops.rope(qkv, attention), attention)
            x[:] = np.nan  # it says that it overwrites its input
            return out
        case Attend(attention=attention):
            return ops.attention(x, attention)
        case Gate(activation=gate):
            return ops.gated(x, gate)
        case Add():
            return ops.add(x, more[0])
        case Select():
            return ops.select(x)
        case Softcap(cap=cap):
            return ops.softcap(x, cap)
    raise AssertionError(type(instruction).__name__)


def run(
    ops: ReferenceOps, instructions: list[Instruction], result: Value, first: Floats | None = None
) -> Floats:
    """The result, each value in its slot; an Input is `first`."""
    slots = assign_slots(instructions, result)
    memory: dict[int, Floats] = {
        slot: np.full((len(WANTED) if value.head else ROWS, value.width), np.nan, np.float32)
        for slot, value in enumerate(slot_values(slots))
    }
    for instruction in instructions:
        if isinstance(instruction, Input):
            assert first is not None
            out = first
        else:
            inputs = [memory[slots[value]] for value in instruction.inputs]
            out = compute(ops, instruction, *(inputs or [NOTHING]))
        memory[slots[instruction.output]][:] = out
    return memory[slots[result]]


def check_slots(instructions: list[Instruction], result: Value) -> None:
    """A value is in its slot whenever it is read, and nothing writes over what it reads, except
    where it says so. Knows nothing of last uses."""
    slots = assign_slots(instructions, result)
    assert [slots[value] for value in slot_values(slots)] == list(range(len(set(slots.values()))))
    holds: dict[int, Value] = {}
    for instruction in instructions:
        output, target = instruction.output, instruction.in_place
        for value in instruction.inputs:
            assert holds[slots[value]] is value
        if target is None:
            assert slots[output] not in {slots[value] for value in instruction.inputs}
        else:
            assert instruction.inputs.count(target) == 1
            assert slots[output] == slots[target]
        before = holds.get(slots[output], output)
        assert before.kind == output.kind
        holds[slots[output]] = output
    assert holds[slots[result]] is result


# Every family's decoder.

CONFIG: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "sliding_window": 3,
}
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "phi3": {"head_dim": None},  # it has none, and takes hidden size / heads
    "gemma2": {
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3_text": {"query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh"},
}


def random_weights(refs: DecoderWeights[WeightRef], seed: int) -> DecoderWeights[Weight]:
    """Some quantized (to which a backend joins more), as the seed will have it."""
    rng = np.random.default_rng(seed)

    def make(role: str, ref: WeightRef) -> Weight:
        shape = ref.parts[0].shape
        if len(shape) == 2:
            shape = (sum(part.shape[0] for part in ref.parts), shape[1])
        bias = None
        if ref.bias:
            bias = rng.standard_normal(shape[0], np.float32)
        values = rng.standard_normal(shape, np.float32)
        return Weight(values, bias, quantized=bool(rng.integers(2)))

    return refs.map(make)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", CONFIG_FAMILIES)
def test_every_family_joined_or_not(family: str, seed: int) -> None:
    config = CONFIG | {"model_type": family} | FAMILY_CONFIGS.get(family, {})
    spec, refs = describe_config({k: v for k, v in config.items() if v is not None}, [])
    weights = random_weights(refs, seed)
    ops = reference(spec)
    expected = logits(ops, spec, weights, hidden_states(ops, spec, weights))
    assert expected.shape == (len(WANTED), spec.vocab_size)
    assert np.isfinite(expected).all()
    counts = {}
    for name, fuse in FUSES.items():
        instructions, _, result = record(spec, weights)
        fused = fuse(instructions, result)
        check_slots(fused, result)
        np.testing.assert_array_equal(run(reference(spec), fused, result), expected)
        counts[name] = len(fused)
    assert counts["cuda"] < counts["cpu"] < counts["as recorded"]


# Programs that no decoder has.

ROPE = RopeSpec(inv_freq=(1.0, 0.1))
ATTENTION = AttentionSpec(layer=0, heads=2, kv_heads=1, head_dim=4, scale=0.5, rope=ROPE)
SPEC = ModelSpec(
    family="test",
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    context_tokens=16,
    norm_eps=1e-5,
    attention=(ATTENTION,),
)


def vector(rng: np.random.Generator, width: int) -> Weight:
    return Weight(rng.standard_normal(width, np.float32))


def matrix(rng: np.random.Generator, outputs: int, columns: int, quantized: bool) -> Weight:
    values = rng.standard_normal((outputs, columns), np.float32) / np.float32(columns)
    return Weight(values, quantized=quantized)


KINDS = ("norm", "linear", "linear", "gated", "add", "add", "attend", "select", "softcap")


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Instruction], Value]:
    """Up to 14 operations over any values there are: read twice, read late or never read."""
    ops, rng = RecordingOps(), np.random.default_rng(draw(st.integers(0, 9)))
    values = [ops.input(8)]
    recent = st.integers(1, 4).map(lambda back: values[-min(back, len(values))])
    pick = st.one_of(st.just(-1).map(lambda at: values[at]), recent)
    for _ in range(draw(st.integers(1, 14))):
        x = draw(pick)
        match draw(st.sampled_from(KINDS)):
            case "norm":
                made = ops.norm(x, vector(rng, x.width), 1e-5)
            case "gated":
                if x.width < 16:
                    x = ops.linear(x, matrix(rng, 16, x.width, draw(st.booleans())))
                made = ops.gated(x, draw(st.sampled_from(Activation)))
            case "add":
                like = [v for v in values if (v.width, v.head) == (x.width, x.head)]
                pair = (x, draw(st.sampled_from(like)))
                made = ops.add(*(pair if draw(st.booleans()) else pair[::-1]))
            case "attend" if not x.head:  # rotated where it lies: nobody else may want it
                qkv = ops.linear(x, matrix(rng, ATTENTION.qkv_width, x.width, draw(st.booleans())))
                if draw(st.booleans()):
                    qkv = ops.head_norm(qkv, vector(rng, 4), vector(rng, 4), ATTENTION)
                made = ops.attention(ops.rope(qkv, ATTENTION), ATTENTION)
            case "select" if not x.head:
                made = ops.select(x)
            case "softcap":
                made = ops.softcap(x, 3.0)
            case _:
                width = draw(st.sampled_from((8, 16)))
                made = ops.linear(x, matrix(rng, width, x.width, draw(st.booleans())))
        values.append(made)
    return ops.instructions, draw(pick)


@settings(max_examples=200, deadline=None)
@given(programs())
def test_any_program_joined_or_not(program: tuple[list[Instruction], Value]) -> None:
    instructions, result = program
    first = np.random.default_rng(0).standard_normal((ROWS, 8), np.float32)
    expected = None
    for fuse in FUSES.values():
        fused = fuse(instructions, result)
        check_slots(fused, result)
        found = run(reference(SPEC), fused, result, first)
        assert np.isfinite(found).all()
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected)


# One thing at a time.


def test_values_share_slots_of_their_kind_only() -> None:
    ops, rng = RecordingOps(), np.random.default_rng(0)
    x = ops.input(8)
    wide = ops.linear(x, matrix(rng, 16, 8, quantized=False))
    narrow = ops.linear(wide, matrix(rng, 8, 16, quantized=False))
    rows = ops.select(narrow)
    result = ops.linear(rows, matrix(rng, 8, 8, quantized=False))
    slots = assign_slots(ops.instructions, result)
    assert [slots[v] for v in (x, wide, narrow, rows, result)] == [0, 1, 0, 2, 3]
    assert [v.kind for v in slot_values(slots)] == [v.kind for v in (x, wide, rows, result)]
    assert last_uses(ops.instructions, result) == {x: 1, wide: 2, narrow: 3, rows: 4, result: 5}


def test_join_leaves_what_somebody_else_wants() -> None:
    def rule(first: Instruction, second: Instruction) -> Instruction | None:
        return replace(second, inputs=first.inputs) if isinstance(second, Norm) else None

    weight = Weight(np.ones(8, np.float32))

    def kinds(*, read_again: bool, wanted: bool = False) -> list[str]:
        ops = RecordingOps()
        before = ops.softcap(ops.input(8), 1.0)
        result = ops.norm(before, weight, 1e-5)
        if read_again:
            result = ops.add(before, result)
        joined = join(ops.instructions, before if wanted else result, rule)
        return [type(one).__name__ for one in joined]

    assert kinds(read_again=False) == ["Input", "Norm"]
    assert kinds(read_again=True) == ["Input", "Softcap", "Norm", "Add"]
    assert kinds(read_again=False, wanted=True) == ["Input", "Softcap", "Norm"]


def test_in_place_only_where_nobody_reads_the_input_again() -> None:
    def last_input(instruction: Instruction) -> Value | None:
        return instruction.inputs[-1] if instruction.inputs else None

    ops = RecordingOps()
    x = ops.input(8)
    capped = ops.softcap(x, 1.0)  # x is read again
    twice = ops.add(capped, capped)  # it is both inputs
    total = ops.add(x, twice)
    result = ops.gated(total, Activation.SILU)  # of another kind
    found = write_in_place(ops.instructions, result, last_input)
    assert [one.in_place for one in found] == [None, None, None, twice, None]
    kept = write_in_place(ops.instructions, twice, last_input)  # now twice is the result
    assert [one.in_place for one in kept] == [None] * 5


def test_a_gpu_product_takes_one_gate_or_one_sum() -> None:
    rng, silu = np.random.default_rng(0), Activation.SILU
    x, square = np.ones((ROWS, 16), np.float32), matrix(rng, 16, 16, quantized=True)
    wide = matrix(rng, 32, 16, quantized=True)

    def check(made: Callable[[RecordingOps, Value], Value], left: str) -> None:
        ops = RecordingOps()
        result = made(ops, ops.input(16))
        fused = cuda.fuse(ops.instructions, result)
        assert [type(one).__name__ for one in fused] == ["Input", "JoinedMultiply", left]
        expected = run(reference(SPEC), ops.instructions, result, x)
        np.testing.assert_array_equal(run(reference(SPEC), fused, result, x), expected)

    check(lambda ops, v: ops.gated(ops.add(v, ops.linear(v, square)), silu), "Gate")
    check(lambda ops, v: ops.gated(ops.gated(ops.linear(v, wide), silu), silu), "Gate")
    check(lambda ops, v: ops.add(v, ops.add(v, ops.linear(v, square))), "Add")
    check(lambda ops, v: ops.add(v, ops.gated(ops.linear(v, wide), silu)), "Add")


def test_attention_does_not_spoil_what_is_read_again() -> None:
    ops = RecordingOps()
    qkv = ops.input(ATTENTION.qkv_width)
    mixed = ops.attention(ops.rope(qkv, ATTENTION), ATTENTION)
    cuda.fuse(ops.instructions, mixed)
    ops.gated(qkv, Activation.SILU)
    with pytest.raises(AssertionError, match="overwrites its input"):
        cuda.fuse(ops.instructions, mixed)
