"""Ops that record: the decoder runs over them once, and out comes a native program.

A value is a numbered row buffer that does not exist yet. When the decoder is done, each value gets
a slot, shared with values whose last use is past, and the instructions go to the native module.
Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import _native
from headrace.models.spec import Activation, AttentionSpec

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Unloaded:
    """A matrix's shape in the place of its bytes: enough to record with, not to emit."""

    outputs: int
    columns: int
    quantized: bool = True  # all of it


Prepared = _native.Table | _native.Matrix | Floats | Unloaded  # a weight as an instruction takes it


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Rows of `width` floats; `head` ones hold only the rows whose logits are wanted."""

    width: int
    head: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    inputs: tuple[Value, ...]
    output: Value
    emit: Callable[..., None]  # (program, *input slots, output slot); in place: (program, slot)
    in_place: bool = False  # output takes the slot of the last input


@dataclass(frozen=True, slots=True)
class RowInstruction(Instruction):
    """A norm or a gate: a product of quantized weights can take its rows as they are made."""

    emit_product: Callable[..., None] | None = None  # (program, in, out, weight, added)


@dataclass(frozen=True, slots=True)
class Product(Instruction):
    weight: _native.Matrix | Unloaded | None = None


@dataclass(frozen=True, slots=True)
class Sum(Instruction):
    pass


class RecordingOps:
    """Implements `models.ops.Ops` over Value and Prepared."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self.slots: dict[Value, int] = {}  # filled in by assign_slots

    def _record(
        self,
        inputs: tuple[Value, ...],
        width: int,
        emit: Callable[..., None],
        *,
        in_place: bool = False,
        head: bool | None = None,
    ) -> Value:
        output = Value(width, inputs[0].head if head is None else head)
        self._instructions.append(Instruction(inputs, output, emit, in_place))
        return output

    def input(self, width: int) -> Value:
        """Rows that someone else writes before a run; for trying single operations."""
        return self._record((), width, lambda program, out: None, head=False)

    def embed(self, table: Prepared, scale: float) -> Value:
        assert isinstance(table, (_native.Table, Unloaded))
        return self._record(
            (), table.columns, lambda p, out: p.embed(out, table, scale), head=False
        )

    def norm(self, x: Value, weight: Prepared, eps: float) -> Value:
        output = Value(x.width, x.head)
        self._instructions.append(
            RowInstruction(
                (x,),
                output,
                lambda p, i, out: p.norm(i, out, weight, eps),
                emit_product=lambda p, i, out, w, added: p.normed_linear(
                    i, out, w, added, weight, eps
                ),
            )
        )
        return output

    def linear(self, x: Value, weight: Prepared) -> Value:
        assert isinstance(weight, (_native.Matrix, Unloaded))
        output = Value(weight.outputs, x.head)
        self._instructions.append(
            Product((x,), output, lambda p, i, out: p.linear(i, out, weight, -1), weight=weight)
        )
        return output

    def head_norm(
        self, qkv: Value, q_weight: Prepared, k_weight: Prepared, attention: AttentionSpec
    ) -> Value:
        a = attention

        def emit(p: _native.Program, slot: int) -> None:
            assert isinstance(q_weight, np.ndarray)
            assert isinstance(k_weight, np.ndarray)
            p.head_norm(slot, a.heads, a.kv_heads, a.head_dim, q_weight, k_weight, a.norm_eps)

        return self._record((qkv,), qkv.width, emit, in_place=True)

    def rope(self, qkv: Value, attention: AttentionSpec) -> Value:
        a = attention
        inv_freq = np.asarray(a.rope.inv_freq, np.float32)

        def emit(p: _native.Program, slot: int) -> None:
            scale, interleaved = a.rope.scale, a.rope.interleaved
            p.rope(slot, a.heads, a.kv_heads, a.head_dim, inv_freq, scale, interleaved)

        return self._record((qkv,), qkv.width, emit, in_place=True)

    def attention(self, qkv: Value, attention: AttentionSpec) -> Value:
        a = attention

        def emit(p: _native.Program, i: int, out: int) -> None:
            shape = (a.layer, a.heads, a.kv_heads, a.head_dim)
            p.attention(i, out, *shape, a.scale, a.softcap or 0.0, a.window or 0)

        return self._record((qkv,), a.q_width, emit)

    def gated(self, gate_up: Value, activation: Activation) -> Value:
        gelu = activation is Activation.GELU_TANH
        output = Value(gate_up.width // 2, gate_up.head)
        self._instructions.append(
            RowInstruction(
                (gate_up,),
                output,
                lambda p, i, out: p.gated(i, out, gelu),
                emit_product=lambda p, i, out, w, added: p.gated_linear(i, out, w, added, gelu),
            )
        )
        return output

    def add(self, x: Value, y: Value) -> Value:
        output = Value(x.width, x.head)
        self._instructions.append(Sum((x, y), output, lambda p, i, j, out: p.add(i, j, out)))
        return output

    def select(self, x: Value) -> Value:
        return self._record((x,), x.width, lambda p, i, out: p.select(i, out), head=True)

    def softcap(self, x: Value, cap: float) -> Value:
        return self._record((x,), x.width, lambda p, i, out: p.softcap(i, out, cap))

    def assign_slots(self, result: Value) -> list[tuple[int, bool]]:
        """Give each value a slot; the (width, head) of every slot that this takes."""
        self._instructions = fuse(self._instructions, result)
        last_use = _last_uses(self._instructions, result)
        shapes: list[tuple[int, bool]] = []
        free: dict[tuple[int, bool], list[int]] = {}
        for number, instruction in enumerate(self._instructions):
            output = instruction.output
            shape = (output.width, output.head)
            taken = instruction.inputs[-1] if instruction.in_place else None
            if taken is not None:
                if last_use[taken] != number:
                    raise AssertionError("an operation in place has an input that is used again")
                self.slots[output] = self.slots[taken]
            elif free.get(shape):
                self.slots[output] = free[shape].pop()
            else:
                self.slots[output] = len(shapes)
                shapes.append(shape)
            for value in dict.fromkeys(instruction.inputs):
                if last_use[value] == number and value is not taken:
                    free.setdefault((value.width, value.head), []).append(self.slots[value])
        return shapes

    def emit(self, program: _native.Program, result: Value) -> int:
        """Send the instructions to the program; the slot of the result."""
        numbers = [program.slot(*shape) for shape in self.assign_slots(result)]
        self.slots = {value: numbers[slot] for value, slot in self.slots.items()}
        for instruction in self._instructions:
            inputs = instruction.inputs[:-1] if instruction.in_place else instruction.inputs
            places = [self.slots[value] for value in inputs]
            instruction.emit(program, *places, self.slots[instruction.output])
        return self.slots[result]


def _last_uses(instructions: list[Instruction], result: Value) -> dict[Value, int]:
    last_use = {
        value: number
        for number, instruction in enumerate(instructions)
        for value in instruction.inputs
    }
    last_use[result] = len(instructions)
    return last_use


def fuse(instructions: list[Instruction], result: Value) -> list[Instruction]:
    """A product with the norm or the gate before it and the sum after it, where nobody else wants
    the rows in between: those rows never exist all at once. The arithmetic stays the same."""
    uses: dict[Value, int] = {result: 1}
    for instruction in instructions:
        for value in instruction.inputs:
            uses[value] = uses.get(value, 0) + 1
    last_use = _last_uses(instructions, result)
    fused: list[Instruction] = []
    number = 0
    while number < len(instructions):
        group = [instructions[number]]
        follower = group[0]
        while number + len(group) < len(instructions):
            following = instructions[number + len(group)]
            if uses.get(follower.output) != 1 or follower.output not in following.inputs:
                break
            if not _joins(follower, following):
                break
            group.append(following)
            follower = following
        fused.append(group[0] if len(group) == 1 else _join(group, last_use, number))
        number += len(group)
    return fused


def _joins(first: Instruction, second: Instruction) -> bool:
    if isinstance(first, RowInstruction) and isinstance(second, Product):
        return second.weight is not None and second.weight.quantized
    # The product must be the second of the two: it is added to what was there.
    return (
        isinstance(first, Product)
        and isinstance(second, Sum)
        and second.inputs[1] is first.output
        and second.inputs[0] is not first.output
    )


def _join(group: list[Instruction], last_use: dict[Value, int], number: int) -> Instruction:
    (product,) = (one for one in group if isinstance(one, Product))
    weight = product.weight
    before = group[0] if isinstance(group[0], RowInstruction) else None
    added = group[-1].inputs[0] if isinstance(group[-1], Sum) else None
    (source,) = group[0].inputs
    inputs = (source,) if added is None else (source, added)
    in_place = added is not None and added is not source and (last_use[added] < number + len(group))

    def emit(p: _native.Program, i: int, *slots: int) -> None:
        *_, out = slots
        to_add = -1 if added is None else slots[0]  # in place, that is the output too
        assert isinstance(weight, _native.Matrix)
        if before is None:
            p.linear(i, out, weight, to_add)
        else:
            assert isinstance(before, RowInstruction)
            assert before.emit_product is not None
            before.emit_product(p, i, out, weight, to_add)

    return Instruction(inputs, group[-1].output, emit, in_place)
