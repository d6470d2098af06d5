"""Which recorded instructions the CUDA backend fuses, and which run in place.

A norm, a product, a gate and a sum become one product; head norms, rotation and attention one
attention; a norm and a sum one sum. Creates no tensor: program.py launches the result, and
layout.py computes its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.backends.shared.recorder import (
    Add,
    Attend,
    Gate,
    HeadNorm,
    Instruction,
    Multiply,
    Norm,
    Reduce,
    Rotate,
    Send,
    Softcap,
    Value,
    Weight,
    join,
    last_uses,
    write_in_place,
)
from headrace.models.spec import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMultiply(Multiply):
    """Inputs: x, and the rows that are added to the product, if any."""

    norm: Norm | None = None  # of x
    activation: Activation | None = None  # of the product
    is_reduced: bool = False  # summed over ranks, what is added counted once


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormed(Instruction):
    """The first input plus the norm of the second."""

    weight: Weight
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedRotate(Rotate):
    head_norm: HeadNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedAttend(Attend):
    """Rotates queries and keys, stores keys and values, attends. Overwrites its input."""

    head_norm: HeadNorm | None


def fuse(instructions: list[Instruction], result: Value) -> list[Instruction]:
    """Fuses instructions if nothing else reads the rows in between. Sums and soft caps overwrite
    their input if it is not needed any more."""
    joined = join(instructions, result, _join)
    last_use = last_uses(joined, result)
    for number, instruction in enumerate(joined):
        if isinstance(instruction, RotatedAttend) and last_use[instruction.inputs[0]] != number:
            raise AssertionError("attention overwrites its input, which is used again")
    return write_in_place(joined, result, _target)


def as_joined(multiply: Multiply) -> JoinedMultiply:
    if isinstance(multiply, JoinedMultiply):
        return multiply
    return JoinedMultiply(inputs=multiply.inputs, output=multiply.output, matrix=multiply.matrix)


def _join(first: Instruction, second: Instruction) -> Instruction | None:
    output = second.output
    if isinstance(first, Multiply):
        first = as_joined(first)
    match first, second:
        case Norm(), Multiply():
            return replace(as_joined(second), inputs=first.inputs, norm=first)
        case JoinedMultiply(inputs=(_,), activation=None), Gate(activation=activation):
            return replace(first, output=output, activation=activation)
        case JoinedMultiply(inputs=(_,), activation=None), Reduce():
            return replace(first, output=output, is_reduced=True)
        case JoinedMultiply(inputs=(x,), activation=None), Add(inputs=(added, _)):
            return replace(first, output=output, inputs=(x, added))
        case Norm(), Add(inputs=(added, _)):
            inputs = (added, *first.inputs)
            return AddNormed(inputs=inputs, output=output, weight=first.weight, eps=first.eps)
        case HeadNorm(), Rotate(attention=attention):
            return NormedRotate(
                inputs=first.inputs, output=output, attention=attention, head_norm=first
            )
        case Rotate(), Attend(attention=attention):
            head_norm = first.head_norm if isinstance(first, NormedRotate) else None
            return RotatedAttend(
                inputs=first.inputs, output=output, attention=attention, head_norm=head_norm
            )
    return None


def _target(instruction: Instruction) -> Value | None:
    match instruction:
        case Multiply(inputs=(_, added)) | AddNormed(inputs=(added, _)) | Add(inputs=(added, _)):
            return added
        case Softcap(inputs=(x,)) | Reduce(inputs=(x,)) | Send(inputs=(x,)):
            return x
    return None
