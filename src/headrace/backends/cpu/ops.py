"""The recorded decoder as a native program: which instructions are fused into one native call, and
the call for each.

Fuses a product of quantized weights with the norm or the gate before it, and any product with the
sum after it: the rows in between never exist all at once, and the arithmetic stays the same. Knows
nothing of steps; nothing is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu import _native
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
    Rotate,
    Select,
    Softcap,
    Value,
    assign_slots,
    join,
    slot_values,
    write_in_place,
)
from headrace.models.spec import Activation

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Unloaded:
    """A matrix's shape without its bytes: enough to record and to fuse, not to emit."""

    outputs: int
    columns: int
    quantized: bool = True  # all of it


Prepared = _native.Table | _native.Matrix | Floats | Unloaded  # a weight as an instruction takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMultiply(Multiply):
    """Inputs: x, and the rows that the product is added to, if any."""

    before: Norm | Gate | None = None  # of x


def fuse(instructions: list[Instruction], result: Value) -> list[Instruction]:
    """The instructions as native calls compute them, in place where possible."""
    return write_in_place(join(instructions, result, _join), result, _target)


def emit(
    program: _native.Program, instructions: list[Instruction], result: Value
) -> dict[Value, int]:
    """Add recorded instructions to the program; returns the slot of each value."""
    fused = fuse(instructions, result)
    slots = assign_slots(fused, result)
    numbers = [program.slot(value.width, value.head) for value in slot_values(slots)]
    places = {value: numbers[slot] for value, slot in slots.items()}
    for instruction in fused:
        _emit(program, instruction, places)
    return places


def _join(first: Instruction, second: Instruction) -> Instruction | None:
    match first, second:
        case Norm() | Gate(), Multiply(matrix=matrix) if matrix.quantized:
            return JoinedMultiply(
                inputs=first.inputs, output=second.output, matrix=matrix, before=first
            )
        case Multiply(inputs=(x,)), Add(inputs=(added, _)):
            before = first.before if isinstance(first, JoinedMultiply) else None
            return JoinedMultiply(
                inputs=(x, added), output=second.output, matrix=first.matrix, before=before
            )
    return None


def _target(instruction: Instruction) -> Value | None:
    match instruction:
        case Multiply(inputs=(_, added)):
            return added
        case HeadNorm(inputs=(qkv,)) | Rotate(inputs=(qkv,)):
            return qkv
    return None


def _emit(p: _native.Program, instruction: Instruction, places: dict[Value, int]) -> None:
    x, y = (*(places[value] for value in instruction.inputs), -1, -1)[:2]  # -1: none
    out = places[instruction.output]
    match instruction:
        case Input():
            pass
        case Embed(table=table, scale=scale):
            p.embed(out, table, scale)
        case Norm(weight=weight, eps=eps):
            p.norm(x, out, weight, eps)
        case JoinedMultiply(before=Norm(weight=weight, eps=eps), matrix=matrix):
            p.normed_linear(x, out, matrix, y, weight, eps)
        case JoinedMultiply(before=Gate(activation=activation), matrix=matrix):
            p.gated_linear(x, out, matrix, y, activation is Activation.GELU_TANH)
        case Multiply(matrix=matrix):
            p.linear(x, out, matrix, y)
        case HeadNorm(attention=a, q_weight=q_weight, k_weight=k_weight):
            _check_in_place(instruction)
            p.head_norm(out, a.heads, a.kv_heads, a.head_dim, q_weight, k_weight, a.norm_eps)
        case Rotate(attention=a):
            _check_in_place(instruction)
            inv_freq = np.asarray(a.rope.inv_freq, np.float32)
            scale, interleaved = a.rope.scale, a.rope.interleaved
            p.rope(out, a.heads, a.kv_heads, a.head_dim, inv_freq, scale, interleaved)
        case Attend(attention=a):
            shape = (a.layer, a.heads, a.kv_heads, a.head_dim)
            p.attention(x, out, *shape, a.scale, a.softcap or 0.0, a.window or 0)
        case Gate(activation=activation):
            p.gated(x, out, activation is Activation.GELU_TANH)
        case Add():
            p.add(x, y, out)
        case Select():
            p.select(x, out)
        case Softcap(cap=cap):
            p.softcap(x, out, cap)
        case _:
            raise AssertionError(f"the CPU backend has no {type(instruction).__name__}")


def _check_in_place(instruction: Instruction) -> None:
    if instruction.in_place is None:
        raise AssertionError("an operation in place has an input that is used again")
