"""The native module's types (kernels/bindings.cpp). Arrays are C-contiguous."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

def paths() -> list[str]:
    """Kernel paths this machine can run, best first."""

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class KvPool:
    def __init__(
        self, blocks: int, layers: int, kv_heads: int, head_dim: int, dtype: str
    ) -> None: ...
    def copy(self, pairs: Ints) -> None:
        """Whole blocks, [n, 2] (from, to), one after the other."""
    @property
    def bytes(self) -> int: ...

class Table:
    """A tensor as it lies in the mapped file."""

    def __init__(self, format: str, rows: int, columns: int, data: NDArray[np.uint8]) -> None: ...
    @property
    def columns(self) -> int: ...

class Matrix:
    """A packed linear weight; the tables may go once it is made."""

    def __init__(self, parts: list[Table], bias: Floats | None, threads: int) -> None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class Program:
    def __init__(
        self,
        pool: Pool,
        kv: KvPool | None,
        max_rows: int,
        max_wanted: int,
        context: int,
        path: str | None,
    ) -> None: ...
    def slot(self, width: int, head: bool = False) -> int: ...
    def embed(self, out: int, table: Table, scale: float, /) -> None: ...
    def norm(self, in_: int, out: int, weight: Floats, eps: float, /) -> None: ...
    def linear(self, in_: int, out: int, weight: Matrix, /) -> None: ...
    def head_norm(
        self,
        slot: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q: Floats,
        k: Floats,
        eps: float,
        /,
    ) -> None: ...
    def rope(
        self,
        slot: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        inv_freq: Floats,
        scale: float,
        interleaved: bool,
        /,
    ) -> None: ...
    def attention(
        self,
        in_: int,
        out: int,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        softcap: float,
        window: int,
        /,
    ) -> None: ...
    def gated(self, in_: int, out: int, gelu: bool, /) -> None: ...
    def add(self, x: int, y: int, out: int, /) -> None: ...
    def softcap(self, in_: int, out: int, cap: float, /) -> None: ...
    def select(self, in_: int, out: int, /) -> None: ...
    def finish(self, logits: int = -1) -> None: ...
    def run(
        self,
        tokens: Ints,
        positions: Ints,
        entries: Ints,
        tables: Ints,
        wanted_rows: Ints,
        targets: Ints,
        draws: Floats,
        uniforms: NDArray[np.float64],
        out_tokens: Ints,
        out_logprobs: Floats,
    ) -> None: ...
    def slot_view(self, slot: int, rows: int) -> Floats:
        """The first rows of a slot, shared with the program."""
