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
    in_place: bool  # output takes the slot of the (only) input
    emit: Callable[..., None]  # (program, *input slots, output slot); in place: (program, slot)


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
        self._instructions.append(Instruction(inputs, output, in_place, emit))
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
        return self._record((x,), x.width, lambda p, i, out: p.norm(i, out, weight, eps))

    def linear(self, x: Value, weight: Prepared) -> Value:
        assert isinstance(weight, (_native.Matrix, Unloaded))
        return self._record((x,), weight.outputs, lambda p, i, out: p.linear(i, out, weight))

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
        return self._record((gate_up,), gate_up.width // 2, lambda p, i, out: p.gated(i, out, gelu))

    def add(self, x: Value, y: Value) -> Value:
        return self._record((x, y), x.width, lambda p, i, j, out: p.add(i, j, out))

    def select(self, x: Value) -> Value:
        return self._record((x,), x.width, lambda p, i, out: p.select(i, out), head=True)

    def softcap(self, x: Value, cap: float) -> Value:
        return self._record((x,), x.width, lambda p, i, out: p.softcap(i, out, cap))

    def assign_slots(self, result: Value) -> list[tuple[int, bool]]:
        """Give each value a slot; the (width, head) of every slot that this takes."""
        last_use: dict[Value, int] = {}
        for number, instruction in enumerate(self._instructions):
            for value in instruction.inputs:
                last_use[value] = number
        last_use[result] = len(self._instructions)

        shapes: list[tuple[int, bool]] = []
        free: dict[tuple[int, bool], list[int]] = {}
        for number, instruction in enumerate(self._instructions):
            output = instruction.output
            shape = (output.width, output.head)
            if instruction.in_place:
                (source,) = instruction.inputs
                if last_use[source] != number:
                    raise AssertionError("an operation in place has an input that is used again")
                self.slots[output] = self.slots[source]
                continue
            if free.get(shape):
                self.slots[output] = free[shape].pop()
            else:
                self.slots[output] = len(shapes)
                shapes.append(shape)
            for value in dict.fromkeys(instruction.inputs):
                if last_use[value] == number:
                    free.setdefault((value.width, value.head), []).append(self.slots[value])
        return shapes

    def emit(self, program: _native.Program, result: Value) -> int:
        """Send the instructions to the program; the slot of the result."""
        numbers = [program.slot(*shape) for shape in self.assign_slots(result)]
        self.slots = {value: numbers[slot] for value, slot in self.slots.items()}
        for instruction in self._instructions:
            places = [] if instruction.in_place else [self.slots[v] for v in instruction.inputs]
            instruction.emit(program, *places, self.slots[instruction.output])
        return self.slots[result]
