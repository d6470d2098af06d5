"""Ops that record: the decoder runs over them once, and out comes a short list of instructions.

A value is rows that do not exist yet. When the decoder is done, what one launch can do is joined
(a norm, a product, a gate and a sum; head norms, rotation and attention), and each value gets a
slot, shared with values whose last use is past. Nothing is computed here and no tensor is made:
program.py does that, and layout.py counts what it would take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.models.spec import Activation, AttentionSpec

W = Any  # a prepared weight, or its shape alone: a matrix has `rows` and `columns`


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Rows of `width` values; `head` ones are of the rows whose logits are wanted."""

    width: int
    head: bool
    is_logits: bool = False  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    output: Value
    inputs: tuple[Value, ...]
    in_place: Value | None = None  # an input whose slot the output takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(Instruction):
    table: W
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Instruction):
    weight: W
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiply(Instruction):
    """Inputs: x, and what is added to the product where there is something."""

    matrix: W
    norm: tuple[W, float] | None = None  # weight and eps, of x
    activation: Activation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm(Instruction):
    q_weight: W
    k_weight: W


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate(Instruction):
    attention: AttentionSpec
    head_norm: tuple[W, W] | None = None  # of queries and keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend(Instruction):
    """Rotates queries and keys, stores keys and values, attends. Spoils its input."""

    attention: AttentionSpec
    rotates: bool = False
    head_norm: tuple[W, W] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Instruction):
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(Instruction):
    """The first input plus the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormed(Instruction):
    """The first input plus the norm of the second."""

    weight: W
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Instruction):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Softcap(Instruction):
    cap: float


class RecordingOps:
    """Implements `models.ops.Ops` over Value and W."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    def embed(self, table: W, scale: float) -> Value:
        output = Value(table.columns, head=False)
        return self._record(Embed(output=output, inputs=(), table=table, scale=scale))

    def norm(self, x: Value, weight: W, eps: float) -> Value:
        output = Value(x.width, x.head)
        return self._record(Norm(output=output, inputs=(x,), weight=weight, eps=eps))

    def linear(self, x: Value, weight: W) -> Value:
        output = Value(weight.rows, x.head, is_logits=x.head)
        return self._record(Multiply(output=output, inputs=(x,), matrix=weight))

    def head_norm(self, qkv: Value, q_weight: W, k_weight: W, attention: AttentionSpec) -> Value:
        output = Value(qkv.width, qkv.head)
        return self._record(
            HeadNorm(output=output, inputs=(qkv,), q_weight=q_weight, k_weight=k_weight)
        )

    def rope(self, qkv: Value, attention: AttentionSpec) -> Value:
        output = Value(qkv.width, qkv.head)
        return self._record(Rotate(output=output, inputs=(qkv,), attention=attention))

    def attention(self, qkv: Value, attention: AttentionSpec) -> Value:
        output = Value(attention.q_width, qkv.head)
        return self._record(Attend(output=output, inputs=(qkv,), attention=attention))

    def gated(self, gate_up: Value, activation: Activation) -> Value:
        output = Value(gate_up.width // 2, gate_up.head)
        return self._record(Gate(output=output, inputs=(gate_up,), activation=activation))

    def add(self, x: Value, y: Value) -> Value:
        return self._record(Add(output=Value(x.width, x.head), inputs=(x, y)))

    def select(self, x: Value) -> Value:
        return self._record(Select(output=Value(x.width, head=True), inputs=(x,)))

    def softcap(self, x: Value, cap: float) -> Value:
        output = Value(x.width, x.head, x.is_logits)
        return self._record(Softcap(output=output, inputs=(x,), cap=cap))

    def _record(self, instruction: Instruction) -> Value:
        self.instructions.append(instruction)
        return instruction.output


def fuse(instructions: list[Instruction], result: Value) -> list[Instruction]:
    """Joined where nobody else wants the rows in between; what is left stays as it was."""
    uses: dict[Value, int] = {result: 1}
    for instruction in instructions:
        for value in instruction.inputs:
            uses[value] = uses.get(value, 0) + 1
    made: dict[Value, Instruction] = {}  # by output; in order
    for instruction in instructions:
        last = instruction.inputs[-1] if instruction.inputs else None
        before = made.get(last) if last is not None and uses[last] == 1 else None
        joined = None if before is None else _join(before, instruction)
        if joined is not None and before is not None:
            del made[before.output]
        made[instruction.output] = instruction if joined is None else joined
    return _in_place(list(made.values()), result)


def _join(first: Instruction, second: Instruction) -> Instruction | None:
    """Both as one, with the second's output; None if there is nothing that does both."""
    output = second.output
    match first, second:
        case Norm(), Multiply(norm=None):
            norm = (first.weight, first.eps)
            inputs = (*first.inputs, *second.inputs[1:])
            return replace(second, inputs=inputs, norm=norm)
        case Multiply(activation=None), Gate() if len(first.inputs) == 1:
            return replace(first, output=output, activation=second.activation)
        case Multiply(activation=None), Add() if len(first.inputs) == 1:
            return replace(first, output=output, inputs=(*first.inputs, second.inputs[0]))
        case Norm(), Add():
            return AddNormed(
                output=output,
                inputs=(second.inputs[0], *first.inputs),
                weight=first.weight,
                eps=first.eps,
            )
        case HeadNorm(), Rotate(head_norm=None):
            pair = (first.q_weight, first.k_weight)
            return replace(second, inputs=first.inputs, head_norm=pair)
        case Rotate(), Attend(rotates=False):
            return replace(second, inputs=first.inputs, rotates=True, head_norm=first.head_norm)
    return None


def _in_place(instructions: list[Instruction], result: Value) -> list[Instruction]:
    """Sums into what they are added to, and soft caps, where that is not needed any more."""
    last_use = last_uses(instructions, result)
    found: list[Instruction] = []
    for number, instruction in enumerate(instructions):
        target: Value | None = None
        match instruction:
            case Multiply(inputs=(x, added)) if added is not x:
                target = added
            case AddNormed(inputs=(added, _)) | Add(inputs=(added, _)):
                target = added
            case Softcap(inputs=(x,)):
                target = x
        if target is not None and last_use[target] == number:
            instruction = replace(instruction, in_place=target)
        found.append(instruction)
    return found


def last_uses(instructions: list[Instruction], result: Value) -> dict[Value, int]:
    found = {
        value: number
        for number, instruction in enumerate(instructions)
        for value in instruction.inputs
    }
    found[result] = len(instructions)
    return found


def assign_slots(instructions: list[Instruction], result: Value) -> dict[Value, int]:
    """A slot for each value; values with the same slot are alike and never alive together."""
    last_use = last_uses(instructions, result)
    slots: dict[Value, int] = {}
    free: dict[tuple[int, bool, bool], list[int]] = {}
    count = 0
    for number, instruction in enumerate(instructions):
        output = instruction.output
        kind = (output.width, output.head, output.is_logits)
        if instruction.in_place is not None:
            slots[output] = slots[instruction.in_place]
        elif free.get(kind):
            slots[output] = free[kind].pop()
        else:
            slots[output] = count
            count += 1
        for value in dict.fromkeys(instruction.inputs):
            if last_use[value] == number and value is not instruction.in_place:
                kind = (value.width, value.head, value.is_logits)
                free.setdefault(kind, []).append(slots[value])
    return slots
