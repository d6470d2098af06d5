"""The recorded decoder as kernel launches over buffers with fixed addresses.

The body computes a step's tokens through every layer; the head computes the logits of the wanted
rows. Rows, positions, slots and blocks are read on the device from a step's inputs, so that the
launches for a shape are always the same and can be captured into a CUDA graph. Knows neither plans
nor sampling.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from headrace.backends.cuda.attention.kernel import AttentionKernel, AttentionWorkspace
from headrace.backends.cuda.attention.plan import WorkShape, attention_windows
from headrace.backends.cuda.attention.rope import RopeKernel, rope_table
from headrace.backends.cuda.draws.logits_kernels import launch_softcap
from headrace.backends.cuda.embed import embed, select_rows
from headrace.backends.cuda.kv import KvPool
from headrace.backends.cuda.ops import AddNormed, RotatedAttend, as_joined, fuse
from headrace.backends.cuda.products import launches
from headrace.backends.cuda.products.choice import Choices
from headrace.backends.cuda.products.matrix import Matrix
from headrace.backends.cuda.products.product import Norm as ProductNorm
from headrace.backends.cuda.products.product import Product, Workspace
from headrace.backends.cuda.step.inputs import StepInputs
from headrace.backends.cuda.step.shapes import StepShape
from headrace.backends.shared.recorder import (
    Embed,
    Gather,
    HeadNorm,
    Instruction,
    Multiply,
    Norm,
    Receive,
    Reduce,
    Select,
    Send,
    Softcap,
    Value,
    assign_slots,
    record,
    slot_values,
)
from headrace.core.ranks import Ranks
from headrace.models.decoder import DecoderWeights
from headrace.models.sharding import vocab_spans
from headrace.models.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Table:
    """The embedding: [vocab, hidden]."""

    data: torch.Tensor

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    @property
    def rows(self) -> int:
        return self.data.shape[0]


Prepared = Matrix | Table | torch.Tensor  # a weight as an instruction takes it

BodyLaunch = Callable[[StepShape], None]
HeadLaunch = Callable[[int, torch.Tensor], None]  # number of rows, and their indexes in the step


class Program:
    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights[Prepared],
        kv: KvPool,
        inputs: StepInputs,
        shape: WorkShape,
        *,
        max_rows: int,
        logit_rows: int,
        context_tokens: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        choices: Choices | None = None,
        dependent: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """With `ranks`, model and weights are this rank's share."""
        self._ranks = ranks
        self._vocab = vocab_spans(spec.vocab_size, 1 if ranks is None else ranks.count)
        self._kv, self._inputs, self._shape = kv, inputs, shape
        self._block_tokens, self._context_tokens = block_tokens, context_tokens
        self._device, self._dependent = device, dependent
        self._windows = attention_windows(spec)
        self._ropes: dict[RopeSpec, torch.Tensor] = {}
        self._attention = AttentionWorkspace(shape, spec.attention[0].head_dim, device)
        self._products = Workspace(
            find_matrices(weights),
            max_rows=max(max_rows, logit_rows),
            device=device,
            dtype=dtype,
            choices=choices,
            pdl=dependent,
            normed_columns=spec.hidden_size,
        )
        recorded, hidden, result = record(spec, weights)
        instructions = fuse(recorded, result)
        slots = assign_slots(instructions, result)
        self._buffers = _make_buffers(slot_values(slots), max_rows, logit_rows, dtype, device)
        self._places = {value: self._buffers[slot] for value, slot in slots.items()}
        self.hidden = self._places[hidden]
        self.logits = self._places[result]
        body = [i for i in instructions if not i.output.head]
        head = [i for i in instructions if i.output.head]
        self.instructions = [*body, *head]
        self._body = [self._body_launch(i) for i in body]
        self._head = [self._head_launch(i) for i in head]

    @property
    def launches(self) -> int:
        """Number of launches of body and head; a product may take several."""
        return len(self._body) + len(self._head)

    @property
    def nbytes(self) -> int:
        """Buffers, workspaces and tables."""
        attention = self._attention
        held = [*self._buffers, *self._ropes.values()]
        held += [attention.sums, attention.weights, attention.counters]
        return sum(tensor.nbytes for tensor in held) + self._products.bytes

    def run_body(self, shape: StepShape) -> None:
        for launch in self._body:
            launch(shape)

    def run_head(self, rows: int, wanted: torch.Tensor) -> torch.Tensor:
        """Logits of the first `rows` rows that `wanted` (i32) names: [rows, vocab]"""
        for launch in self._head:
            launch(rows, wanted)
        return self.logits[:rows]

    @contextlib.contextmanager
    def marked(
        self, mark: Callable[[int], contextlib.AbstractContextManager[None]]
    ) -> Iterator[None]:
        """For profiles: until it ends, the launches of `instructions[n]` run inside `mark(n)`."""
        body, head = self._body, self._head

        def marked_body(number: int, launch: BodyLaunch) -> BodyLaunch:
            def run(shape: StepShape) -> None:
                with mark(number):
                    launch(shape)

            return run

        def marked_head(number: int, launch: HeadLaunch) -> HeadLaunch:
            def run(rows: int, wanted: torch.Tensor) -> None:
                with mark(number):
                    launch(rows, wanted)

            return run

        self._body = [marked_body(n, launch) for n, launch in enumerate(body)]
        self._head = [marked_head(n, launch) for n, launch in enumerate(head, len(body))]
        try:
            yield
        finally:
            self._body, self._head = body, head

    def _body_launch(self, instruction: Instruction) -> BodyLaunch:
        match instruction:
            case Embed():
                return self._embed(instruction)
            case RotatedAttend():
                return self._attend(instruction)
            case Multiply():
                multiply = self._multiply(instruction)
                return lambda shape: multiply(shape.rows)
            case Reduce():
                x = self._places[instruction.output]
                assert instruction.in_place is not None
                return lambda shape: self._reduce(x[: shape.rows])
            case Receive():
                received = self._places[instruction.output]
                return lambda shape: self._receive(received[: shape.rows])
            case Send():
                sent = self._places[instruction.output]
                assert instruction.in_place is not None
                return lambda shape: self._send(sent[: shape.rows])
            case AddNormed(inputs=(added, y)):
                out, source = self._places[added], self._places[y]
                assert instruction.in_place is added
                weight, eps, pdl = _vector(instruction.weight), instruction.eps, self._dependent
                return lambda shape: launches.add_normed(
                    source, weight, eps, out, rows=shape.rows, pdl=pdl
                )
            case Norm():
                norm = self._norm(instruction)
                return lambda shape: norm(shape.rows)
        raise AssertionError(f"nothing computes a {type(instruction).__name__} by itself")

    def _head_launch(self, instruction: Instruction) -> HeadLaunch:
        out = self._places[instruction.output]
        match instruction:
            case Select(inputs=(x,)):
                source, dependent = self._places[x], self._dependent
                return lambda rows, wanted: select_rows(
                    source, wanted, out, rows, dependent=dependent
                )
            case Multiply():
                multiply = self._multiply(instruction)
                return lambda rows, wanted: multiply(rows)
            case Norm():
                norm = self._norm(instruction)
                return lambda rows, wanted: norm(rows)
            case Gather(inputs=(x,)):
                source = self._places[x]
                return lambda rows, wanted: self._gather(source[:rows], out[:rows])
            case Softcap(cap=cap):
                assert instruction.in_place is not None
                return lambda rows, wanted: launch_softcap(out[:rows], cap)
        raise AssertionError(f"nothing computes a {type(instruction).__name__} by itself")

    def _embed(self, instruction: Embed) -> BodyLaunch:
        table, out = instruction.table, self._places[instruction.output]
        assert isinstance(table, Table)
        tokens, scale, dependent = self._inputs.tokens, instruction.scale, self._dependent
        data = table.data
        first = None if self._ranks is None else self._vocab[self._ranks.rank][0]
        return lambda shape: embed(
            tokens, data, out, shape.rows, scale=scale, first=first, dependent=dependent
        )

    def _multiply(self, instruction: Multiply) -> Callable[[int], None]:
        joined = as_joined(instruction)
        matrix, norm = joined.matrix, joined.norm
        assert isinstance(matrix, Matrix)
        x, *added = (self._places[value] for value in joined.inputs)
        out = self._places[joined.output]
        if joined.is_reduced and self._ranks is not None and self._ranks.rank:
            added = []  # the first rank adds it
        product = Product(
            matrix,
            self._products,
            norm=None if norm is None else ProductNorm(_vector(norm.weight), norm.eps),
            activation=joined.activation,
            add=bool(added),
        )
        residual = added[0] if added else None
        if not joined.is_reduced:
            return lambda rows: product(x, out, residual, rows=rows)

        def launch(rows: int) -> None:
            product(x, out, residual, rows=rows)
            self._reduce(out[:rows])

        return launch

    def _reduce(self, x: torch.Tensor) -> None:
        assert self._ranks is not None
        found = self._ranks.sum(x)
        if found is not x:
            x.copy_(found)

    def _receive(self, x: torch.Tensor) -> None:
        assert self._ranks is not None
        found = self._ranks.receive(x)
        if found is not x:
            x.copy_(found)

    def _send(self, x: torch.Tensor) -> None:
        assert self._ranks is not None
        self._ranks.send(x)

    def _gather(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Logits of the whole vocabulary, on the first rank."""
        assert self._ranks is not None
        found = self._ranks.gather(part, [end - first for first, end in self._vocab])
        if found is not None:
            out.copy_(found)

    def _norm(self, instruction: Norm) -> Callable[[int], None]:
        (source,) = (self._places[value] for value in instruction.inputs)
        out, eps, pdl = self._places[instruction.output], instruction.eps, self._dependent
        weight = _vector(instruction.weight)
        return lambda rows: launches.prepare(
            source[:rows], out[:rows], weight=weight, eps=eps, pdl=pdl
        )

    def _attend(self, instruction: RotatedAttend) -> BodyLaunch:
        spec, norms = instruction.attention, instruction.head_norm
        if spec.rope not in self._ropes:
            self._ropes[spec.rope] = rope_table(spec.rope, self._context_tokens, self._device)
        joint = norms if spec.joint_norm else None  # the rope kernel norms each head by itself
        each = None if spec.joint_norm else norms
        rope = RopeKernel(
            spec,
            self._block_tokens,
            self._ropes[spec.rope],
            q_norm=None if each is None else _vector(each.q_weight),
            k_norm=None if each is None else _vector(each.k_weight),
            dependent=self._dependent,
        )
        shared = (spec, self._shape, self._block_tokens, self._attention)
        kernel = AttentionKernel(*shared, dependent=self._dependent)
        qkv, out = self._places[instruction.inputs[0]], self._places[instruction.output]
        layer = self._kv.layers[spec.layer]
        which = self._windows.index(spec.window)
        inputs = self._inputs
        norm_jointly = None if joint is None else self._joint_norm(joint, qkv)

        def launch(shape: StepShape) -> None:
            views = inputs.views(shape)
            if norm_jointly is not None:
                norm_jointly(shape.rows)
            work = (layer, inputs.tables, views.work[which], views.items, views.tile)
            rope.launch(qkv, layer, views.positions, views.slots, shape.rows)
            kernel.launch(qkv, *work, out)

        return launch

    def _joint_norm(self, instruction: HeadNorm, qkv: torch.Tensor) -> Callable[[int], None]:
        """Queries and keys in place, a row at a time: two launches."""
        spec, pdl = instruction.attention, self._dependent
        queries, keys = qkv[:, : spec.q_width], qkv[:, spec.q_width : -spec.kv_width]
        q_weight, k_weight = _vector(instruction.q_weight), _vector(instruction.k_weight)
        ranks = self._ranks
        if ranks is not None:
            return partial(_norm_together, ranks, queries, keys, q_weight, k_weight, spec.norm_eps)

        def launch(rows: int) -> None:
            for part, weight in ((queries[:rows], q_weight), (keys[:rows], k_weight)):
                launches.prepare(part, part, weight=weight, eps=spec.norm_eps, pdl=pdl)

        return launch


def _norm_together(
    ranks: Ranks,
    queries: torch.Tensor,
    keys: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    rows: int,
) -> None:
    """A norm over heads of several ranks, in place. Heads that several ranks have count as often in
    the sum as in the number."""
    parts = [part[:rows].float() for part in (queries, keys)]
    sums = ranks.sum(torch.stack([part.square().sum(dim=1) for part in parts], dim=1))
    for at, (to, part, weight) in enumerate(
        zip((queries, keys), parts, (q_weight, k_weight), strict=True)
    ):
        mean = sums[:, at : at + 1] / (ranks.count * part.shape[1])
        to[:rows] = part * torch.rsqrt(mean + eps) * weight


def _make_buffers(
    values: list[Value],
    max_rows: int,
    logit_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Filled with zeros, because padding rows are read without having been written."""
    return [
        torch.zeros(
            (logit_rows if value.head else max_rows, value.width),
            dtype=torch.float32 if value.is_logits else dtype,
            device=device,
        )
        for value in values
    ]


def _vector(weight: Prepared) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight


def find_matrices(weights: DecoderWeights[Prepared]) -> list[Matrix]:
    found: list[Matrix] = []

    def look(role: str, weight: Prepared) -> None:
        if isinstance(weight, Matrix):
            found.append(weight)

    weights.map(look)
    return found
