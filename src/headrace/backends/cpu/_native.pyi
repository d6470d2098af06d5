"""The native module's types (kernels/bindings.cpp). Arrays are C-contiguous."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]

def paths() -> list[str]:
    """Kernel paths this machine can run, best first."""

def measure_peaks(
    pool: Pool, read_bytes: int, path: str | None = None
) -> tuple[float, float, float]:
    """What all threads together can do a second: int8 multiply-adds, float32 multiply-adds, bytes
    read from `read_bytes` of memory. Takes a fraction of a second."""

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def take_mean_members(self) -> float:
        """How many threads worked together, on average since the last time; not while they do."""

class Attendance:
    """Whether a thread is worth waiting for (kernels/attendance.h). Times are in seconds."""

    def __init__(self) -> None: ...
    def late(self, now: float, waited: float, members: int) -> bool:
        """It was waited for until now, one of so many. True: it is left out from now on."""
    def returns(self, now: float, members: int) -> bool:
        """Whether one who is out may be tried again."""
    @property
    def out(self) -> bool: ...

class KvPool:
    def __init__(
        self, blocks: int, layers: int, kv_heads: int, head_dim: int, dtype: str
    ) -> None: ...
    def copy(self, pairs: Ints) -> None:
        """Whole blocks, [n, 2] (from, to), one after the other."""
    def read(self, block: int, out: NDArray[np.uint8]) -> None:
        """A copy of a block's bytes, `block_bytes` of them."""
    def write(self, block: int, bytes: NDArray[np.uint8]) -> None: ...
    @property
    def block_bytes(self) -> int: ...
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
    def quantized(self) -> bool:
        """All of it."""
    @property
    def bytes(self) -> int: ...

class Adjustments:
    """What is done to some draws' logits: numbers of rows of the plan (with `places`, also which of
    the row's draws; without, the first), and for each its penalties (repetition, presence,
    frequency), what limits it (1: `allowed`, 2: its mask, 3: both), and sparse parts: (offsets,
    ids), (offsets, ids, values) or (offsets, mask bytes), one more offset than draws."""

    def __init__(
        self,
        rows: Ints,
        penalties: Floats,
        limited: Ints,
        bias: tuple[Ints, Ints, Floats],
        allowed: tuple[Ints, Ints],
        banned: tuple[Ints, Ints],
        seen: tuple[Ints, Ints],
        counts: tuple[Ints, Ints, Floats],
        masks: tuple[Ints, NDArray[np.uint8]],
        places: Ints | None = None,
    ) -> None: ...

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
    def linear(self, in_: int, out: int, weight: Matrix, added: int, /) -> None:
        """`added` is the slot of what the product is added to, or -1; it may be `out` itself."""
    def normed_linear(
        self, in_: int, out: int, weight: Matrix, added: int, norm: Floats, eps: float, /
    ) -> None: ...
    def gated_linear(
        self, in_: int, out: int, weight: Matrix, added: int, gelu: bool, /
    ) -> None: ...
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
    @property
    def progress(self) -> int:
        """Instructions begun so far; may be read while a step runs."""
    @property
    def sample_s(self) -> float:
        """What sampling took in the last step."""
    @property
    def run_s(self) -> float:
        """What the last step took, all of it that is native."""
    @property
    def activation_bytes(self) -> int:
        """Slots, rope tables and scratch; all there once finished."""
    def run(
        self,
        tokens: list[int],
        counts: list[int],
        starts: list[int],
        tables: list[list[int]],
        draws: list[tuple[float, ...] | None],
        uniforms: list[float],
        asked: list[tuple[int, list[int], int]] = ...,
        adjustments: Adjustments | None = None,
        drafted: list[tuple[int, list[float]]] = ...,
    ) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
        """A plan's columns (core/step.py), computed. `draws`: temperature, top_p, min_p,
        typical_p, top_k. `asked` are (row, targets or nothing, top_logprobs), rows rising.
        `drafted` are (row, uniforms of the draws after each draft), rows rising.

        Of each wanted row (a sequence's targets, then its draws) the token, its logprob, and the
        likeliest with theirs: no lists at all if nobody asked for these. A failure comes in the
        place of a token (backends/shared/answers.py)."""
    def profile(self, on: bool) -> None:
        """Time each operation from now on, or no longer."""
    def take_profile(self) -> list[tuple[str, int, float, float, float, float]]:
        """(operation, calls, seconds, seconds worked by all threads, multiply-adds, bytes) since
        the profile was last taken."""
    def slot_view(self, slot: int, rows: int) -> Floats:
        """The first rows of a slot, shared with the program."""
