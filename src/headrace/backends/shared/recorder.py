"""The decoder's operations as data: what is computed from what, and how long each value lives.

The decoder runs over `RecordingOps` once, which records a list of instructions. A `Value` stands
for rows that will be computed later. A backend joins instructions by its own rules (`join`), says
which ones may overwrite an input (`write_in_place`), gives each value a slot (`assign_slots`) and
lowers the instructions to its kernels. Nothing is computed here, and no array is made. Weights are
opaque: only a table's `columns` and a matrix's `outputs` are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headrace.models.decoder import DecoderWeights, hidden_states, logits
from headrace.models.spec import Activation, AttentionSpec, ModelSpec

Weight = Any  # as a backend prepared it, or only its shape


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Rows of `width` numbers. `head` values have only the rows whose logits are wanted."""

    width: int
    head: bool = False
    is_logits: bool = False  # a backend may keep these in a wider type

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """Values of the same kind can use the same slot at different times."""
        return self.width, self.head, self.is_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    inputs: tuple[Value, ...]
    output: Value
    in_place: Value | None = None  # the input whose slot the output takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(Instruction):
    """Rows that the caller writes before a run; for tests of single operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(Instruction):
    table: Weight
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Instruction):
    weight: Weight
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiply(Instruction):
    matrix: Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm(Instruction):
    q_weight: Weight
    k_weight: Weight
    attention: AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotate(Instruction):
    attention: AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend(Instruction):
    attention: AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Instruction):
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(Instruction):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Instruction):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Softcap(Instruction):
    cap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(Instruction):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(Instruction):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive(Instruction):
    """From the stage before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(Instruction):
    """To the next stage; the output is the input."""


class RecordingOps:
    """Implements `models.ops.Ops` over Value and Weight."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    def _record(self, instruction: Instruction) -> Value:
        self.instructions.append(instruction)
        return instruction.output

    def input(self, width: int) -> Value:
        return self._record(Input(inputs=(), output=Value(width)))

    def embed(self, table: Weight, scale: float) -> Value:
        output = Value(table.columns)
        return self._record(Embed(inputs=(), output=output, table=table, scale=scale))

    def norm(self, x: Value, weight: Weight, eps: float) -> Value:
        output = Value(x.width, x.head)
        return self._record(Norm(inputs=(x,), output=output, weight=weight, eps=eps))

    def linear(self, x: Value, weight: Weight) -> Value:
        output = Value(weight.outputs, x.head, is_logits=x.head)
        return self._record(Multiply(inputs=(x,), output=output, matrix=weight))

    def head_norm(
        self, qkv: Value, q_weight: Weight, k_weight: Weight, attention: AttentionSpec
    ) -> Value:
        return self._record(
            HeadNorm(
                inputs=(qkv,),
                output=Value(qkv.width, qkv.head),
                q_weight=q_weight,
                k_weight=k_weight,
                attention=attention,
            )
        )

    def rope(self, qkv: Value, attention: AttentionSpec) -> Value:
        output = Value(qkv.width, qkv.head)
        return self._record(Rotate(inputs=(qkv,), output=output, attention=attention))

    def attention(self, qkv: Value, attention: AttentionSpec) -> Value:
        output = Value(attention.q_width, qkv.head)
        return self._record(Attend(inputs=(qkv,), output=output, attention=attention))

    def gated(self, gate_up: Value, activation: Activation) -> Value:
        output = Value(gate_up.width // 2, gate_up.head)
        return self._record(Gate(inputs=(gate_up,), output=output, activation=activation))

    def add(self, x: Value, y: Value) -> Value:
        return self._record(Add(inputs=(x, y), output=Value(x.width, x.head)))

    def select(self, x: Value) -> Value:
        return self._record(Select(inputs=(x,), output=Value(x.width, head=True)))

    def softcap(self, x: Value, cap: float) -> Value:
        output = Value(x.width, x.head, x.is_logits)
        return self._record(Softcap(inputs=(x,), output=output, cap=cap))

    def reduce(self, x: Value) -> Value:
        return self._record(Reduce(inputs=(x,), output=Value(x.width, x.head)))

    def gather(self, x: Value, width: int) -> Value:
        return self._record(Gather(inputs=(x,), output=Value(width, x.head, x.is_logits)))

    def receive(self, width: int) -> Value:
        return self._record(Receive(inputs=(), output=Value(width)))

    def send(self, x: Value) -> Value:
        return self._record(Send(inputs=(x,), output=Value(x.width, x.head)))


class Recording(NamedTuple):
    instructions: list[Instruction]
    hidden: Value  # the last layer's rows
    result: Value  # logits of the wanted rows; of a stage without a head, the last layer's rows


def record(spec: ModelSpec, weights: DecoderWeights[Weight]) -> Recording:
    ops = RecordingOps()
    hidden = hidden_states(ops, spec, weights)
    result = logits(ops, spec, weights, hidden) if spec.has_head else hidden
    return Recording(ops.instructions, hidden, result)


def join(
    instructions: Iterable[Instruction],
    result: Value,
    rule: Callable[[Instruction, Instruction], Instruction | None],
) -> list[Instruction]:
    """Joins pairs of instructions, if the first one's output is the second one's last input and
    nothing else reads it. `rule(first, second)` returns one instruction for both, with the second's
    output, or None if there is none. A joined instruction may be the first of the next pair."""
    instructions = list(instructions)
    uses = Counter(value for instruction in instructions for value in instruction.inputs)
    uses[result] += 1
    made: dict[Value, Instruction] = {}  # by output, in order
    for instruction in instructions:
        last = instruction.inputs[-1] if instruction.inputs else None
        before = made.get(last) if last is not None and uses[last] == 1 else None
        joined = None if before is None else rule(before, instruction)
        if before is not None and joined is not None:
            del made[before.output]
        made[instruction.output] = joined or instruction
    return list(made.values())


def write_in_place(
    instructions: list[Instruction],
    result: Value,
    target: Callable[[Instruction], Value | None],
) -> list[Instruction]:
    """Lets instructions overwrite an input. `target` names the input that an instruction may
    overwrite; it does if that input is not read afterwards, is only one of its inputs, and has the
    same kind as the output."""
    last_use = last_uses(instructions, result)
    found: list[Instruction] = []
    for number, instruction in enumerate(instructions):
        value = target(instruction)
        if (
            value is not None
            and last_use[value] == number
            and instruction.inputs.count(value) == 1
            and value.kind == instruction.output.kind
        ):
            instruction = replace(instruction, in_place=value)
        found.append(instruction)
    return found


def last_uses(instructions: list[Instruction], result: Value) -> dict[Value, int]:
    """The number of the last instruction that reads a value; the result is read after them all."""
    found = {
        value: number
        for number, instruction in enumerate(instructions)
        for value in instruction.inputs
    }
    found[result] = len(instructions)
    return found


def assign_slots(instructions: list[Instruction], result: Value) -> dict[Value, int]:
    """A slot number for each value, from 0. Values in one slot have the same kind and are never
    alive at the same time. A value that is never read keeps its slot."""
    last_use = last_uses(instructions, result)
    slots: dict[Value, int] = {}
    free: dict[tuple[int, bool, bool], list[int]] = {}
    count = 0
    for number, instruction in enumerate(instructions):
        output = instruction.output
        if instruction.in_place is not None:
            slots[output] = slots[instruction.in_place]
        elif available := free.get(output.kind):
            slots[output] = available.pop()
        else:
            slots[output] = count
            count += 1
        for value in dict.fromkeys(instruction.inputs):
            if last_use[value] == number and value is not instruction.in_place:
                free.setdefault(value.kind, []).append(slots[value])
    return slots


def slot_values(slots: dict[Value, int]) -> list[Value]:
    """The first value of each slot, in the order of the slots."""
    found: dict[int, Value] = {}
    for value, slot in slots.items():
        found.setdefault(slot, value)
    return list(found.values())
