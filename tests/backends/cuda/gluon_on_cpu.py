"""Runs a Gluon kernel's Python as it stands, over torch tensors: Triton's interpreter can't.

What is asynchronous on a device happens as late as it may: a copy's target is NaN until someone
waits for its barrier, a product reads its operands when it is waited for. So a wait that is missing
or comes too late, or a buffer that is filled while a product still reads it, shows in the result; a
wait for what never comes is an error. Layouts are not modelled: the compiler checks those.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction


class Pointer:
    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.memory, self.at = tensor, at
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)


class Descriptor:
    """Lines of the pool, `rows` at a time."""

    def __init__(self, lines: torch.Tensor, rows: int) -> None:
        self.lines, self.rows, self.dtype, self.layout = lines, rows, lines.dtype, None
        self.block_type = SimpleNamespace(nbytes=rows * lines.shape[1] * lines.element_size())


class Shared:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape = tensor, tensor.shape

    def index(self, i: int) -> Shared:
        return Shared(self.tensor[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tensor.permute(order))

    def load(self, layout: Any) -> torch.Tensor:
        return self.tensor.clone()

    def store(self, values: torch.Tensor) -> None:
        self.tensor.copy_(values)


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [SimpleNamespace(done=0, expected=0, copies=[]) for _ in range(count)]

    def index(self, i: int) -> SimpleNamespace:
        return self.all[int(i)]


class Product:
    def __init__(self, a: torch.Tensor, b: Shared, acc: Any, use_acc: bool) -> None:
        self.operands, self.acc, self.use_acc = (a, b), acc, use_acc
        self.value: torch.Tensor | None = None

    def run(self) -> None:
        a, b = self.operands
        self.value = a.float() @ b.tensor.float()
        if self.use_acc:
            self.value = self.value + value_of(self.acc)


def value_of(x: Any) -> torch.Tensor:
    found = x.value if isinstance(x, Product) else x
    assert isinstance(found, torch.Tensor), "used before it was waited for"
    return found


class Device:
    """One program's: what the kernel's names stand for."""

    def __init__(self) -> None:
        self.program, self.queue, self.barriers = 0, list[Product](), list[Barriers]()

    def load(self, pointer: Pointer, mask: Any = True, other: float = 0) -> torch.Tensor:
        at = torch.as_tensor(pointer.at)
        flat, mask = pointer.memory.reshape(-1), torch.as_tensor(mask)
        assert bool(((at >= 0) & (at < len(flat)) | ~mask).all()), "read outside of a tensor"
        found = flat[torch.where(mask, at, torch.zeros_like(at))]
        return torch.where(mask, found, torch.full_like(found, other))

    def store(self, pointer: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
        mask = mask.expand(values.shape)
        pointer.memory.view(-1)[pointer.at.expand(values.shape)[mask]] = values[mask]

    def allocate(self, kind: torch.dtype, shape: list[int], layout: Any) -> Any:
        if kind is torch.int64:
            self.barriers.append(Barriers(shape[0]))
            return self.barriers[-1]
        return Shared(torch.full(shape, math.nan, dtype=kind))

    def expect(self, barrier: SimpleNamespace, size: int, pred: Any = True) -> None:
        if pred:
            assert barrier.expected == 0, "asked for more before the last came"
            barrier.expected = size

    def copy(
        self, source: Descriptor, at: list[Any], barrier: Any, to: Shared, pred: Any = True
    ) -> None:
        if pred:
            to.tensor.fill_(math.nan)
            first = int(at[0])
            barrier.copies.append((to, source.lines[first : first + source.rows]))

    def wait(self, barrier: SimpleNamespace, phase: Any) -> None:
        sizes = sum(to.tensor.nbytes for to, _ in barrier.copies)
        if barrier.expected and sizes == barrier.expected:
            for to, values in barrier.copies:
                to.tensor.copy_(values)
            barrier.done, barrier.expected, barrier.copies = barrier.done + 1, 0, []
        assert barrier.done % 2 != int(phase), "waits for ever"

    def multiply(
        self, a: torch.Tensor, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async
        self.queue.append(Product(a, b, acc, use_acc))
        return self.queue[-1]

    def wait_products(self, left: int, deps: list[Any]) -> Any:
        while len(self.queue) > left:
            self.queue.pop(0).run()
        values = [value_of(x) for x in deps]
        return values if len(values) > 1 else values[0]


def run_on_cpu(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, warps: int) -> Any:
    """`name` of the module as a function: (programs, *args). Tensors are passed as `Pointer`."""

    def nothing(*args: Any, **named: Any) -> None:
        return None

    device = Device()
    layouts = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout")
    language: dict[str, Any] = dict.fromkeys(layouts, nothing)
    language |= {"program_id": lambda axis: device.program, "num_warps": lambda: warps}
    language |= {"load": device.load, "store": device.store, "static_range": range}
    language |= {"allocate_shared_memory": device.allocate, "thread_barrier": nothing}
    language |= {"int64": torch.int64, "float32": torch.float32, "constexpr": None}
    language |= {"arange": lambda start, end, layout: torch.arange(start, end)}
    language |= {"full": lambda shape, x, kind, layout: torch.full(shape, x, dtype=kind)}
    language |= {"zeros": lambda shape, kind, layout: torch.zeros(shape, dtype=kind)}
    language |= {"convert_layout": lambda x, layout: x, "where": torch.where}
    language |= {"max": lambda x, axis: x.amax(axis), "sum": lambda x, axis: x.sum(axis)}
    language |= {"exp": torch.exp, "exp2": torch.exp2}
    language |= {"maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b))}
    barrier = {"MBarrierLayout": nothing, "init": nothing}
    barrier |= {"invalidate": nothing, "expect": device.expect, "wait": device.wait}
    found: dict[str, Any] = {
        key: value.fn for key, value in vars(module).items() if isinstance(value, GluonJITFunction)
    }
    found |= {"gl": SimpleNamespace(**language), "mbarrier": SimpleNamespace(**barrier)}
    found |= {"tma": SimpleNamespace(async_copy_global_to_shared=device.copy)}
    found |= {"warpgroup_mma": device.multiply, "warpgroup_mma_wait": device.wait_products}
    found |= {"fence_async_shared": nothing}
    for key, value in found.items():
        monkeypatch.setattr(module, key, value)

    def launch(programs: int, *args: Any) -> None:
        for device.program in range(programs):
            found[name](*args)
            assert not device.queue
            assert not any(one.expected for group in device.barriers for one in group.all)
            device.barriers.clear()

    return launch
